"""Logs of how many machines were alive, and when: what churn is replayed from.

Two formats are read. CSV: rows ``time,alive``, one at every change, times in seconds or hours.
JSON: ``{"metadata": {"gap_seconds": g}, "data": [alive, ...]}``, one count every ``g`` seconds.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from swarm.errors import DataError

HOUR_S = 3600.0
MOST_HOURS = 1000.0
"""Times with fractions that stay below this are taken for hours."""

MOST_ALIVE = 10_000_000
FORMATS = "CSV rows 'time,alive', or JSON with metadata.gap_seconds and data"


class Unit(StrEnum):
    """What the times of a CSV trace count. AUTO: hours if they have fractions and stay small."""

    AUTO = "auto"
    SECONDS = "seconds"
    HOURS = "hours"


@dataclass(frozen=True, slots=True)
class Trace:
    """``alive[i]`` machines from ``times_s[i]`` on, until ``end_s``.

    Times are in seconds, rise, and begin with 0, when somebody is alive for the first time.
    """

    name: str
    times_s: tuple[float, ...]
    alive: tuple[int, ...]
    end_s: float

    @property
    def peak(self) -> int:
        return max(self.alive)

    def at(self, time_s: float) -> int:
        """How many are alive at ``time_s``; before the beginning as at the beginning."""
        return self.alive[max(0, bisect_right(self.times_s, time_s) - 1)]

    def scaled(self, peers: int) -> Trace:
        """The same trace of a swarm that has ``peers`` machines at its peak."""
        counts = [round(alive * peers / self.peak) for alive in self.alive]
        return _trace(self.name, list(zip(self.times_s, counts, strict=True)), self.end_s)


def read_trace(path: str | Path, *, unit: Unit = Unit.AUTO) -> Trace:
    """Read a trace of either format, told apart by the content.

    The time before the first machine is alive is left out. ``unit`` is for CSV only.

    Raises:
        DataError: it cannot be read, has neither format, or nobody is ever alive in it.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise DataError(f"trace {path}: cannot be read ({reason.lower()})") from None
    rows = _ticks(path, text) if text.lstrip().startswith("{") else _changes(path, text, unit)
    return _begun(path, rows)


def _changes(path: Path, text: str, unit: Unit) -> list[tuple[float, int]]:
    rows: list[tuple[float, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            time, alive = line.split(",")
            row = float(time), int(alive)
        except ValueError:
            if number == 1 and not any(c.isdigit() for c in line):
                continue  # column names
            row = (math.nan, 0)
        if not math.isfinite(row[0]) or not 0 <= row[1] <= MOST_ALIVE:
            raise _wrong(path, f"line {number}, {line.strip()[:60]!r}")
        if rows and row[0] < rows[-1][0]:
            raise _wrong(path, f"line {number}, which is earlier than the one before")
        rows.append(row)
    if unit is Unit.HOURS or (unit is Unit.AUTO and _in_hours(rows)):
        return [(time * HOUR_S, alive) for time, alive in rows]
    return rows


def _in_hours(rows: Sequence[tuple[float, int]]) -> bool:
    """A log of seconds has no use for fractions, one of hours cannot do without them."""
    return any(time % 1 for time, _ in rows) and max(time for time, _ in rows) < MOST_HOURS


def _ticks(path: Path, text: str) -> list[tuple[float, int]]:
    try:
        tree = json.loads(text)
        gap, counts = tree["metadata"]["gap_seconds"], tree["data"]
        good = isinstance(gap, int | float) and math.isfinite(gap) and gap > 0
        good = good and all(type(n) is int and 0 <= n <= MOST_ALIVE for n in counts)
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise _wrong(path, "something else")
    rows = [(i * float(gap), n) for i, n in enumerate(counts)]
    return [*rows, (len(rows) * float(gap), counts[-1])] if rows else rows


def _begun(path: Path, rows: Sequence[tuple[float, int]]) -> Trace:
    first = next((i for i, (_, alive) in enumerate(rows) if alive), None)
    if first is None:
        raise DataError(f"trace {path}: nobody is ever alive in it")
    start = rows[first][0]
    end = rows[-1][0] - start
    if not end:
        raise DataError(f"trace {path}: it ends when the first machine comes")
    return _trace(path.name, [(time - start, alive) for time, alive in rows[first:]], end)


def _trace(name: str, rows: Sequence[tuple[float, int]], end_s: float) -> Trace:
    """Of several counts at one time the last holds; repeated counts say nothing new."""
    last_of_time = [a for a, b in pairwise(rows) if a[0] < b[0]] + [rows[-1]]
    kept = last_of_time[:1] + [b for a, b in pairwise(last_of_time) if a[1] != b[1]]
    return Trace(name, tuple(t for t, _ in kept), tuple(n for _, n in kept), end_s)


def _wrong(path: Path, found: str) -> DataError:
    return DataError(f"trace {path}: got {found}; allowed: {FORMATS}")
