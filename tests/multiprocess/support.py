"""Runs ``swarm`` commands as real processes, and finds every process that came of one."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

REPOSITORY = Path(__file__).parents[2]
SWARM = (sys.executable, "-m", "peers.cli")
AMPLE_S = 90.0
"""How long anything may take before a test gives up: nothing is expected to take so long."""

MARK = "SWARM_TEST_MARK"
"""Every process inherits the environment, so a mark in it shows what a command left behind."""

MANIFEST = """
name = "small"
seed = 7
model = {{ d_model = 32, layers = 4, heads = 2, sequence = 32 }}
stages = {{ count = {stages} }}
batch = {{ microbatch = 4, microbatches = 8 }}
data = {{ source = "text:{corpus}" }}
run = {{ steps = {steps} }}
[optimizer]
kind = "adamw"
lr = 3e-3
weight_decay = 0.01
warmup_steps = 5
clip = 0.5
"""
"""A GPT of 68,000 parameters. The gradient's norm is above the clip in every step."""

T = TypeVar("T")


def write_manifest(folder: Path, *, stages: int = 3, steps: int = 20, more: str = "") -> Path:
    """A manifest that trains on a copy of some sources of this project."""
    corpus = folder / "corpus"
    if not corpus.exists():
        shutil.copytree(REPOSITORY / "swarm" / "core", corpus)
    path = folder / "run.toml"
    path.write_text(MANIFEST.format(stages=stages, steps=steps, corpus=corpus) + more)
    return path


