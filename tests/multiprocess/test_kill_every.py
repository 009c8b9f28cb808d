"""``swarm local --kill-every``: nodes die and others come, and not a microbatch is lost."""

import re
import shutil
import signal

from tests.multiprocess.support import (
    REPOSITORY,
    assert_equals_reference,
    metrics,
    running,
    scratch,
    write_manifest,
)

SLOW = '''
"""The digits, with a first layer that takes its time: no machine is through before kills are due.
"""

import dataclasses
import os
import time

from torch import nn

from my_digits import digits, mlp

PAUSE_S = float(os.environ.get("PAUSE_S", "0"))


class Slow(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        time.sleep(PAUSE_S)
        return self.layer(x)


def model():
    spec = mlp(hidden=16)
    first, *rest = spec.layers
    slow = dataclasses.replace(first, build=lambda: Slow(first.build()))
    return dataclasses.replace(spec, layers=(slow, *rest))
'''
MANIFEST = """
name = "slow"
model = { kind = "my_slow:model" }
stages = { count = 2 }
batch = { microbatch = 16, microbatches = 8 }
optimizer = { kind = "adamw", lr = 1e-2 }
data = { source = "python:my_slow:digits" }
run = { steps = 25 }
"""
STEPS, MICROBATCHES, SAMPLES = 25, 8, 16
PAUSE_S = 0.03
"""Two replicas need at least 25 x 8 / 2 x 0.03 = 3 s: two kills fit, of one node a stage."""


def test_what_each_step_counts_is_told_at_the_end_and_losses_are_those_of_one_process(monkeypatch):
    allow = ["--allow-model", "my_slow:model", "--allow-model", "my_slow:digits"]
    with scratch() as folder:
        shutil.copy(REPOSITORY / "tests" / "digits_model.py", folder / "my_digits.py")
        (folder / "my_slow.py").write_text(SLOW)
        manifest, out = folder / "run.toml", folder / "out"
        manifest.write_text(MANIFEST)
        environment = {"PYTHONPATH": f"{folder}:{REPOSITORY}", "PAUSE_S": str(PAUSE_S)}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        options = ["--kill-every", 1, "--kill-seed", 5, "--out", out, *allow]
        with running(folder, "local", manifest, *options) as command:
            command.succeed()
            assert command.living() == []
        killed = re.findall(r"^killed (\S+) \(\w{6}, stage \d\)$", command.out, re.MULTILINE)
        assert len(killed) >= 2
        assert "ended by signal" not in command.out, "a kill is no failure"
        resent = sum(line["resent"] for line in metrics(out))
        assert told(command.out) == (len(killed), resent, STEPS * MICROBATCHES * SAMPLES, STEPS, 2)
        assert_quiet(out, killed)
        monkeypatch.setenv("PAUSE_S", "0")
        assert_equals_reference(folder, out, *allow)


def told(text):
    """The figures of the last line: kills, sent again, samples, steps, stages."""
    said = (
        r"(\d+) nodes killed, ([\d,]+) microbatch(?:es)? sent again, ([\d,]+) samples counted; "
        r"each of (\d+) steps counted every microbatch exactly once in each of (\d+) stages"
    )
    (found,) = re.findall(said, text.splitlines()[-1])
    return tuple(int(figure.replace(",", "")) for figure in found)


def assert_quiet(out, killed):
    """No node's log has a traceback, or more than a line for each that was lost."""
    for log in (out / "nodes").glob("*.log"):
        text = log.read_text()
        assert "Traceback" not in text, text
        assert text.count("cannot reach") <= len(killed), text


def test_a_replacement_serves_and_goes_with_the_swarm():
    with scratch() as folder:
        manifest, out = write_manifest(folder, stages=2, steps=100_000), folder / "out"
        options = ["--kill-every", 1, "--kill-seed", 5, "--out", out]
        with running(folder, "local", manifest, *options) as command:

            def served():
                return set(re.findall(r"^(\w{6}) serves stage", command.out, re.MULTILINE))

            command.wait_until(lambda: len(served()) > 4, "one more than the first four serves")
            assert re.search(r"^started node-\d-2 \(stage \d\)$", command.out, re.MULTILINE)
            command.process.send_signal(signal.SIGINT)
            assert command.wait() == 130
            assert command.living() == []
