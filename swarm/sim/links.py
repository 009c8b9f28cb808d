"""What the links of many peers come to: the slowest of them, and mean delays between groups."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf

from swarm.sim.world import Latency


class Smallest:
    """The smallest of numbers that come and go; infinite if there is none."""

    def __init__(self) -> None:
        self._count: Counter[float] = Counter()
        self._heap: list[float] = []

    def add(self, value: float) -> None:
        if not self._count[value]:
            heapq.heappush(self._heap, value)
        self._count[value] += 1

    def discard(self, value: float) -> None:
        """It was added before."""
        self._count[value] -= 1

    @property
    def value(self) -> float:
        while self._heap and not self._count[self._heap[0]]:
            del self._count[heapq.heappop(self._heap)]
        return self._heap[0] if self._heap else inf


def mean_delay(latency: Latency, some: Mapping[str, int], others: Mapping[str, int]) -> float:
    """One way, in seconds, between two groups: peers by region. 0 if one is empty."""
    pairs = sum(some.values()) * sum(others.values())
    if not pairs:
        return 0.0
    total = sum(
        a * b * latency.one_way_s(here, there)
        for here, a in some.items()
        for there, b in others.items()
        if a and b
    )
    return total / pairs


def delays(
    latency: Latency, stages: Sequence[Mapping[str, int]], trainer: str
) -> tuple[float, float]:
    """Mean one-way delays in seconds: from one stage to the next, and between trainer and peers."""
    if not latency.between:
        return latency.default_s, latency.default_s
    hops = [mean_delay(latency, first, second) for first, second in pairwise(stages)]
    trips = [mean_delay(latency, stage, {trainer: 1}) for stage in stages]
    return sum(hops) / max(1, len(hops)), sum(trips) / max(1, len(trips))
