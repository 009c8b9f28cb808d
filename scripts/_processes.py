"""A swarm of real processes on loopback, for benchmarks: who said what when, and when steps ended.

Nothing outlives a ``Swarm``: its processes are killed at the end of the block, and end by
themselves should the benchmark be killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import TypeVar

from dht.identity import Identity
from peers.running import PARENT_VARIABLE
from scripts._bench import ROOT, Progress
from scripts._steps import Metrics, Step

LIMIT_S = 300.0
"""How long anything is waited for."""
LOOK_S = 0.01
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
SERVES = "serves stage"
PROGRAM = (sys.executable, "-m", "peers.cli")

T = TypeVar("T")


class Process:
    """A ``swarm`` command; every line that it prints is kept with the moment at which it came."""

    def __init__(
        self, name: str, folder: Path, *arguments: object, program: Sequence[str] = PROGRAM
    ) -> None:
        self.name = name
        self.lines: list[tuple[float, str]] = []
        self.ended: float | None = None
        """When it was killed, or seen to have ended after ``interrupt``."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            PARENT_VARIABLE: str(os.getpid()),
        }
        self.began = time.monotonic()
        self._popen = subprocess.Popen(
            [*program, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))

    def said(self, text: str, since: float = -inf) -> float | None:
        """When it first said ``text``, not before ``since``; None if it has not."""
        return next((at for at, line in self.lines if at >= since and text in line), None)

    def said_between(self, start: float, end: float) -> list[str]:
        return [line for at, line in self.lines if start <= at <= end]

    def line_with(self, text: str) -> str:
        return next((line for _, line in self.lines if text in line), "")

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._popen.poll()

    @property
    def cpu_s(self) -> float:
        """CPU time that it and its daemon have taken, in seconds; 0 if it is gone."""
        pid = self._popen.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            stats = [Path(f"/proc/{one}/stat").read_text() for one in (pid, *children)]
        except OSError:
            return 0.0
        ticks = sum(sum(map(int, stat.rpartition(")")[2].split()[11:13])) for stat in stats)
        return ticks / os.sysconf("SC_CLK_TCK")

    @property
    def peaks(self) -> tuple[int, int]:
        """Largest resident memory until now, bytes: its own, and its daemon's. 0 if it is gone."""
        pid = self._popen.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            own, *others = [Path(f"/proc/{one}/status").read_text() for one in (pid, *children)]
        except OSError:
            return 0, 0
        return _peak(own), sum(_peak(other) for other in others)

    @property
    def tail(self) -> str:
        """Its last lines."""
        return "\n".join(line for _, line in self.lines[-15:])

    def kill(self) -> float:
        """SIGKILL; returns the moment."""
        self._popen.kill()
        self.ended = time.monotonic()
        self._popen.wait()
        return self.ended

    def interrupt(self) -> float:
        """SIGINT; returns the moment."""
        self._popen.send_signal(signal.SIGINT)
        return time.monotonic()


def _peak(status: str) -> int:
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0")
    return int(line.split()[1]) << 10


