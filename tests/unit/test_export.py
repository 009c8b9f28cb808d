"""One model from a run directory, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from peers.checkpoints import CheckpointStore
from peers.cli import app
from peers.export import CONFIG, WEIGHTS, export_model, load_model
from peers.rundir import RunDirectory
from swarm.errors import UserError
from swarm.manifest import Manifest
from swarm.model.digest import weights_sha256
from swarm.model.registry import model_spec
from swarm.model.stage import StageModel
from swarm.types import Mark, Term

MANIFEST = Manifest.from_tree(
    {
        "model": {"d_model": 16, "heads": 2, "layers": 2, "sequence": 12},
        "stages": {"count": 2},
    }
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory whose weights are not the initial ones."""
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_manifest(MANIFEST)
    spec = model_spec(MANIFEST)
    for stage in range(2):
        model = StageModel(MANIFEST, spec, stage)
        model.weights.mul_(1.5)
        directory.write_weights(stage, model.tensors(), {"step": "7", "stage": str(stage)})
    return directory.path


def test_what_is_exported_is_loaded_again(run: Path, tmp_path: Path) -> None:
    sha256 = export_model(run, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.manifest == MANIFEST
    tensors = {name: t for stage in loaded.stages for name, t in stage.tensors().items()}
    assert weights_sha256(tensors) == sha256
    stored = RunDirectory(run).load_weights()
    assert tensors.keys() == stored[0].keys() | stored[1].keys()
    assert all(torch.equal(tensors[name], t) for s in stored.values() for name, t in s.items())


def test_an_export_may_be_made_again_but_covers_nothing_else(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert export_model(run, out) == export_model(run, out)
    (out / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match=r"holds thesis\.txt"):
        export_model(run, out)


def test_what_is_missing_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run\.toml"):
        export_model(tmp_path / "nothing", tmp_path / "model")
    (run / "stage-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks stage-1\.safetensors"):
        export_model(run, tmp_path / "model")
    with pytest.raises(UserError, match=r"not an exported model"):
        load_model(run)
    assert not (tmp_path / "model").exists()


def test_a_run_that_has_not_ended_gives_its_newest_checkpoint(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_manifest(MANIFEST)
    store = CheckpointStore(tmp_path / "run" / "checkpoints", MANIFEST.run_id, say=print)
    expected = {}
    for t in (3, 6):
        with store.write(Mark(Term(1, "a" * 16), t), t, ({}, {})) as writer:
            for stage in range(2):
                model = StageModel(MANIFEST, model_spec(MANIFEST), stage)
                model.weights.mul_(t)
                writer.add_stage(stage, model.state())
                expected |= {name: tensor.clone() for name, tensor in model.tensors().items()}
            writer.finish()
    said: list[str] = []
    assert export_model(directory.path, tmp_path / "model", say=said.append) == weights_sha256(
        expected
    )
    assert said == ["the run has not ended: this is the model of its checkpoint of step 6"]
    loaded = load_model(tmp_path / "model")
    for stage in loaded.stages:
        for name, tensor in stage.tensors().items():
            assert torch.equal(tensor, expected[name])


def test_a_model_that_does_not_fit_is_refused(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    export_model(run, out)
    whole = load_file(out / WEIGHTS)
    name = next(iter(whole))
    save_file({**whole, name: whole[name][:1].clone()}, out / WEIGHTS)
    with pytest.raises(UserError, match=f"does not hold the model of {CONFIG}"):
        load_model(out)
    (out / WEIGHTS).write_bytes((out / WEIGHTS).read_bytes()[:100])
    with pytest.raises(UserError, match=f"does not hold the model of {CONFIG}"):
        load_model(out)


def test_export_and_generate_on_the_command_line(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    runner = CliRunner()
    exported = runner.invoke(app, ["export", str(run), "--out", str(out)])
    assert exported.exit_code == 0, exported.output
    words = ["generate", str(out), "--prompt", "def ", "--bytes", "30", "--seed"]
    first, again, other = (runner.invoke(app, [*words, seed]) for seed in ("1", "1", "2"))
    assert first.exit_code == 0, first.output
    assert first.output == again.output != other.output
    assert runner.invoke(app, ["generate", str(out), "--prompt", ""]).exit_code == 2
    assert runner.invoke(app, ["generate", str(tmp_path), "--prompt", "x"]).exit_code == 2
