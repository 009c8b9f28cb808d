"""What the benchmarks share: running a local swarm, medians, and printing."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def swarm_local(manifest: str, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A running ``swarm local`` on ``manifest`` (TOML text), and its run directory."""
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as folder:
        toml, out = Path(folder) / "run.toml", Path(folder) / "out"
        toml.write_text(manifest)
        command = [sys.executable, "-m", "peers.cli", "local", str(toml), "--out", str(out), *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            try:
                yield process, out
            finally:
                process.terminate()
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()


def read_metrics(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def whole(text: str) -> int:
    """For argparse."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text}: allowed are whole numbers from 1 to 1000")
    return int(text)


def run_parts(
    names: Iterable[str], run: Callable[[str], Any], figures: dict[str, Any], path: Path | None
) -> NoReturn:
    """Run each part, put what it returns into ``figures``, write them to ``path``, and exit.

    A part that raises RuntimeError is told as failed, and the others go on.
    """
    failed = False
    try:
        for name in names:
            try:
                figures[name] = run(name)
            except RuntimeError as error:
                failed = True
                print(f"\n{name}: failed: {error}", flush=True)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    finally:
        write_json(path, figures)
    sys.exit(failed)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


class Progress:
    """One line on standard error: redrawn in a terminal, elsewhere repeated now and then."""

    EVERY_S = 0.5, 15.0

    def __init__(self, name: str, every_s: float | None = None) -> None:
        """``every_s``: the least time between two lines, if not ``EVERY_S``."""
        self._name, self._began, self._drawn = name, time.monotonic(), -inf
        self._live = sys.stderr.isatty()
        self._every_s = self.EVERY_S[not self._live] if every_s is None else every_s

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._drawn < self._every_s:
            return
        self._drawn = now
        line = f"{self._name}, {now - self._began:.0f} s: {text}"
        print(
            f"\r\033[K{line[:110]}" if self._live else line,
            end="" if self._live else "\n",
            file=sys.stderr,
            flush=True,
        )

    def clear(self) -> None:
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "machine": platform.machine(),
        "at": time.strftime("%Y-%m-%d %H:%M"),
    }


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")
