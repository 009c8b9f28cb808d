"""What a simulated run is measured by: throughput against the optimum, steps, moves, bytes."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from swarm.core.flight import Flight
from swarm.core.journey import Phase
from swarm.core.step import Decision
from swarm.sim.optimum import Optimum
from swarm.sim.world import Moved, Outcome, Sample
from swarm.types import PeerId

if TYPE_CHECKING:
    from swarm.sim.simulation import Simulation


class Meter:
    """Fills in the ``outcome``."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.outcome = Outcome(sim.world, "microbatch")
        self._optimum = Optimum(sim.costs)
        self._since = self._best = 0.0
        self._sampled_at = 0.0
        self._sampled = 0.0
        self._sampled_resent = 0
        self._flight: Flight | None = None
        self._seen = bytearray()
        self._count = 0

    # -- work ---------------------------------------------------------------------------------

    def begins(self, flight: Flight) -> None:
        """A step begins."""
        self._flight = flight
        self._seen = bytearray(self._sim.world.microbatches)
        self._count = 0

    def look_at(self, m: int) -> None:
        """Something was heard of microbatch ``m``: is it done? Counted the first time it is."""
        if self._flight is None or self._seen[m]:
            return
        if self._flight.journeys[m].phase is Phase.DONE:
            self._seen[m] = 1
            self._count += 1
            self.outcome.done += self._sim.world.microbatch

    def ended(self, decision: Decision, resent: int) -> None:
        """The step is over: what was not seen before counts too; nothing, if it is skipped."""
        counted = 0 if decision.update.skip else self._sim.world.microbatches
        self.outcome.done += (counted - self._count) * self._sim.world.microbatch
        self.outcome.steps.append(self._sim.clock.now)
        self.outcome.resent += resent
        self._flight = None

    def moved(self, move: Moved) -> int:
        """A peer sets out; returns the move's number, for ``arrived``."""
        self.outcome.moves.append(move)
        return len(self.outcome.moves) - 1

    def arrived(self, number: int) -> None:
        """The mover serves where it went."""
        moves = self.outcome.moves
        moves[number] = replace(moves[number], done_s=self._sim.clock.now)

    # -- who is there -------------------------------------------------------------------------

    def here(self, peer: PeerId) -> None:
        """It is there from now on."""
        self._pass_time()
        self._optimum.add(self._sim.machines[peer])

    def left(self, peer: PeerId) -> None:
        self._pass_time()
        self._optimum.remove(self._sim.machines[peer])

    def _pass_time(self) -> None:
        """The optimum up to now is that of who was there up to now."""
        now = self._sim.clock.now
        if now > self._since:
            best = self._optimum.in_steps * self._sim.world.microbatch
            self._best += best * (now - self._since)
            self._since = now

    # -- samples ------------------------------------------------------------------------------

    def sample(self) -> None:
        """A stretch of time is over."""
        now, trainer = self._sim.clock.now, self._sim.trainer
        self._pass_time()
        length = now - self._sampled_at
        done = self.outcome.done - self._sampled
        peers = tuple(len(trainer.members.ready(stage)) for stage in range(trainer.stages))
        resent = self._resent() - self._sampled_resent
        if length > 0:
            self.outcome.samples.append(
                Sample(now, done / length, self._best / length, peers, resent)
            )
            self._sampled_resent += resent
        self._best, self._sampled, self._sampled_at = 0.0, self.outcome.done, now

    def _resent(self) -> int:
        """Up to now."""
        flight = self._flight
        return self.outcome.resent + (0 if flight is None else flight.resent)

    def finish(self) -> Outcome:
        """The clock has stopped."""
        sim, outcome = self._sim, self.outcome
        if sim.clock.now > self._sampled_at:
            self.sample()
        outcome.resent = self._resent()
        outcome.sent_bytes = {peer: host.sent for peer, host in sim.hosts.items()}
        outcome.received_bytes = {peer: host.received for peer, host in sim.hosts.items()}
        outcome.decisions = sim.log or []
        assert all(move.done_s == inf or move.done_s >= move.at_s for move in outcome.moves)
        return outcome
