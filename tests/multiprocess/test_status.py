"""``swarm status`` reads a real swarm through any of its peers, with a coordinator and without."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

from tests.multiprocess.support import (
    Command,
    run,
    running,
    scratch,
    wait_for,
    wait_for_step,
    write_manifest,
)

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
SHORT = """
[start]
replicas = 1
[periods]
renew_s = 0.5
lease_s = 2
announce_s = 1
record_ttl_s = 3
"""
"""What the coordinator has announced is forgotten soon after its death."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def status(folder: Path, address: str, *more: str) -> dict:
    ended = run(folder, "status", "--json", "--join", address, *more, name="status")
    assert ended.code == 0, ended
    assert ended.err == ""
    assert ended.left == []
    return json.loads(ended.out)


def start(
    stack: ExitStack, folder: Path, stage: int, join: str, *more: object
) -> tuple[Command, str]:
    """A node that serves ``stage``, with ``more`` flags, and its address."""
    name, port = f"node-{stage}", free_port()
    command = stack.enter_context(
        running(
            *(folder, "node", "--join", join, "--stage", stage),
            *("--listen", f"/ip4/127.0.0.1/tcp/{port}", "--identity", folder / f"{name}.key"),
            *more,
            name=name,
        )
    )
    peer = command.wait_until_says("this is ").partition("this is ")[2].split()[0]
    return command, f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"


def test_any_peer_tells_what_the_swarm_does_even_without_a_coordinator() -> None:
    with scratch() as folder, ExitStack() as stack:
        manifest, out = write_manifest(folder, stages=2, steps=10**6, more=SHORT), folder / "out"
        words = ("coordinator", manifest, "--out", out, "--listen", LOOPBACK)
        lead = stack.enter_context(running(folder, *words, name="coordinator"))
        words = lead.wait_until_says("--join").split()
        join = words[words.index("--join") + 1]
        _, first = start(stack, folder, 0, join)
        start(stack, folder, 1, join)
        wait_for_step(lead, out, 1)

        words = ("doctor", "--json", "--join", join, "--device", "cpu")
        found = run(folder, *words, name="doctor")
        assert found.code == 0, found
        checks = {check["name"]: check for check in json.loads(found.out)["checks"]}
        assert "small" in checks["run"]["found"]
        assert checks["clock"]["verdict"] == checks["stage"]["verdict"] == "ok"
        assert not [c for c in checks.values() if c["verdict"] in ("fail", "skip")]

        seen = status(folder, join)
        assert (seen["state"], seen["name"], seen["steps"]) == ("training", "small", 10**6)
        assert seen["leader"] == join.rpartition("/")[2]
        assert seen["step"] >= 1
        assert seen["term"] == 1
        for stage in seen["stages"]:
            assert stage["samples"] == stage["mark"]["step"] * seen["batch"]
            (replica,) = stage["replicas"]
            assert (replica["state"], replica["share"]) == ("ready", 1.0)
            assert replica["mark"] == stage["mark"]
            assert replica["samples"] == stage["samples"]
            assert replica["last_work_s"] is not None
        assert seen["stages"][0]["replicas"][0]["peer"] == first.rpartition("/")[2]

        os.killpg(lead.process.pid, signal.SIGKILL)
        lead.process.wait()

        def forgotten() -> dict | None:
            found = status(folder, first)
            return found if "not announced" in found["trainers"][0]["why"] else None

        later = wait_for(forgotten, lambda: "the coordinator's records have expired")
        assert later["run"] == seen["run"]
        assert (later["state"], later["leader"], later["term"]) == ("leaderless", None, 1)
        assert later["quiet_s"] > 2
        assert later["step"] >= seen["step"]
        assert [len(stage["replicas"]) for stage in later["stages"]] == [1, 1]
        assert "no replica has heard a trainer" in later["warnings"][0]
