"""When to look at which of many things next, though their times keep moving on."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

FOREVER = float("inf")


class _Key(Protocol):
    """Hashable and ordered: of two things with the same time the lesser comes first."""

    def __hash__(self) -> int: ...
    def __lt__(self, other: Any, /) -> bool: ...


Key = TypeVar("Key", bound=_Key)


class Alarms(Generic[Key]):
    """Calls for whatever is due, without going over the rest.

    Most times move on long before they come: that costs nothing, since a heap keeps the time at
    which something was last looked at, and it is looked at anew then. Only a time that has become
    earlier must be told to ``at``.

    Args:
        when: the time at which something is due now; infinity: never.
    """

    def __init__(self, when: Callable[[Key], float]) -> None:
        self._when = when
        self._heap: list[tuple[float, Key]] = []
        self._set: dict[Key, float] = {}

    def at(self, key: Key, time: float) -> None:
        """``key`` is due at ``time``, unless that moves on."""
        if time < self._set.get(key, FOREVER):
            self._set[key] = time
            heapq.heappush(self._heap, (time, key))

    def forget(self, key: Key) -> None:
        self._set.pop(key, None)

    def next(self) -> float:
        """When the next is due; infinity if none is."""
        heap = self._heap
        while heap:
            time, key = heap[0]
            if self._set.get(key) != time:  # it was set to an earlier time, or forgotten
                heapq.heappop(heap)
                continue
            due = self._when(key)
            if due <= time:
                return time
            del self._set[key]
            heapq.heappop(heap)
            self.at(key, due)
        return FOREVER

    def due(self, now: float) -> list[Key]:
        """Whatever is due: in order of time. It is called for once."""
        found: list[Key] = []
        while self._heap and self._heap[0][0] <= now and self.next() <= now:
            _, key = heapq.heappop(self._heap)
            del self._set[key]
            found.append(key)
        return found
