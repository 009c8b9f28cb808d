"""Stochastic wiring: who serves the next hop of a microbatch.

Interleaved weighted round robin (SWARM, algorithm 1): each replica's priority is the total
expected busy time given to it so far; the smallest is chosen and charged before the call. Three
things differ from the paper. A charge is *settled* by the time that the work really took, so a
wrong first guess or a host that became slow is made good. A newcomer starts at the smallest
priority of its stage (an absolute start would flood it) and is expected to be as fast as the
median. A replica that owes an answer for far longer than expected is charged for the waiting.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from swarm.core.backoff import Backoff, Bans
from swarm.core.estimates import Estimate
from swarm.types import Replica, Stamp

FIRST_GUESS_S = 1.0
OVERDUE = 1.5
"""From this multiple of its expected time on, waiting counts as service time."""


@dataclass(slots=True)
class _Server:
    priority: float
    service: Estimate = field(default_factory=Estimate)
    charges: dict[Stamp, float] = field(default_factory=dict)
    sent: dict[Stamp, float] = field(default_factory=dict)
    last_served: float = 0.0
    served: int = 0


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
        self._bans: Bans[Replica] = Bans(ban)

    def sync(self, stage: int, replicas: Iterable[Replica]) -> None:
        """Exactly ``replicas`` serve ``stage`` from now on: newcomers enter, the gone leave."""
        servers, wanted = self._servers[stage], list(replicas)
        for gone in set(servers) - set(wanted):
            del servers[gone]
            self._bans.succeeded(gone)
        floor = min((server.priority for server in servers.values()), default=0.0)
        for replica in wanted:
            if replica not in servers:
                servers[replica] = _Server(floor)

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
        """Up to ``most`` replicas for attempt ``stamp``, best first; the first is charged.

        ``shun`` are served only if nobody else is there. Empty if the stage has no replica.
        """
        servers = self._servers[stage]
        allowed = self._bans.allowed(list(servers), now)
        if not allowed:
            return ()
        keyed = [
            (replica in shun, self._priority(stage, replica, now), rng.random(), replica)
            for replica in allowed
        ]
        ordered = tuple(replica for *_, replica in sorted(keyed)[:most])
        self._charge(stage, ordered[0], stamp, now)
        return ordered

    def accepted(self, stage: int, stamp: Stamp, replica: Replica, now: float) -> None:
        """``replica`` took the attempt: if it was not the first choice, the charge moves to it."""
        servers = self._servers[stage]
        server = servers.get(replica)
        if server is None or stamp in server.charges:
            return
        for other in servers.values():
            self._refund(other, stamp)
        self._charge(stage, replica, stamp, now)

    def served(self, stage: int, stamp: Stamp, replica: Replica, took_s: float, now: float) -> None:
        """``replica`` is done with the attempt, forward and backward, after ``took_s`` of work."""
        self.accepted(stage, stamp, replica, now)
        server = self._servers[stage].get(replica)
        if server is None:
            return
        server.priority += took_s - server.charges.pop(stamp)
        server.sent.pop(stamp)
        server.service.update(took_s)
        server.last_served = now
        server.served += 1
        self._bans.succeeded(replica)

    def closed(self, stamp: Stamp) -> None:
        """The attempt is over: whatever it was charged for and did not get done is refunded."""
        for servers in self._servers:
            for server in servers.values():
                self._refund(server, stamp)

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
            Load(replica, server.service.value, len(server.charges), server.served)
            for replica, server in sorted(self._servers[stage].items())
        ]

    def _priority(self, stage: int, replica: Replica, now: float) -> float:
        server = self._servers[stage][replica]
        if not server.sent or server.service.value is None:
            return server.priority
        waiting = now - max(server.last_served, min(server.sent.values()))
        if waiting <= OVERDUE * server.service.value:
            return server.priority
        return server.priority + waiting * len(server.sent)

    def _charge(self, stage: int, replica: Replica, stamp: Stamp, now: float) -> None:
        charge = self.expected_s(stage, replica)
        server = self._servers[stage][replica]
        server.charges[stamp] = charge
        server.sent[stamp] = now
        server.priority += charge

    @staticmethod
    def _refund(server: _Server, stamp: Stamp) -> None:
        server.priority -= server.charges.pop(stamp, 0.0)
        server.sent.pop(stamp, None)


class Window:
    """How many microbatches the trainer keeps in flight: grows by success, narrows on *busy*."""

    def __init__(self, start: int, *, least: int, most: int) -> None:
        self._size = float(start)
        self._least = least
        self._most = most
        self._since_cut = 0

    @property
    def size(self) -> int:
        return int(self._size)

    def succeeded(self) -> None:
        self._since_cut += 1
        self._size = min(self._most, self._size + 1 / self._size)

    def busy(self) -> None:
        """Cut by a quarter, once per window's worth of successes."""
        if self._since_cut >= self.size:
            self._size = max(self._least, self._size * 0.75)
            self._since_cut = 0
