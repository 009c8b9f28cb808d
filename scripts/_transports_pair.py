"""Two ends of a connection as two processes, told what to do; their processor time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import Any

import psutil

from scripts._bench import ROOT

LIMIT_S = 120.0
"""How long one order may take, and a start."""


class EndProcess:
    """A process that runs ``scripts._transports_end``, and its p2pd where it has one."""

    def __init__(self, kind: str, folder: Path, log: Path) -> None:
        self.kind = kind
        self._log = log
        self._began = time.monotonic()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scripts._transports_end", kind, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )

    def wait_until_serving(self) -> None:
        said = self._answer()
        self.serving_s = time.monotonic() - self._began
        """From the start of the process, with the interpreter's own and all imports."""
        self.import_s: float = said["import_s"]
        self.start_s: float = said["start_s"]
        self.address: str = said["address"]

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """The answer to an order. Raises RuntimeError with the log if it fails."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer tells
            self._process.stdin.write(json.dumps({"do": what, **more}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def cpu_s(self) -> float:
        """Processor seconds since the start, of all threads and of p2pd, user and system."""
        times = [process.cpu_times() for process in self._all()]
        return sum(time.user + time.system for time in times)

    def rss_mb(self) -> dict[str, float]:
        """Resident memory now, of the process and of its p2pd."""
        process, *daemons = (p.memory_info().rss / 1e6 for p in self._all())
        return {"process": process, "p2pd": sum(daemons)}

    def forget_peak(self) -> None:
        for process in self._all():
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak_mb(self) -> dict[str, float]:
        """The highest resident memory since ``forget_peak``."""
        process, *daemons = (_peak_mb(p.pid) for p in self._all())
        return {"process": process, "p2pd": sum(daemons)}

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _all(self) -> list[psutil.Process]:
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        limit = Timer(LIMIT_S, self._process.kill)
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            log = self._log.read_text(errors="replace")[-1500:]
            raise RuntimeError(f"an end on {self.kind} failed, or took {LIMIT_S:g} s:\n{log}")
        found: dict[str, Any] = json.loads(line)
        return found


def _peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


@contextmanager
def pair(caller: str, callee: str, *, one_by_one: bool = False) -> Iterator[list[EndProcess]]:
    """The caller and the callee, both serving, not yet connected.

    Args:
        one_by_one: start them one after the other, so that each has the machine to itself.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        ends = []
        for name, kind in (("caller", caller), ("callee", callee)):
            ends.append(EndProcess(kind, folder, folder / f"{name}.log"))
            stack.callback(ends[-1].close)
            if one_by_one:
                ends[-1].wait_until_serving()
        for end in ends:
            if not one_by_one:
                end.wait_until_serving()
        yield ends
