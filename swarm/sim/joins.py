"""Replicas that copy the state of their stage from others while the run goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.core.step import Decision
from swarm.sim.joiner import Joiner

if TYPE_CHECKING:
    from swarm.sim.network import Host
    from swarm.sim.server import Server
    from swarm.sim.simulation import Simulation

PATIENCE_S = 60.0
"""A stage without any replica for so long is loaded from the trainer's checkpoint."""


class Joins:
    """All joiners of the run."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._joiners: dict[Server, Joiner] = {}
        self._empty_since: dict[int, float] = {}

    def order(self, server: Server) -> None:
        """The trainer tells ``server`` from whom the state of its stage can be had."""
        sim, trainer = self._sim, self._sim.trainer
        donors = self._donors(server)
        if not donors:
            return
        trainer.members.roster.joining(server.me, "copies the state of its stage")
        delay = sim.delays.between(trainer.host, server.host)
        sim.clock.at(sim.clock.now + delay, self._begin, server, donors)

    def emptied(self, stage: int) -> None:
        """The last replica of ``stage`` is gone."""
        self._empty_since.setdefault(stage, self._sim.clock.now)

    def _donors(self, server: Server) -> list[Host]:
        sim, stage = self._sim, server.stage
        mates = [mate for mate in sim.trainer.members.ready(stage) if mate != server.me]
        if mates:
            self._empty_since.pop(stage, None)
            return [sim.servers[mate].host for mate in mates]
        since = self._empty_since.setdefault(stage, sim.clock.now)
        return [sim.trainer.host] if sim.clock.now >= since + PATIENCE_S else []

    def _begin(self, server: Server, donors: list[Host]) -> None:
        sim = self._sim
        if server.gone or server.host.dead_at <= sim.clock.now:
            return
        joiner = self._joiners.get(server)
        if joiner is None:
            joiner = self._joiners[server] = Joiner(sim, server)
        joiner.offered(donors)

    def decided(self, decision: Decision) -> None:
        """The run has made a step: joiners take it too."""
        for joiner in self._joiners.values():
            joiner.decided(decision)

    def ended(self, server: Server) -> None:
        """It is admitted, or gone."""
        joiner = self._joiners.pop(server, None)
        if joiner is not None:
            joiner.stop()