class Swarm:
    """A run: its leader and its nodes, which run ``program``. Use it as a context manager."""

    def __init__(
        self, manifest: str, progress: Progress, *, program: Sequence[str] = PROGRAM
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sw-", dir="/tmp"))  # sockets need short paths
        self.manifest = self.folder / "run.toml"
        self.manifest.write_text(manifest)
        self.progress = progress
        self.program = program
        self.nodes: list[tuple[int, Process]] = []
        self._processes: list[Process] = []
        self._expected: list[Process] = []

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
        self.progress.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- processes --------------------------------------------------------------------------

    def peer_id(self, key: str) -> str:
        """Of the key of that name, which is made if need be."""
        return Identity.load_or_create(self.folder / f"{key}.key")[0].peer_id

    def coordinator(self, *arguments: object, key: str = "a") -> Process:
        """``swarm coordinator``; not followed yet."""
        flags = ("--identity", self.folder / f"{key}.key", "--listen", LOOPBACK)
        return self.start(f"coordinator-{key}", "coordinator", *arguments, *flags)

    def follow(self, leader: Process, out: Path) -> None:
        """``leader`` leads from now on; steps that are in ``out`` already are not counted."""
        self.leader, self.out, self.metrics = leader, out, Metrics(out)

    def node(self, stage: int, key: str | None = None, *more: object) -> Process:
        """``swarm node --stage``, with a new key unless one is named, and ``more`` flags."""
        key = key or f"node-{len(self.nodes)}"
        flags = ("--identity", self.folder / f"{key}.key", "--listen", LOOPBACK)
        words = ("node", "--join", self.address, "--stage", stage)
        process = self.start(key, *words, *flags, *more, program=self.program)
        self.nodes.append((stage, process))
        return process

    def start(self, name: str, *arguments: object, program: Sequence[str] = PROGRAM) -> Process:
        process = Process(name, self.folder, *arguments, program=program)
        self._processes.append(process)
        self._expected.append(process)
        return process

    def open(self, stages: int, replicas: int = 2, *flags: object) -> None:
        """A fresh run, once all of its nodes serve and some steps are done."""
        out = self.folder / "out"
        self.follow(self.coordinator(self.manifest, "--out", out, *flags), out)
        self.wait_until_open()
        for _ in range(replicas):
            for stage in range(stages):
                self.node(stage)
        self.wait_for_steps(3, "the start")

    def wait_until_open(self) -> None:
        self.wait_until_says(self.leader, "swarm node --join")
        words = self.leader.line_with("swarm node --join").split()
        self.address = words[words.index("--join") + 1]

    def kill(self, process: Process) -> float:
        """SIGKILL to one that lives."""
        if process in self._expected:
            self._expected.remove(process)
        return process.kill()

    def leave(self, process: Process) -> tuple[float, float]:
        """SIGINT, and wait until it has gone; returns both moments."""
        self._expected.remove(process)
        began = process.interrupt()
        self.wait(lambda: process.code is not None, f"{process.name} to leave")
        process.ended = time.monotonic()
        return began, process.ended

    def serving(self, stage: int | None = None) -> list[tuple[int, Process]]:
        """The nodes that serve, of one stage or of all."""
        return [
            (at, node)
            for at, node in self.nodes
            if node.ended is None and stage in (None, at) and node.said(SERVES)
        ]

    def serving_at(self, moment: float) -> list[Process]:
        return [
            node
            for _, node in self.nodes
            if (node.said(SERVES) or inf) < moment < (node.ended or inf)
        ]

    # -- waiting ----------------------------------------------------------------------------

    def wait(self, look: Callable[[], T | None], what: str, limit_s: float = LIMIT_S) -> T:
        """The first result of ``look`` that is neither None nor False.

        Raises:
            RuntimeError: it took too long, or a process ended that should live.
        """
        deadline = time.monotonic() + limit_s
        while not (found := look()):
            self.look(f"waiting for {what}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{what}: not within {limit_s:g} s; the coordinator said last\n"
                    f"{self.leader.tail}"
                )
            time.sleep(LOOK_S)
        return found

    def wait_until_says(self, process: Process, text: str) -> float:
        """When it first said ``text``."""
        return self.wait(lambda: process.said(text), f"{process.name} to say {text!r}")

    def rest(self, seconds: float, what: str) -> None:
        """Let it run."""
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > end, what)

    def look(self, doing: str) -> None:
        """Take in what is new.

        Raises:
            RuntimeError: a process has ended that should live.
        """
        self.metrics.look()
        for process in self._expected:
            if process.code is not None:
                time.sleep(0.2)  # its last words
                raise RuntimeError(f"{process.name} ended with {process.code}:\n{process.tail}")
        self.progress(f"{doing} ({len(self.metrics.steps)} steps)")

    def wait_for_steps(self, count: int, what: str = "steps") -> None:
        """Until ``count`` more steps have ended."""
        wanted = len(self.metrics.steps) + count
        self.wait(lambda: len(self.metrics.steps) >= wanted, what)

    def next_step(self, since: float, limit_s: float = LIMIT_S) -> Step:
        """The first step that ended after ``since`` and was led to its end by this leader."""

        def look() -> Step | None:
            return next((s for s in self.metrics.steps if s.ended > since and s.timed), None)

        return self.wait(look, "the next step", limit_s)

    # -- what is not disturbed --------------------------------------------------------------

    def starting(self) -> list[tuple[float, float]]:
        """The times in which a node was on its way: it imports, downloads and takes CPU time."""
        return [
            (node.began, node.said(SERVES) or node.ended or time.monotonic())
            for _, node in self.nodes
        ]

    def undisturbed(self, *others: tuple[float, float]) -> list[Step]:
        """The steps in which no node came and which overlap none of the ``others`` either."""
        spans = [*self.starting(), *others]
        return [
            step
            for step in self.metrics.steps
            if step.timed and not any(step.overlaps(*span) for span in spans)
        ]