def wait_for(look: Callable[[], T | None], what: Callable[[], str], limit_s: float = AMPLE_S) -> T:
    """The first result of ``look`` that is neither None nor False; ``what`` says what lacks."""
    deadline = time.monotonic() + limit_s
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"after {limit_s:g} s still not: {what()}")
        time.sleep(0.02)
    return found


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder of a short path: p2pd's sockets go there too, and a socket's path is bounded."""
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/tmp") as folder:
        yield Path(folder)


class Command:
    """A running ``swarm`` command, the leader of a session of its own.

    Args:
        folder: for its output, its home and its temporary files.
        terminal: it runs in a terminal, of which it sees input and output as a user would.
        cwd: where it runs.
        program: what to run; ``arguments`` follow.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        name: str = "swarm",
        terminal: bool = False,
        cwd: Path = REPOSITORY,
        program: Sequence[str] = SWARM,
    ) -> None:
        self.name = name
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self._mark = uuid.uuid4().hex
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        environment = {
            **os.environ,
            MARK: self._mark,
            "HOME": str(folder),
            "TMPDIR": str(self.temporary),
            "COLUMNS": "300",
            "TERM": "xterm",
            "PYTHONFAULTHANDLER": "1",
        }
        command = [*program, *map(str, arguments)]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            common = {"env": environment, "cwd": cwd, "start_new_session": True}
            if terminal:
                self.keyboard, inside = pty.openpty()
                self.process = subprocess.Popen(
                    command,
                    **common,
                    stdin=inside,
                    stdout=inside,
                    stderr=inside,
                    preexec_fn=_take_terminal,
                )
                os.close(inside)
                threading.Thread(target=self._copy_screen, daemon=True).start()
            else:
                self.process = subprocess.Popen(
                    command, **common, stdin=subprocess.DEVNULL, stdout=out, stderr=err
                )

    def _copy_screen(self) -> None:
        with self._out.open("ab", buffering=0) as out, suppress(OSError):
            while data := os.read(self.keyboard, 1 << 16):
                out.write(data)

    def press_ctrl_c(self) -> None:
        """In its terminal: the kernel sends SIGINT to the foreground processes."""
        os.write(self.keyboard, b"\x03")

    def signal_group(self, number: signal.Signals) -> None:
        """What a terminal does: to the command and to what it started in its own group."""
        os.killpg(self.process.pid, number)

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def said(self) -> str:
        return f"{self.name} printed\n{self.out}\nand as errors\n{self.err}"

    def wait(self, limit_s: float = AMPLE_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # it writes where it is as an error
            self.process.wait(AMPLE_S)
            raise AssertionError(f"still runs after {limit_s:g} s: {self.said}") from None

    def succeed(self, limit_s: float = AMPLE_S) -> None:
        assert self.wait(limit_s) == 0, self.said

    def wait_until(self, look: Callable[[], T | None], what: str) -> T:
        """``look`` again and again while the command lives."""

        def alive() -> T | None:
            running = self.process.poll() is None
            found = look()
            assert running or found, f"has ended before: {what}; {self.said}"
            return found

        return wait_for(alive, lambda: f"{what}; {self.said}")

    def wait_until_says(self, text: str) -> str:
        """All that it has printed, once ``text`` is in it."""
        return self.wait_until(lambda: self.out if text in self.out else None, f"says {text!r}")

    def living(self) -> list[int]:
        """The ids of all processes that came of this command and live, zombies apart."""
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                environment = (path / "environ").read_bytes().split(b"\0")
                if wanted in environment and not _is_zombie(path):
                    found.append(int(path.name))
        return found

    def nodes(self) -> list[int]:
        """The ids of the node processes that ``swarm local`` has started and that live."""
        return [pid for pid in self.living() if "--join" in command_line(pid)]

    def node(self, stage: int, replica: int) -> int:
        key = f"node-{stage}-{replica}.key"
        (pid,) = [pid for pid in self.nodes() if any(key in word for word in command_line(pid))]
        return pid

    def socket_folders(self) -> list[str]:
        """p2pd's folders that are there."""
        return sorted(path.name for path in self.temporary.glob("swarm-p2pd-*"))

    def end(self) -> None:
        """Kill whatever is left."""
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(AMPLE_S)
        wait_for(lambda: not self.living(), lambda: f"{self.name} is dead")


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def running(folder: Path, *arguments: object, **options) -> Iterator[Command]:
    """A command that does not outlive the block."""
    command = Command(folder, *arguments, **options)
    try:
        yield command
    finally:
        command.end()


@dataclass(frozen=True)
class Ended:
    """What came of a command. ``left``: processes that outlived it."""

    code: int
    out: str
    err: str
    left: list[int]


def run(folder: Path, *arguments: object, limit_s: float = AMPLE_S, **options) -> Ended:
    """Run a command to its end."""
    with running(folder, *arguments, **options) as command:
        code = command.wait(limit_s)
        return Ended(code, command.out, command.err, command.living())


def _is_zombie(process: Path) -> bool:
    return (process / "stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")


def command_line(pid: int) -> list[str]:
    """Its words; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def metrics(run_directory: Path) -> list[dict]:
    """The lines of ``metrics.jsonl``, one a step; none if there is no such file yet."""
    path = run_directory / "metrics.jsonl"
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def wait_for_step(command: Command, run_directory: Path, step: int) -> None:
    command.wait_until(lambda: len(metrics(run_directory)) > step, f"step {step} is done")


def assert_equals_reference(
    folder: Path, run_directory: Path, *arguments: object, **options
) -> Path:
    """The loss of each step equals that of one process within 1e-5 relative.

    Returns the run directory of the reference.
    """
    manifest = run_directory / "run.toml"
    one = folder / "reference"
    words = ["reference", manifest, "--out", one, *arguments]
    with running(folder, *words, name="reference", **options) as command:
        command.succeed()
    ours, theirs = metrics(run_directory), metrics(one)
    steps = tomllib.loads(manifest.read_text())["run"]["steps"]
    assert [line["step"] for line in ours] == list(range(steps))
    assert len(theirs) == steps
    for mine, reference in zip(ours, theirs, strict=True):
        assert abs(mine["loss"] / reference["loss"] - 1) < 1e-5, (mine, reference)
        assert mine["samples"] == reference["samples"]
    return one
