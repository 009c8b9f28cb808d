"""A node of ``swarm local`` is killed or hangs in mid-run: it costs time, but no step."""

import os
import signal

import pytest

from tests.multiprocess.support import (
    assert_equals_reference,
    metrics,
    running,
    scratch,
    wait_for_step,
    write_manifest,
)

STEPS = 20


@pytest.fixture
def folder():
    with scratch() as path:
        yield path


def run_with(folder, number):
    """A run of 20 steps in which a node of the middle stage gets signal ``number`` after step 3."""
    manifest = write_manifest(folder, stages=3, steps=STEPS)
    out = folder / "out"
    with running(folder, "local", manifest, "--replicas", 2, "--out", out) as command:
        wait_for_step(command, out, 3)
        victim = command.node(1, 0)
        before = len(metrics(out))
        os.kill(victim, number)
        command.succeed()
        assert command.living() == []
        assert before < STEPS, "the signal came too late"
    assert_equals_reference(folder, out)
    assert metrics(out)[-1]["replicas"][1] == 1


def test_run_survives_a_killed_node(folder):
    run_with(folder, signal.SIGKILL)


def test_run_survives_a_node_that_hangs(folder):
    run_with(folder, signal.SIGSTOP)
