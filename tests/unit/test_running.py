"""How commands run and end, as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import anyio
from peers.running import Leave, run_command
from swarm.errors import {errors}

leave = Leave()

async def main():
    {body}

print("result", run_command(main, leave))
"""

WAIT = """
    print("up", flush=True)
    try:
        await anyio.sleep(60)
    finally:
        with anyio.CancelScope(shield=True):
            {last}
            print("left", flush=True)
"""

LEAVE = """
    told = anyio.Event()
    def hear():
        print("told", flush=True)
        told.set()
    leave.hear = hear
    print("up", flush=True)
    try:
        await told.wait()
        {then}
    finally:
        with anyio.CancelScope(shield=True):
            {last}
"""
"""It hears of the first signal, and what it does ``then`` is up to it."""


def start(body: str, errors: str = "UserError", **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body.strip(), errors=errors)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_a_result_is_returned() -> None:
    out, err = start("return 7").communicate(timeout=60)
    assert (out, err) == ("result 7\n", "")


@pytest.mark.parametrize(("error", "code"), [("UserError", 2), ("SwarmError", 1)])
def test_errors_of_ours_are_one_line(error: str, code: int) -> None:
    process = start(f"raise {error}('no such thing; do that')", error)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, "", "error: no such thing; do that\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(number: signal.Signals) -> None:
    process = start(WAIT.format(last="pass"))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "left\n", "stopped\n")


def test_a_second_signal_ends_it_at_once() -> None:
    process = start(WAIT.format(last="print('leaving', flush=True); await anyio.sleep(60)"))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "leaving\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")


def test_who_hears_of_the_first_signal_ends_in_good_order() -> None:
    process = start(LEAVE.format(then="return 'done'", last="pass"))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "told\nresult done\n", "")


def test_after_one_that_was_heard_a_second_signal_cancels_and_a_third_ends_at_once() -> None:
    last = "print('leaving', flush=True); await anyio.sleep(60)"
    process = start(LEAVE.format(then="await anyio.sleep(60)", last=last))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "told\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "leaving\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")


def test_who_hears_is_not_waited_for_when_the_parent_is_gone() -> None:
    process = start(
        LEAVE.format(then="await anyio.sleep(60)", last="print('left')"), SWARM_PARENT_PID="1"
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "up\nleft\n", "stopped\n")


def test_a_process_whose_parent_is_gone_ends() -> None:
    process = start(WAIT.format(last="pass"), SWARM_PARENT_PID="1")
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "up\nleft\n")
