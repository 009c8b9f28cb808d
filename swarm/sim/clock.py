"""Virtual time: a heap of what happens when."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Call = Callable[..., Any]


class Clock:
    """Runs calls in the order of their times; those of one instant in the order of ``at``.

    ``now`` is in seconds; ``events`` counts what has run.
    """

    __slots__ = ("_heap", "_number", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._number = 0

    def at(self, time: float, call: Call, *args: Any) -> None:
        """``call(*args)`` at ``time``, which is not in the past."""
        self._number += 1
        heappush(self._heap, (time, self._number, call, args))

    def after(self, seconds: float, call: Call, *args: Any) -> None:
        self.at(self.now + seconds, call, *args)

    def run(self, until: float) -> None:
        """All that happens up to ``until``, which is the time afterwards."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, call, args = heappop(heap)
            self.events += 1
            call(*args)
        self.now = until
