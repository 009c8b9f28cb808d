"""Averaging at the end of a step: how long the members of a round take to sum their gradients.

Each member sums a part and sends it to all, so 2 (n - 1) / n of the vector goes out of each of n
members and comes in, over the slowest link among them, and two latencies pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm.core.closing import Fetch, Prepare
from swarm.types import Replica, Stamp

if TYPE_CHECKING:
    from swarm.sim.server import Server
    from swarm.sim.simulation import Simulation


@dataclass(slots=True)
class _Round:
    stage: int
    members: tuple[Replica, ...]
    begun: set[Replica] = field(default_factory=set)
    troubled: bool = False


class Rounds:
    """The rounds of the step under way, by their stamp."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._rounds: dict[Stamp, _Round] = {}

    def forget(self) -> None:
        """The step is over."""
        self._rounds.clear()

    def begun(self, server: Server, do: Prepare) -> None:
        """``server`` takes part; when all do, the vector goes round."""
        round_ = self._rounds.setdefault(do.round, _Round(do.stage, do.members))
        round_.begun.add(server.me)
        if len(round_.begun) == len(round_.members):
            clock = self._sim.clock
            clock.at(clock.now + self._takes_s(round_), self._whole, do.round)
        else:
            self._complain(do.round, round_)

    def _takes_s(self, round_: _Round) -> float:
        hosts = [self._sim.servers[member].host for member in round_.members]
        count = len(hosts)
        if count == 1:
            return 0.0
        nbytes = 2 * (count - 1) / count * self._sim.world.stages[round_.stage].vector_bytes
        for host in hosts:
            host.sent += nbytes
            host.received += nbytes
        slowest = min(min(host.up, host.down) for host in hosts)
        return nbytes / slowest + 2 * self._sim.delays.widest(hosts)

    def _whole(self, stamp: Stamp) -> None:
        """The sum is complete everywhere, unless somebody was gone before."""
        round_ = self._rounds.get(stamp)
        if round_ is None or self._complain(stamp, round_):
            return
        for member in round_.members:
            self._sim.servers[member].vote(stamp)

    def _complain(self, stamp: Stamp, round_: _Round) -> bool:
        """Whether a member is dead; its mates cannot reach it, and tell the trainer once."""
        sim = self._sim
        hosts = [sim.servers[member].host for member in round_.members]
        gone = [host for host in hosts if host.dead_at <= sim.clock.now]
        if gone and not round_.troubled:
            round_.troubled = True
            at = max(sim.noticed_at(host, 0.0) for host in gone)
            delay = max(sim.delays.between(host, sim.trainer.host) for host in hosts)
            sim.clock.at(at + delay, sim.trainer.hears_trouble, round_.stage, stamp)
        return bool(gone)

    def missed(self, server: Server, stamp: Stamp) -> tuple[Replica, ...]:
        """Whom ``server`` waits for: those that have not begun, or are dead."""
        round_, now = self._rounds[stamp], self._sim.clock.now
        return tuple(
            member
            for member in round_.members
            if member != server.me
            and (member not in round_.begun or self._sim.servers[member].host.dead_at <= now)
        )

    def fetch(self, do: Fetch) -> None:
        """A member copies the whole sum from ``do.source``, which has voted."""
        sim = self._sim
        source, server = sim.servers[do.source], sim.servers[do.replica]
        if not source.sealed or source.round != do.round or do.round not in self._rounds:
            return
        nbytes = sim.world.stages[do.stage].vector_bytes
        source.host.sent += nbytes
        server.host.received += nbytes
        rate = min(source.host.up, server.host.down)
        delay = 2 * sim.delays.between(source.host, server.host)
        sim.clock.at(sim.clock.now + nbytes / rate + delay, server.vote, do.round)
