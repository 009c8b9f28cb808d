"""Groups of processes that average, each told what to do by one JSON object a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import Any

import psutil

from scripts._bench import ROOT

LIMIT_S = 120.0
"""How long one order may take, and a start."""


class Worker:
    """``python -m MODULE ARGUMENTS``: orders on its standard input, answers on its output."""

    def __init__(self, folder: Path, module: str, *arguments: object) -> None:
        self._name = " ".join(map(str, (module, *arguments)))
        self._log = folder / f"{module}.{len(list(folder.iterdir()))}.log"
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )

    def tell(self, what: str, **more: Any) -> None:
        """Give an order; ``answer`` waits for what came of it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer tells
            self._process.stdin.write(json.dumps({"do": what, **more}) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Raises RuntimeError with the log if the process failed, or took too long."""
        assert self._process.stdout is not None
        limit = Timer(LIMIT_S, self._process.kill)
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            log = self._log.read_text(errors="replace")[-1500:]
            raise RuntimeError(f"{self._name} failed, or took {LIMIT_S:g} s:\n{log}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        self.tell(what, **more)
        return self.answer()

    def cpu_s(self) -> float:
        """Processor seconds so far, of all threads and of its children, user and system."""
        process = psutil.Process(self._process.pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def all_of(workers: Sequence[Worker], what: str, **more: Any) -> list[dict[str, Any]]:
    """Give all of them the same order, at one time; their answers."""
    for worker in workers:
        worker.tell(what, **more)
    return [worker.answer() for worker in workers]


@contextmanager
def started(kinds: Sequence[Sequence[object]]) -> Iterator[list[Worker]]:
    """A worker for each (module, arguments...), all of them up; ``FOLDER`` is the last argument."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        workers = []
        for module, *arguments in kinds:
            workers.append(Worker(folder, str(module), *arguments, folder))
            stack.callback(workers[-1].close)
        yield workers


def say(answer: dict[str, Any]) -> None:
    """A worker's answer."""
    print(json.dumps(answer), flush=True)
