"""Ctrl-C ends ``swarm local`` at any moment, and so does its death: no process is left."""

import os
import signal

import pytest

from tests.multiprocess.support import (
    metrics,
    running,
    scratch,
    wait_for,
    wait_for_step,
    write_manifest,
)

LIMIT_S = 10.0
"""So long the whole swarm may take to end."""

FOR_EVER = 100_000


@pytest.fixture
def folder():
    with scratch() as path:
        yield path


def assert_all_is_gone(command):
    assert command.living() == []
    assert command.socket_folders() == []
    assert "Traceback" not in command.out + command.err


def test_while_nodes_start(folder):
    out = folder / "out"
    with running(folder, "local", write_manifest(folder), "--out", out) as command:
        command.wait_until(lambda: len(command.nodes()) > 2, "some nodes are started")
        command.signal_group(signal.SIGINT)
        assert command.wait(LIMIT_S) == 130, command.said
        assert_all_is_gone(command)


def test_in_mid_step_in_a_terminal(folder):
    out = folder / "out"
    manifest = write_manifest(folder, stages=2, steps=FOR_EVER)
    arguments = ["local", manifest, "--replicas", 1, "--out", out]
    with running(folder, *arguments, terminal=True) as command:
        wait_for_step(command, out, 2)
        command.press_ctrl_c()
        assert command.wait(LIMIT_S) == 130, command.said
        assert_all_is_gone(command)
    assert (out / "plot.png").exists()
    assert "stopped" in command.out
    assert command.out.rfind("\x1b[?25h") > command.out.rfind("\x1b[?25l"), "the cursor is back"


def test_in_the_final_phase(folder):
    out = folder / "out"
    manifest = write_manifest(folder, stages=2, steps=2)
    with running(folder, "local", manifest, "--replicas", 1, "--out", out) as command:
        command.wait_until((out / "stage-0.safetensors").exists, "weights are fetched")
        command.signal_group(signal.SIGINT)
        assert command.wait(LIMIT_S) == 130, command.said
        assert_all_is_gone(command)
    assert len(metrics(out)) == 2


def test_nodes_end_when_the_command_is_killed(folder):
    out = folder / "out"
    manifest = write_manifest(folder, stages=2, steps=FOR_EVER)
    with running(folder, "local", manifest, "--replicas", 1, "--out", out) as command:
        wait_for_step(command, out, 0)
        assert len(command.nodes()) == 2
        os.kill(command.process.pid, signal.SIGKILL)
        wait_for(lambda: not command.living(), lambda: f"{command.living()} end", LIMIT_S)


def test_reference(folder):
    out = folder / "out"
    manifest = write_manifest(folder, stages=2, steps=FOR_EVER)
    with running(folder, "reference", manifest, "--out", out) as command:
        wait_for_step(command, out, 0)
        command.signal_group(signal.SIGINT)
        assert command.wait(LIMIT_S) == 130, command.said
        assert_all_is_gone(command)
