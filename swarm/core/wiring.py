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
from dataclasses import dataclass, field
from statistics import median

from swarm.core.backoff import Backoff, Bans
from swarm.core.estimates import Estimate
from swarm.types import Replica, Stamp

FIRST_GUESS_S = 1.0
OVERDUE = 2.0
"""A replica that is quiet for this multiple of its usual time is expected to have slowed down."""
HUNG = 6.0
"""From this multiple on, what it misses meanwhile is not made up for afterwards."""
PROBES = 2
"""How many microbatches a replica is given before it has finished one, if others can serve."""
AWAY = 256
"""Of how many replicas that are away the speed is remembered, for each stage."""


@dataclass(slots=True)
class _Server:
    """What was given to one replica.

    ``busy_s``: work done, counted from the smallest priority of the stage when it entered.
    ``given``: attempts that it owes, and when they were sent. ``heard``: those of which it has
    begun to tell.
    ``quiet_since``: when it last finished work, or was given some after it had none.
    """

    busy_s: float = 0.0
    service: Estimate = field(default_factory=Estimate)
    quiet: Estimate = field(default_factory=Estimate)
    given: dict[Stamp, float] = field(default_factory=dict)
    heard: set[Stamp] = field(default_factory=set)
    quiet_since: float | None = None
    served: int = 0

    def slowdown(self, now: float) -> float:
        """How much slower than usual it seems to be, by how long it has been quiet; 1 if not."""
        if self.quiet_since is None or not self.quiet.value:
            return 1.0
        factor = (now - self.quiet_since) / self.quiet.value
        return factor if factor > OVERDUE else 1.0

    def give(self, stamp: Stamp, now: float) -> None:
        self.given[stamp] = now
        if self.quiet_since is None:
            self.quiet_since = now

    def take_back(self, stamp: Stamp) -> None:
        self.given.pop(stamp, None)
        self.heard.discard(stamp)

    def decline(self, stamp: Stamp) -> None:
        """Another took it. Who had nothing else to do has not been quiet since then."""
        sent = self.given.get(stamp)
        self.take_back(stamp)
        if sent is not None and not self.given and self.quiet_since == sent:
            self.quiet_since = None

    def done(self, stamp: Stamp, took_s: float, now: float) -> None:
        self.take_back(stamp)
        self.busy_s += took_s
        self.service.update(took_s)
        self.served += 1
        if self.quiet_since is not None:
            self.quiet.update(now - self.quiet_since)
        self.quiet_since = now if self.given else None

    def leave(self) -> None:
        self.given.clear()
        self.heard.clear()
        self.quiet_since = None

    def enter(self, floor_s: float) -> None:
        """Begin, or begin again, with the smallest priority of the stage, if not with more."""
        self.busy_s = max(self.busy_s, floor_s)

    @property
    def probing(self) -> bool:
        return self.served == 0 and len(self.given) >= PROBES


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
        self._servers: list[dict[Replica, _Server]] = [{} for _ in range(stages)]
        self._away: list[dict[Replica, _Server]] = [{} for _ in range(stages)]
        self._floor = [0.0] * stages
        self._bans: Bans[Replica] = Bans(ban)
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
        servers, away = self._servers[stage], self._away[stage]
        wanted = list(replicas)
        for gone in sorted(set(servers) - set(wanted)):
            away[gone] = servers.pop(gone)
            away[gone].leave()
            self._bans.succeeded(gone)
        for replica in wanted:
            if replica not in servers:
                servers[replica] = away.pop(replica) if replica in away else _Server()
                servers[replica].enter(self._floor[stage])
        while len(away) > AWAY:
            del away[next(iter(away))]

    def ban(self, replica: Replica, now: float, rng: random.Random) -> None:
        """Leave ``replica`` out for a while, unless its stage would be empty."""
        self._bans.failed(replica, now, rng)

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

        ``shun`` are served only if nobody else is there. Empty if the stage has no replica.
        """
        servers = self._servers[stage]
        allowed = self._bans.allowed(list(servers), now)
        if not allowed:
            return ()
        self._lift(stage, allowed, now)
        keyed = [
            (
                replica in shun,
                servers[replica].probing,
                self._priority(stage, replica, servers[replica].slowdown(now)),
                rng.random(),
                replica,
            )
            for replica in allowed
        ]
        ordered = tuple(replica for *_, replica in sorted(keyed)[:most])
        servers[ordered[0]].give(stamp, now)
        return ordered

    def accepted(self, stage: int, stamp: Stamp, replica: Replica, now: float) -> None:
        """``replica`` took the attempt, which perhaps was expected of another.

        An attempt that is over is expected of nobody.
        """
        servers = self._servers[stage]
        server = servers.get(replica)
        sent = [other.given[stamp] for other in servers.values() if stamp in other.given]
        if server is None or not sent:
            return
        for other in servers.values():
            if other is not server:
                other.decline(stamp)
        server.give(stamp, sent[0])
        server.heard.add(stamp)

    def served(self, stage: int, stamp: Stamp, replica: Replica, took_s: float, now: float) -> None:
        """``replica`` is done with the attempt, forward and backward, after ``took_s`` of work."""
        self.accepted(stage, stamp, replica, now)
        server = self._servers[stage].get(replica)
        if server is None:
            return
        server.done(stamp, took_s, now)
        self._bans.succeeded(replica)

    def closed(self, stamp: Stamp) -> None:
        """The attempt is over: what did not get done of it is expected of nobody.

        A replica that told nothing of it still counts as quiet, so it is given little.
        """
        for servers in self._servers:
            for server in servers.values():
                heard = stamp in server.heard
                server.take_back(stamp)
                if heard and not server.given:
                    server.quiet_since = None

    def expected_s(self, stage: int, replica: Replica) -> float:
        """Expected seconds of work for one microbatch: measured, else the stage's median."""
        servers = self._servers[stage]
        server = servers.get(replica)
        if server is not None and server.service.value is not None:
            return server.service.value
        known = [s.service.value for s in servers.values() if s.service.value is not None]
        return median(known) if known else FIRST_GUESS_S

    def loads(self, stage: int) -> list[Load]:
        return [
            Load(replica, server.service.value, len(server.given), server.served)
            for replica, server in sorted(self._servers[stage].items())
        ]

    def _priority(self, stage: int, replica: Replica, slowdown: float = 1.0) -> float:
        server = self._servers[stage][replica]
        return server.busy_s + len(server.given) * self.expected_s(stage, replica) * slowdown

    def _lift(self, stage: int, allowed: list[Replica], now: float) -> None:
        """Who is banned or hung keeps up with the others: it will not make up for that time."""
        servers = self._servers[stage]
        going = [replica for replica in allowed if servers[replica].slowdown(now) < HUNG]
        floor = min(self._priority(stage, replica) for replica in going or allowed)
        for replica in servers.keys() - set(going):
            servers[replica].busy_s += max(0.0, floor - self._priority(stage, replica))
        self._floor[stage] = floor


class Window:
    """How many microbatches the trainer keeps in flight: grows by success, narrows on *busy*."""

    def __init__(self, start: int, *, least: int, most: int) -> None:
        self._size = float(start)
        self._least = least
        self._most = most
        self._since_cut = start

    @property
    def size(self) -> int:
        return int(self._size)

    def succeeded(self) -> None:
        self._since_cut += 1
        self._size = min(self._most, self._size + 1 / self._size)

    def busy(self) -> None:
        """Cut by a quarter: the first time, then once per window's worth of successes."""
        if self._since_cut >= self.size:
            self._size = max(self._least, self._size * 0.75)
            self._since_cut = 0
