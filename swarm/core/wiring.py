"""Stochastic wiring: who serves the next hop of a microbatch.

Interleaved weighted round robin (SWARM, algorithm 1): each replica's priority is the busy time
given to it so far, done or expected; the smallest is chosen. Four things differ from the paper.
Work that is done counts with the time that it really took, so a wrong first guess or a host that
became slow is made good. A newcomer starts at the smallest priority of its stage (an absolute
start would flood it), is expected to be as fast as the median, and is given only a few
microbatches until it has finished one. A replica that is quiet for far longer than usual is
expected to be that much slower. And time in which a replica was banned or hung is not made up
for afterwards, since it would then get everything at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from swarm.core.backoff import Backoff, Bans
from swarm.core.ranking import Ranking
from swarm.core.server import Debt, Server
from swarm.types import Replica, Stamp

AWAY = 256
"""Of how many replicas that are away the speed is remembered, for each stage."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the trainer knows of a replica: for the view, the metrics and the balance of stages."""

    replica: Replica
    service_s: float | None
    outstanding: int
    served: int


class Wiring:
    """The trainer's picture of every stage: who serves it, how fast, and what each was given."""

    def __init__(self, stages: int, *, ban: Backoff) -> None:
        self._stages = [Ranking() for _ in range(stages)]
        self._away: list[dict[Replica, Server]] = [{} for _ in range(stages)]
        self._owed: dict[Stamp, dict[int, Debt]] = {}
        self._bans: Bans[Replica] = Bans(ban)
        self._failed: set[Replica] = set()
        self._bans_end = float("-inf")
        self._serving: Sequence[Sequence[Replica]] = ()

    def serve(self, stages: Sequence[Sequence[Replica]]) -> bool:
        """``sync`` for all stages; False if nothing can have changed since the last call.

        A tuple (of tuples) that is the same object as last time is taken for unchanged.
        """
        if stages is self._serving:
            return False
        for stage, replicas in enumerate(stages):
            self.sync(stage, replicas)
        self._serving = stages if isinstance(stages, tuple) else ()
        return True

    def sync(self, stage: int, replicas: Iterable[Replica]) -> None:
        """Exactly ``replicas`` serve ``stage`` from now on: newcomers enter, the gone leave.

        How fast the gone were is kept for a while: between two steps a replica is away for as
        long as it takes to apply a decision. It will not make up for the time.
        """
        self._serving = ()
        ranking, away = self._stages[stage], self._away[stage]
        wanted = list(replicas)
        for gone in sorted(ranking.servers.keys() - set(wanted)):
            for debt in ranking.servers[gone].debts:
                debts = self._owed[debt.stamp]
                del debts[stage]
                if not debts:
                    del self._owed[debt.stamp]
            away[gone] = ranking.leave(gone)
            self._forgive(gone)
        for replica in wanted:
            if replica not in ranking.servers:
                ranking.enter(away.pop(replica) if replica in away else Server(replica))
        while len(away) > AWAY:
            del away[next(iter(away))]

    def ban(self, replica: Replica, now: float, rng: random.Random) -> None:
        """Leave ``replica`` out for a while, unless its stage would be empty."""
        self._bans_end = max(self._bans_end, self._bans.failed(replica, now, rng))
        self._failed.add(replica)
        for ranking in self._stages:
            if replica in ranking.servers:
                ranking.touch(ranking.servers[replica])

    def _forgive(self, replica: Replica) -> None:
        if self._failed and replica in self._failed:
            self._failed.discard(replica)
            self._bans.succeeded(replica)

    def choose(
        self,
        stage: int,
        stamp: Stamp,
        now: float,
        rng: random.Random,
        *,
        shun: frozenset[Replica] = frozenset(),
        most: int = 3,
    ) -> tuple[Replica, ...]:
        """Up to ``most`` replicas for attempt ``stamp``, best first; the first is to do it.

        ``shun`` are served only if nobody else is there. Empty if the stage has no replica. An
        attempt is chosen for once in each stage.
        """
        ranking = self._stages[stage]
        banned = None if now >= self._bans_end else partial(self._bans.banned, now=now)
        ordered = ranking.choose(now, rng, banned, shun=shun, most=most)
        if ordered:
            server = ordered[0]
            debt = Debt(stamp, now, server)
            self._owed.setdefault(stamp, {})[stage] = debt
            server.give(debt, now)
            ranking.touch(server)
        return tuple([server.replica for server in ordered])

    def accepted(self, stage: int, stamp: Stamp, replica: Replica, now: float) -> None:
        """``replica`` took the attempt, which perhaps was expected of another.

        An attempt that is over is expected of nobody.
        """
        del now
        ranking = self._stages[stage]
        server, debts = ranking.servers.get(replica), self._owed.get(stamp)
        if server is not None and debts is not None and stage in debts:
            self._take(ranking, debts[stage], server)

    def _take(self, ranking: Ranking, debt: Debt, server: Server) -> None:
        debt.heard = True
        if debt.server is not server:
            ranking.touch(debt.server)
            ranking.touch(server)
            debt.server.decline(debt)
            server.give(debt, debt.sent_at)

    def served(self, stage: int, stamp: Stamp, replica: Replica, took_s: float, now: float) -> None:
        """``replica`` is done with the attempt, forward and backward, after ``took_s`` of work."""
        ranking = self._stages[stage]
        server, debts = ranking.servers.get(replica), self._owed.get(stamp)
        if server is None:
            return
        if debts is not None and stage in debts:
            debt = debts.pop(stage)
            self._take(ranking, debt, server)
            server.debts.remove(debt)
            if not debts:
                del self._owed[stamp]
        ranking.done(server, took_s, now)
        self._forgive(replica)

    def closed(self, stamp: Stamp) -> None:
        """The attempt is over: what did not get done of it is expected of nobody.

        A replica that told nothing of it still counts as quiet, so it is given little.
        """
        for stage, debt in self._owed.pop(stamp, {}).items():
            debt.server.close(debt)
            self._stages[stage].touch(debt.server)

    def expected_s(self, stage: int, replica: Replica) -> float:
        """Expected seconds of work for one microbatch: measured, else the stage's median."""
        ranking = self._stages[stage]
        return ranking.expected_s(ranking.servers.get(replica))

    def loads(self, stage: int) -> list[Load]:
        return [
            Load(server.replica, server.service.value, len(server.debts), server.served)
            for _, server in sorted(self._stages[stage].servers.items())
        ]


