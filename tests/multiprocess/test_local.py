"""``swarm local`` end to end: the losses of one process, a run directory, and nothing left."""

import json
import shutil
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch
from safetensors.torch import load_file

from swarm.manifest import Manifest
from swarm.model.registry import model_spec
from swarm.model.stage import StageModel
from tests.multiprocess.support import (
    REPOSITORY,
    assert_equals_reference,
    metrics,
    running,
    scratch,
    write_manifest,
)

STEPS = 20


@pytest.fixture(scope="module")
def local():
    """A run that is complete: its command, its folder and its run directory."""
    with scratch() as folder:
        manifest = write_manifest(folder, stages=2, steps=3)
        out = folder / "out"
        options = ["--stages", 3, "--replicas", 2, "--steps", STEPS, "--out", out]
        with running(folder, "local", manifest, *options) as command:
            command.succeed()
            left = command.living()
        yield command, folder, out, left


@pytest.fixture(scope="module")
def reference(local):
    """The run directory of the same run in one process; the losses have been compared."""
    _, folder, out, _ = local
    return assert_equals_reference(folder, out)


def test_losses_are_those_of_one_process(local, reference):
    out = local[2]
    losses = [line["loss"] for line in metrics(out)]
    assert losses[-1] < losses[0] - 1
    assert all(line["norm"] > 0.5 for line in metrics(out)), "clipping is to be tested"


def test_no_process_and_no_folder_is_left(local):
    command, _, _, left = local
    assert left == []
    assert command.socket_folders() == []


def test_run_directory_is_whole(local):
    command, _, out, _ = local
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert all(line["samples"] == 32 for line in lines)
    assert all(0 < line["seconds"] < 60 for line in lines)
    assert not any(line["skipped"] for line in lines)
    assert matplotlib.image.imread(out / "plot.png").std() > 0
    assert (out / "summary.json").exists()
    manifest = Manifest.load(out / "run.toml")
    assert (manifest.start.replicas, manifest.stages.count) == (2, 3)
    assert manifest.run_id in (out / "summary.json").read_text()
    assert str(out) in command.out
    assert "A sample of the model's text" in command.out


def test_weights_load_into_the_model(local):
    _, _, out, _ = local
    manifest = Manifest.load(out / "run.toml")
    spec = model_spec(manifest)
    for stage in range(3):
        model = StageModel(manifest, spec, stage)
        initial = model.weights.clone()
        saved = load_file(out / f"stage-{stage}.safetensors")
        assert saved.keys() == model.tensors().keys()
        for name, tensor in model.tensors().items():
            tensor.copy_(saved[name])
        assert torch.isfinite(model.weights).all()
        assert not torch.equal(model.weights, initial)


def test_weights_are_those_of_one_process(local, reference):
    for stage in range(3):
        ours = load_file(local[2] / f"stage-{stage}.safetensors")
        theirs = load_file(reference / f"stage-{stage}.safetensors")
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)


def test_reproducible_weights_have_the_bits_of_one_process():
    with scratch() as folder:
        more = "[reproducible]\nenabled = true\n"
        manifest = write_manifest(folder, stages=2, steps=6, more=more)
        swarm, single = folder / "swarm", folder / "single"
        with running(folder, "local", manifest, "--replicas", 3, "--out", swarm) as command:
            command.succeed()
        with running(folder, "reference", swarm / "run.toml", "--out", single) as command:
            command.succeed()
        found = [json.loads((out / "summary.json").read_text()) for out in (swarm, single)]
        assert len(found[0]["weights_sha256"]) == 64
        assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


DIGITS = """
name = "digits"
model = { kind = "my_digits:mlp", args = { hidden = 16 } }
stages = { count = 2 }
batch = { microbatch = 16, microbatches = 4 }
optimizer = { lr = 1e-2 }
data = { source = "python:my_digits:digits" }
run = { steps = 5 }
"""


def test_a_model_from_the_working_directory_is_trained():
    """By the installed command, which does not have that directory on its path by itself."""
    allow = ["--allow-model", "my_digits:mlp", "--allow-model", "my_digits:digits"]
    here = {"program": [str(Path(sys.executable).with_name("swarm"))]}
    with scratch() as folder:
        shutil.copy(REPOSITORY / "tests" / "digits_model.py", folder / "my_digits.py")
        (folder / "digits.toml").write_text(DIGITS)
        out = folder / "out"
        arguments = ["local", "digits.toml", "--replicas", 1, "--out", "out", *allow]
        with running(folder, *arguments, cwd=folder, **here) as command:
            command.succeed()
        assert_equals_reference(folder, out, *allow, cwd=folder, **here)
        assert (out / "stage-1.safetensors").exists()
        assert len(metrics(out)) == 5
