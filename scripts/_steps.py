"""The steps of a run, as ``metrics.jsonl`` tells them, and when each was seen to end."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """A line of ``metrics.jsonl``, and the moment at which it was there."""

    ended: float
    figures: dict[str, Any]

    @property
    def number(self) -> int:
        return int(self.figures["step"])

    @property
    def timed(self) -> bool:
        """Not so if another trainer has ended it: then nobody knows how long it took."""
        return self.figures["seconds"] is not None

    @property
    def seconds(self) -> float:
        return float(self.figures["seconds"]) if self.timed else nan

    @property
    def began(self) -> float:
        return self.ended - self.seconds

    def overlaps(self, start: float, end: float) -> bool:
        return self.began <= end and start <= self.ended


class Metrics:
    """The steps of a run directory in the order in which they ended, later taken back or not.

    Those that are there at the beginning are left out.
    """

    def __init__(self, out: Path) -> None:
        self.steps: list[Step] = []
        self._path = out / "metrics.jsonl"
        self._known: list[str] = []
        self._stamp = (0, 0, 0)
        self.look()
        self.steps.clear()

    def look(self) -> None:
        """Take in what is new; the file grows, or is replaced by a shorter one."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if stamp == self._stamp:
            return
        now, lines = time.monotonic(), self._path.read_text().split("\n")[:-1]
        same = 0
        while same < min(len(lines), len(self._known)) and lines[same] == self._known[same]:
            same += 1
        self.steps += [Step(now, json.loads(line)) for line in lines[same:]]
        self._known, self._stamp = lines, stamp

    @property
    def current(self) -> list[dict[str, Any]]:
        """The lines that are in the file now."""
        return [json.loads(line) for line in self._known]


def rate(steps: Sequence[Step]) -> float:
    return sum(step.figures["samples"] for step in steps) / sum(step.seconds for step in steps)
