"""How many pushes to one peer are under way at a time: as many as keep the link to it full.

Pushes that are sent all at once share a slow link and all arrive late, together: the next stage
waits for the first, and at the end of a step their gradients come back together too, while the
other direction is idle. Sent in turn, the first arrives early. What has to be under way is what
the link carries in the time of the quickest push (the bandwidth-delay product); both are measured
as BBR does (Cardwell et al., 2016): the rate as bytes that arrived during a push by its duration,
the most of late; the time as the least, forgotten slowly.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

LEAST = 2
"""Pushes that may always be under way: one can begin while the other's answer comes back."""
LATELY = 16
"""Of so many pushes the best rate is taken."""
GAIN = 1.25
"""More than the product, so that a link that has become faster is noticed."""
START_GAIN = 2.0
"""Until the rate does not grow any more: the product is found in few round trips."""
GREW = 1.1
FORGET = 0.002


@dataclass(frozen=True, slots=True)
class Turn:
    """A push under way: when it began, and what had arrived by then."""

    nbytes: int
    began: float
    arrived: int


class Link:
    """To one peer. ``may_start``, ``start``, ``end``; whoever may not start waits for an end."""

    def __init__(self) -> None:
        self._count = 0
        self._bytes = 0
        self._arrived = 0
        self._rates: deque[float] = deque(maxlen=LATELY)
        self._quickest_s = inf
        self._best = 0.0
        self._gain = START_GAIN
        self._broken = False

    @property
    def room_bytes(self) -> float:
        """That may be under way."""
        if self._broken:
            return inf
        return self._gain * max(self._rates) * self._quickest_s if self._rates else 0.0

    def may_start(self) -> bool:
        """Whether there is any room: a push may be larger than all of it."""
        return self._count < LEAST or self._bytes < self.room_bytes

    def start(self, nbytes: int, now: float) -> Turn:
        self._count += 1
        self._bytes += nbytes
        return Turn(nbytes, now, self._arrived)

    def end(self, turn: Turn, now: float, *, arrived: bool) -> None:
        """The push is over. ``arrived``: it was answered.

        If not, nobody waits for this peer until something arrives there again: all that is to go
        there fails as soon as it can, and the trainer is told.
        """
        self._count -= 1
        self._bytes -= turn.nbytes
        self._broken = not arrived
        took_s = now - turn.began
        if not arrived or took_s <= 0:
            return
        self._arrived += turn.nbytes
        self._rates.append((self._arrived - turn.arrived) / took_s)
        if self._quickest_s == inf:
            self._quickest_s = took_s
        forgotten = self._quickest_s + FORGET * (took_s - self._quickest_s)
        self._quickest_s = min(took_s, forgotten)
        if len(self._rates) == LATELY and max(self._rates) < GREW * self._best:
            self._gain = GAIN
        self._best = max(self._rates)
