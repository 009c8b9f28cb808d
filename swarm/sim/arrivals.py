"""Machines come and go: arrivals choose a stage; departures are as by SIGKILL, or drain first."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from swarm.core import rebalancing
from swarm.sim.balancer import Balancer
from swarm.sim.members import WATCH_S
from swarm.sim.paper import paper_choice
from swarm.sim.world import Machine, Rebalancing
from swarm.types import FRESH

if TYPE_CHECKING:
    from swarm.sim.server import Server
    from swarm.sim.simulation import Simulation


class Arrivals:
    """Puts every machine of the world on the clock, and starts it when its time has come."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def begin(self) -> None:
        clock, machines = self._sim.clock, self._sim.world.machines
        for machine in machines:
            if machine.arrives_s <= 0:
                self._arrive(machine)
            else:
                clock.at(machine.arrives_s, self._arrive, machine)
            if machine.leaves_s < inf:
                clock.at(max(machine.leaves_s, 0.0), self._leave, machine)
        clock.at(0.0, self._sim.trainer.wake)
        Balancer(self._sim, self).begin()

    def _arrive(self, machine: Machine) -> None:
        sim = self._sim
        stage = machine.stage
        if stage is None:
            stage = self._choose(machine)
        if stage is None:
            return  # no stage fits: it goes away again
        server = sim.serve(sim.host(machine), stage)
        sim.meter.here(machine.peer)
        if sim.clock.now <= 0 and sim.trainer.mark == FRESH:
            sim.trainer.members.begin_with(server)
            sim.directory.announced(server)
        else:
            self.announce(server)

    def _choose(self, machine: Machine) -> int | None:
        """The stage that lacks a peer most, by the records of the directory."""
        sim = self._sim
        view, world = sim.directory.view(), sim.world
        if world.rebalancing is Rebalancing.PAPER:
            fitting = [s for s in range(len(world.stages)) if sim.costs.fits(machine, s)]
            waiting = [sum(p.queued for p in peers) for peers in view.members]
            return paper_choice(waiting, fitting) if fitting else None
        try:
            settings = sim.directory.settings
            return rebalancing.choose(view, machine.memory_bytes, settings, sim.rng)
        except ValueError:
            return None

    def announce(self, server: Server) -> None:
        """The directory shows it at once, and the trainer sees that at its next look."""
        sim = self._sim
        sim.directory.announced(server)
        look_s = min(WATCH_S, sim.world.announce_s)
        sim.clock.after(sim.rng.uniform(0.0, look_s), self._found, server)

    def _found(self, server: Server) -> None:
        if not server.gone:
            self._sim.trainer.members.found(server)

    def _leave(self, machine: Machine) -> None:
        sim = self._sim
        host = sim.hosts.get(machine.peer)
        if host is None:
            return
        server = sim.serving.get(machine.peer)
        if machine.drains and server is not None:
            sim.leaving.begin(server, lambda: sim.kill(host))
        else:
            sim.kill(host)
