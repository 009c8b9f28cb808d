"""Whom to copy from: in turn, leaving out for a while those that failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from swarm.types import Replica

ASIDE_S = 1.0
LONGEST_ASIDE_S = 60.0


class Donors:
    """The replicas that can give a stage's state, as a joiner sees them."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._all: list[Replica] = []
        self._aside: dict[Replica, float] = {}
        self._failures: dict[Replica, int] = {}
        self._used: set[Replica] = set()
        self._preferred: Replica | None = None
        self._turn = 0
        self.offered(replicas)

    def offered(self, replicas: Iterable[Replica]) -> None:
        """The trainer names them; those it names no more are gone."""
        self._all = sorted(set(replicas))
        if self._preferred not in self._all:
            self._preferred = None

    def next(self, now: float) -> Replica | None:
        """Whose turn it is; None while all have failed lately."""
        return next(self.in_turn(now), None)

    def in_turn(self, now: float) -> Iterator[Replica]:
        """All that have not failed lately, each once."""
        if self._preferred is not None and self._aside.get(self._preferred, now) <= now:
            yield self._preferred
            return
        able = [replica for replica in self._all if self._aside.get(replica, now) <= now]
        self._turn += 1
        for i in range(len(able)):
            yield able[(self._turn + i) % len(able)]

    def gave(self, replica: Replica) -> None:
        """A piece came from it."""
        self._used.add(replica)
        self._failures.pop(replica, None)
        self._aside.pop(replica, None)

    def has_given(self, replica: Replica) -> bool:
        """Whether anything came from it, since one was preferred last."""
        return replica in self._used

    def failed(self, replica: Replica, now: float) -> None:
        """It is left out for a while, longer each time."""
        failures = self._failures.get(replica, 0)
        self._failures[replica] = failures + 1
        self._aside[replica] = now + min(LONGEST_ASIDE_S, ASIDE_S * 2.0 ** min(failures, 10))

    def witness(self, now: float) -> Replica | None:
        """Whose digests to compare with: of one that nothing was copied from, if there is any.

        Once one is preferred, that one: others have been asked already.
        """
        if self._preferred is not None and self._aside.get(self._preferred, now) <= now:
            return self._preferred
        able = [replica for replica in self._all if self._aside.get(replica, now) <= now]
        others = [replica for replica in able if replica not in self._used]
        return next(iter([*others, *able]), None)

    def prefer(self, replica: Replica) -> None:
        """What others gave differed from what it has: copy from this one alone."""
        self._preferred = replica
        self._used = {replica}