class Window:
    """How many microbatches the trainer keeps in flight: grows by success, narrows on *busy*.

    At first it grows by one with each success, so it doubles in the time of one trip, until a
    replica is busy or a trip takes much longer than the quickest did: by then those on their way
    hide the latency of the links, and more would only wait in queues. From then on it grows by
    one in a window's worth of successes.
    """

    WAITS = 2.0
    """A trip that takes so many times as long as the quickest one waits in queues."""

    def __init__(self, start: int, *, least: int, most: int) -> None:
        self._size = float(start)
        self._least = least
        self._most = most
        self._since_cut = start
        self._starting = True
        self._quickest_s = float("inf")

    @classmethod
    def sized(cls, stages: int, replicas: int, microbatches: int, limit: int) -> Window:
        """For a step of so many microbatches: ``limit`` at most; 0: as many as pay, from two for
        each replica on."""
        most = min(limit or microbatches, microbatches)
        start = limit or max(2 * stages, 2 * replicas)
        return cls(min(start, most), least=min(stages, most), most=most)

    @property
    def size(self) -> int:
        return int(self._size)

    def succeeded(self, took_s: float | None = None) -> None:
        """A microbatch is done, ``took_s`` after its only attempt was sent."""
        if took_s is not None:
            self._quickest_s = min(self._quickest_s, took_s)
            if took_s > self.WAITS * self._quickest_s:
                self._starting = False
        self._since_cut += 1
        grow = 1.0 if self._starting and took_s is not None else 1 / self._size
        self._size = min(self._most, self._size + grow)

    def busy(self) -> None:
        """Cut by a tenth: the first time, then once per window's worth of successes."""
        self._starting = False
        if self._since_cut >= self.size:
            self._size = max(self._least, self._size * 0.9)
            self._since_cut = 0
