"""A replica that goes, but leaves no work undone: as ``peers.node`` does on SIGTERM or to move."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm.sim.server import Server
    from swarm.sim.simulation import Simulation

DRAIN_S = 60.0
"""After so long it goes, come what may."""

AGAIN_S = 1.0


class Leaving:
    """Those that are about to go, and what each does then."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._leaving: dict[Server, Callable[[], None]] = {}

    def begin(self, server: Server, then: Callable[[], None]) -> None:
        """``then()`` once the step under way is applied, or the drain limit is over."""
        if server not in self._leaving:
            self._leaving[server] = then
            self._sim.clock.after(DRAIN_S, self._go, server)
            self._ask(server, done=False)

    def __contains__(self, server: Server) -> bool:
        return server in self._leaving

    def _ask(self, server: Server, *, done: bool) -> None:
        """The trainer lets one replica of a stage go at a time, and never the last."""
        sim, trainer = self._sim, self._sim.trainer
        if server not in self._leaving or server.host.dead_at <= sim.clock.now:
            return
        roster = trainer.members.roster
        reason = roster.leave(server.me, *trainer.marks, done=done)
        trainer.members.changed()
        member = roster.get(server.me)
        has_part = member is not None and member.leaving and trainer.work is not None and not done
        if reason:
            sim.clock.after(AGAIN_S, lambda: self._ask(server, done=done))
        elif has_part:
            self._wait(server, server.mark)
        else:
            self._go(server)

    def _wait(self, server: Server, mark: object) -> None:
        """Until it has applied the step."""
        if server not in self._leaving:
            return
        if server.mark != mark:
            self._ask(server, done=True)
        else:
            self._sim.clock.after(AGAIN_S / 4, self._wait, server, mark)

    def _go(self, server: Server) -> None:
        """It says goodbye, so nobody has to find out."""
        then = self._leaving.pop(server, None)
        if then is None or server.host.dead_at <= self._sim.clock.now:
            return
        server.gone = True
        self._sim.joins.ended(server)
        self._sim.trainer.members.gone(server.me, "left")
        self._sim.directory.forget(server)
        then()
