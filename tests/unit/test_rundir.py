"""The run directory: whole files only, plain JSON, and no foreign files touched."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path

import pytest
import torch

from peers.rundir import RunDirectory
from swarm.errors import UserError
from swarm.manifest import default_manifest

NOON = datetime(2024, 5, 6, 12, 30, 59)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def test_default_name_carries_the_time_and_is_made_unique(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [str(RunDirectory.create(name="tiny", now=NOON).path) for _ in range(3)]
    first = "runs/tiny-20240506-123059"
    assert names == [first, f"{first}-2", f"{first}-3"]
    assert all(Path(name).is_dir() for name in names)


def test_parents_are_made(tmp_path):
    assert RunDirectory.create(tmp_path / "a" / "b").path.is_dir()


def test_making_the_object_touches_nothing(tmp_path):
    RunDirectory(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_refuses_a_directory_with_other_files(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match=r"holds other files and is not a run directory"):
        RunDirectory.create(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("below", ["", "below"])
def test_refuses_a_path_that_is_a_file_or_lies_below_one(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not a directory"):
        RunDirectory.create(tmp_path / "file" / below)


def test_says_when_it_cannot_be_made():
    with pytest.raises(UserError, match=r"cannot make the run directory /proc/no"):
        RunDirectory.create(Path("/proc/no/run"))


def test_a_run_directory_is_used_again_without_the_results_of_the_earlier_run(run):
    run.write_manifest(default_manifest())
    run.append_metrics({"step": 0})
    run.write_summary({})
    run.write_weights(0, {"w": torch.zeros(1)}, {})
    run.plot_path.touch()
    (run.path / "notes.txt").touch()
    again = RunDirectory.create(run.path)
    assert {path.name for path in again.path.iterdir()} == {"run.toml", "notes.txt"}
    assert again.read_metrics() == []


def test_a_run_that_is_to_go_on_keeps_its_results(run):
    run.append_metrics({"step": 0})
    run.write_weights(0, {"w": torch.zeros(1)}, {})
    again = RunDirectory.create(run.path, resume=True)
    assert again.read_metrics() == [{"step": 0}]
    assert list(again.load_weights()) == [0]


def test_a_run_goes_on_from_an_earlier_step_as_if_the_later_had_not_been(run):
    for line in ({"event": "start"}, {"step": 0}, {"step": 1, "loss": 0.1 + 0.2}, {"step": 2}):
        run.append_metrics(line)
    with run.metrics_path.open("a") as file:
        file.write('{"step": 3, "lo')  # cut by what ended the run
    run.rewind(2)
    run.append_metrics({"step": 2, "again": True})
    assert run.read_metrics() == [
        {"event": "start"},
        {"step": 0},
        {"step": 1, "loss": 0.1 + 0.2},
        {"step": 2, "again": True},
    ]
    assert [path.name for path in run.path.iterdir()] == ["metrics.jsonl"]


def test_going_back_where_nothing_was_written_leaves_nothing(run):
    run.rewind(5)
    assert run.read_metrics() == []


def test_the_manifest_reads_back_as_the_same_run(run):
    manifest = default_manifest()
    run.write_manifest(manifest)
    assert type(manifest).load(run.manifest_path) == manifest


def test_metrics_are_one_object_a_line_at_once_on_the_disk(run):
    run.append_metrics({"step": 0, "loss": 5.5, "samples": 128, "seconds": 0.25})
    run.append_metrics({"step": 1, "loss": math.nan, "times": [math.inf, 1.0, {"x": -math.inf}]})
    lines = run.metrics_path.read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"step": 0, "loss": 5.5, "samples": 128, "seconds": 0.25},
        {"step": 1, "loss": None, "times": [None, 1.0, {"x": None}]},
    ]
    assert run.read_metrics() == [json.loads(line) for line in lines]


def test_a_loss_survives_to_the_last_bit(run):
    loss = 0.1 + 0.2
    run.append_metrics({"loss": loss})
    assert run.read_metrics() == [{"loss": loss}]


def test_reading_leaves_out_a_line_that_was_cut(run):
    run.append_metrics({"step": 0})
    with run.metrics_path.open("a") as file:
        file.write('{"step": 1, "lo')
    assert run.read_metrics() == [{"step": 0}]


def test_weights_come_back_bit_for_bit_with_their_metadata(run):
    flat = torch.arange(10, dtype=torch.float32)
    stages = {
        2: {"a": flat[:4].view(2, 2), "b": flat[4:]},
        10: {"c": torch.tensor([math.nan, -0.0]), "t": flat[:4].view(2, 2).T},
    }
    for stage, tensors in stages.items():
        path = run.write_weights(stage, tensors, {"mark": "7", "stage": str(stage)})
        assert path == run.path / f"stage-{stage}.safetensors"
    loaded = run.load_weights()
    assert list(loaded) == [2, 10]
    for stage, tensors in stages.items():
        assert loaded[stage].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[stage][name].shape == tensor.shape
            assert loaded[stage][name].numpy().tobytes() == tensor.numpy().tobytes()
    assert run.load_metadata(10) == {"mark": "7", "stage": "10"}


def test_a_failed_write_leaves_the_old_weights_and_no_debris(run, monkeypatch):
    run.write_weights(0, {"w": torch.ones(2)}, {})

    def break_off(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("peers.rundir.save_file", break_off)
    with pytest.raises(OSError, match="disk full"):
        run.write_weights(0, {"w": torch.zeros(2)}, {})
    assert run.load_weights()[0]["w"].tolist() == [1.0, 1.0]
    assert [path.name for path in run.path.iterdir()] == ["stage-0.safetensors"]


def test_damaged_weights_are_named(run):
    path = run.write_weights(1, {"w": torch.ones(8)}, {})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"stage-1\.safetensors is not a whole safetensors file"):
        run.load_weights()


def test_summary(run):
    run.write_summary({"steps": 3, "loss": math.inf})
    assert json.loads(run.summary_path.read_text()) == {"steps": 3, "loss": None}
