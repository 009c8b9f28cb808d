"""Averaging at the end of a step: how long the members of a round take to sum their gradients.

Each member sums a part and sends it to all, so 2 (n - 1) / n of the vector goes out of each of n
members and comes in, over the slowest link among them. It goes in pieces, as ``peers.averaging``
cuts it, and each is waited for: where many average far from each other, the answers take longer
than the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from swarm.core.closing import Fetch, Prepare
from swarm.types import Replica, Stamp

PIECES_PER_MEMBER = 4
PIECE_BYTES = 1 << 20
SENDS_AT_ONCE = 8

if TYPE_CHECKING:
    from swarm.sim.server import Server
    from swarm.sim.simulation import Simulation


def _around_s(members: int, vector: float, rate: float, delay: float) -> float:
    """Until all parts and all sums are there, from the start.

    The vector goes in pieces, and a member has only a few on their way at once: the link sets the
    pace, or the answers to wait for do. Sums follow when the last parts have come.
    """
    if not vector:
        return 2 * delay
    pieces = max(PIECES_PER_MEMBER * members, vector / PIECE_BYTES)
    parts = pieces * (members - 1) / members
    piece_s = vector / pieces / rate
    there_and_back = (2 * delay + piece_s) / SENDS_AT_ONCE
    batches = ceil(parts / SENDS_AT_ONCE) * SENDS_AT_ONCE
    waiting_s = (batches + parts) * there_and_back - delay
    return max(2 * parts * piece_s + 2 * delay, waiting_s)


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
        vector = self._sim.world.stages[round_.stage].vector_bytes
        nbytes = 2 * (count - 1) / count * vector
        for host in hosts:
            host.sent += nbytes
            host.received += nbytes
        slowest = min(min(host.up, host.down) for host in hosts)
        return _around_s(count, vector, slowest, self._sim.delays.widest(hosts))

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
