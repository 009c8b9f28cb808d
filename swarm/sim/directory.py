"""What the directory shows of the swarm: records that are a little old."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.core.rebalancing import Serving, Settings, View
from swarm.types import PeerId

if TYPE_CHECKING:
    from swarm.sim.server import Server
    from swarm.sim.simulation import Simulation


class Directory:
    """Records by peer. A change of state is announced at once; what is measured, and who is gone,
    shows once every ``announce_s``, when all records are ``refresh``ed."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.settings = Settings(sim.world.gain)
        self._records: dict[PeerId, Serving] = {}
        self._waited: dict[PeerId, float] = {}
        self._queued: dict[PeerId, float] = {}
        self._refreshed = 0.0

    def announced(self, server: Server) -> None:
        """It says where it is, or where it is going."""
        self._records[server.host.peer] = self.record(server)

    def forget(self, server: Server) -> None:
        self._records.pop(server.host.peer, None)

    def refresh(self) -> View:
        """All that live announce themselves anew; the dead are forgotten."""
        self._measure()
        self._records = {server.host.peer: self.record(server) for server in self._counted()}
        return self.view()

    def _counted(self) -> list[Server]:
        """Who is there. Those that are about to leave are as good as gone."""
        return [s for s in self._sim.serving.values() if s not in self._sim.leaving]

    def _measure(self) -> None:
        """Little's law: the time that all have waited, over the time that has passed."""
        now = self._sim.clock.now
        before, passed_s = self._waited, max(1e-9, now - self._refreshed)
        self._waited = {peer: s.queue_s for peer, s in self._sim.serving.items()}
        self._queued = {
            peer: max(0.0, waited - before.get(peer, 0.0)) / passed_s
            for peer, waited in self._waited.items()
        }
        self._refreshed = now

    def view(self) -> View:
        return View(self._sim.costs.needs, self._records.values())

    def record(self, server: Server) -> Serving:
        """What ``server`` says of itself."""
        sim, peer = self._sim, server.host.peer
        machine = sim.machines[peer]
        measured = server.counted > 0
        rate = sim.world.microbatch * sim.costs.rate(machine, server.stage)
        return Serving(
            peer,
            server.stage,
            rate if measured else 0.0,
            self._queued.get(peer, 0.0),
            machine.memory_bytes,
            settled=server.mark is not None,
        )

    def truth(self) -> View:
        """What the trainer knows itself: who serves now, and how fast."""
        return View(self._sim.costs.needs, [self.record(server) for server in self._counted()])
