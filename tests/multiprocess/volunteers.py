"""A swarm of real processes that come and go: a coordinator, standbys and nodes, each by name."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.multiprocess.support import (
    SWARM,
    Command,
    metrics,
    run,
    running,
    scratch,
    wait_for_step,
    write_manifest,
)

LOOPBACK = "/ip4/127.0.0.1/tcp/0"

BRISK = """
[periods]
announce_s = 0.5
record_ttl_s = 6
watch_s = 0.3
status_s = 0.3
renew_s = 0.3
lease_s = 2
patience_s = 4
"""
"""What a test would otherwise wait for. Limits of silence stay: a busy machine is no lost one."""

LOST = re.compile(r"(\w{6}) \(stage \d+\) was removed: ")
COUNTED = re.compile(r"counted in this run for this peer: (\d+) microbatches, (\d+) samples")


def doomed(moment: str, n: int) -> Sequence[str]:
    """The program ``swarm``, which is killed at the ``n``-th ``moment``: see ``doomed.py``."""
    return (sys.executable, str(Path(__file__).with_name("doomed.py")), moment, str(n))


class Volunteers:
    """Processes of one run in ``folder``; none of them outlives the block that made this."""

    def __init__(self, folder: Path, manifest: Path, stack: ExitStack) -> None:
        self.folder, self.manifest, self.out = folder, manifest, folder / "out"
        self.join = ""
        self._stack = stack

    def start(
        self, *words: object, name: str, key: str = "", program: Sequence[str] = SWARM
    ) -> Command:
        """A ``swarm`` command with a key of its own, named like it unless ``key`` says how."""
        identity = ("--listen", LOOPBACK, "--identity", self.folder / f"{key or name}.key")
        command = running(self.folder, *words, *identity, name=name, program=program)
        return self._stack.enter_context(command)

    def coordinator(
        self, *more: object, name: str = "lead", program: Sequence[str] = SWARM
    ) -> Command:
        """Opens the run, or resumes it; ``join`` is its address then."""
        words = more if "--resume" in more else (self.manifest, "--out", self.out, *more)
        lead = self.start("coordinator", *words, name=name, key="lead", program=program)
        said = lead.wait_until_says("--join").split()
        self.join = said[said.index("--join") + 1]
        return lead

    def node(
        self,
        name: str,
        stage: int,
        *more: object,
        key: str = "",
        program: Sequence[str] = SWARM,
    ) -> Command:
        words = ("node", "--join", self.join, "--stage", stage, *more)
        return self.start(*words, name=name, key=key, program=program)

    def peer_id(self, name: str) -> str:
        """That of the key called ``name``; it is made if need be."""
        ended = run(self.folder, "identity", "--identity", self.folder / f"{name}.key", name="id")
        assert ended.code == 0, ended
        return ended.out.split()[-1]

    def wait_for_steps(self, lead: Command, count: int) -> int:
        """``count`` whole steps from now on are done; returns the number of the next one."""
        step = len(metrics(self.out)) + count
        wait_for_step(lead, self.out, step)
        return step + 1

    def wait_until_shared(self, lead: Command, stage: int, replicas: int) -> None:
        """A step that begins after now counts microbatches of so many replicas of ``stage``."""
        begun = len(metrics(self.out)) + 1

        def shared() -> bool:
            lines = metrics(self.out)[begun:]
            return any(line["replicas"][stage] == replicas for line in lines)

        lead.wait_until(shared, f"{replicas} replicas of stage {stage} count")


@contextmanager
def volunteers(
    *, stages: int, steps: int, more: str, checkpoint_every: int = 25
) -> Iterator[Volunteers]:
    """A ``Volunteers`` in a folder of its own, with a manifest."""
    with scratch() as folder, ExitStack() as stack:
        manifest = write_manifest(folder, stages=stages, steps=steps, more=more)
        text = manifest.read_text()
        old, new = (
            f"{{ steps = {steps} }}",
            f"{{ steps = {steps}, checkpoint_every = {checkpoint_every} }}",
        )
        assert old in text
        manifest.write_text(text.replace(old, new))
        yield Volunteers(folder, manifest, stack)


def peer_of(node: Command) -> str:
    """The peer id of a node, once it knows its run."""
    return node.wait_until_says("this is ").partition("this is ")[2].split()[0]


def wait_until_admitted(lead: Command, node: Command, stage: int) -> str:
    """The trainer takes it for a replica of ``stage``; returns its peer id."""
    peer = peer_of(node)
    lead.wait_until_says(f"{peer[-6:]} serves stage {stage} at step")
    return peer


def wait_until_left(lead: Command, peer: str, stage: int) -> None:
    """The trainer has heard that ``peer`` has gone in good order."""
    lead.wait_until_says(f"{peer[-6:]} (stage {stage}) left: its work is done")


def counted(node: Command) -> tuple[int, int]:
    """Microbatches and samples, by the last word of a node that has ended.

    One that has moved before the run began says it of each stage; the last says it all.
    """
    *before, last = COUNTED.findall(node.out) or [("-1", "-1")]
    assert last != ("-1", "-1"), node.said
    assert set(before) <= {("0", "0")}, node.said
    return int(last[0]), int(last[1])


def kill(*commands: Command) -> None:
    """SIGKILL, and all that came of them is gone."""
    for command in commands:
        os.kill(command.process.pid, signal.SIGKILL)
    for command in commands:
        command.end()


def assert_quiet(*survivors: Command) -> None:
    """No traceback, and at most one line for each peer that was lost."""
    for command in survivors:
        assert "Traceback" not in command.out + command.err, command.said
        lost = LOST.findall(command.out + command.err)
        assert len(lost) == len(set(lost)), command.said


def assert_same_losses(ours: Sequence[dict], reference: Sequence[dict]) -> None:
    """Each step once, and its loss within 1e-5 of that of one process."""
    assert [line["step"] for line in ours] == list(range(len(ours)))
    assert len(reference) >= len(ours) > 0
    for mine, theirs in zip(ours, reference, strict=False):
        assert abs(mine["loss"] / theirs["loss"] - 1) < 1e-5, (mine, theirs)
        assert mine["samples"] == theirs["samples"]


def reference_of(folder: Path, manifest: Path, steps: int) -> list[dict]:
    """The metrics of one process that trains the same for ``steps`` steps."""
    out = folder / "reference"
    words = ["reference", manifest, "--steps", steps, "--out", out]
    with running(folder, *words, name="reference") as command:
        command.succeed()
    return metrics(out)
