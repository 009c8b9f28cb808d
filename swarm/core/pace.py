"""How a trainer numbers what it sends, and when it calls an attempt late."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from swarm.core.estimates import Estimate
from swarm.types import Stamp

GRACE = 0.1
"""Share of the last step's time for which a step waits for those that still apply the last one."""


class Stamps:
    """The one counter from which a trainer numbers all that it sends."""

    def __init__(self, make: Callable[[int], Stamp]) -> None:
        self._make = make
        self._n = 0

    def take(self) -> Stamp:
        self._n += 1
        return self._make(self._n)


class Pace:
    """How long attempts take, to know when one is late. Lives longer than a step.

    The limit follows measured times, with a floor for noise; before anything was measured it is
    generous, since first passes are slow everywhere.
    """

    FACTOR = 3.0
    FIRST = 6.0
    GROWTH = 1.5
    FORGET = 0.01

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._attempt = Estimate()
        self._quickest: dict[Hashable, float] = {}

    def beyond_latency_s(self, way: Hashable, link_s: float) -> float:
        """How much longer a push took than the quickest of the same ``way``, stage and direction.

        Pushes under way together share the latency of the links, so that is nobody's work. All
        pushes of one way are of one size: what differs is how slow, or how full, a sender's link
        is. The quickest is forgotten slowly, as whoever it was may have left. 0: it is not known,
        since the receipt did not wait for the push.
        """
        if link_s <= 0:
            return 0.0
        least = self._quickest.get(way, link_s)
        self._quickest[way] = min(link_s, least + self.FORGET * (link_s - least))
        return max(0.0, link_s - least)

    def took(self, seconds: float) -> None:
        self._attempt.update(seconds)

    def limit_s(self, tries: int) -> float:
        """How long an attempt may be without news, at its try number ``tries`` (0 is first)."""
        known = self._attempt.value
        base = self.FIRST * self._floor_s if known is None else self.FACTOR * known
        return max(self._floor_s, base) * self.GROWTH ** min(tries, 8)
