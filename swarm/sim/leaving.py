"""A replica that goes, but leaves no work undone: as ``peers.node`` does on SIGTERM or to move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm.sim.server import Server
    from swarm.sim.simulation import Simulation

DRAIN_S = 60.0
"""After so long one that has to go does so, come what may."""

AGAIN_S = 0.25
"""Before the trainer is asked once more."""


class Leaving:
    """Those that are about to go, and what each does then."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._leaving: dict[Server, Callable[[], None]] = {}
        self._waiting: set[Server] = set()

    def begin(
        self, server: Server, then: Callable[[], None], *, wait: bool = True, insist: bool = True
    ) -> bool:
        """``then()`` once the step under way is applied.

        ``wait``: that step is finished first. Who ``insist``s goes after the drain limit all the
        same; anybody else stays where the trainer says *not now* (False).
        """
        if server in self._leaving:
            return True
        self._leaving[server] = then
        if not self._ask(server, done=False, wait=wait, insist=insist):
            return False
        if insist:
            self._sim.clock.after(DRAIN_S, self._go, server)
        return True

    def __contains__(self, server: Server) -> bool:
        return server in self._leaving

    def _ask(self, server: Server, *, done: bool, wait: bool, insist: bool) -> bool:
        """The trainer lets one replica of a stage go at a time, and never the last."""
        sim, trainer = self._sim, self._sim.trainer
        if server not in self._leaving or server.host.dead_at <= sim.clock.now:
            return False
        roster = trainer.members.roster
        reason = roster.leave(server.me, *trainer.marks, done=done)
        trainer.members.changed()
        member = roster.get(server.me)
        has_part = member is not None and member.leaving and trainer.work is not None and not done
        if reason and not insist:
            del self._leaving[server]
            return False
        if reason:
            again = partial(self._ask, server, done=done, wait=wait, insist=insist)
            sim.clock.after(AGAIN_S, again)
        elif has_part and wait:
            self._waiting.add(server)
        else:
            self._go(server)
        return True

    def applied(self, server: Server) -> None:
        """It has applied a step: was that the one it waited for?"""
        if server in self._waiting:
            self._waiting.discard(server)
            self._sim.clock.at(self._sim.clock.now, self._ask_again, server)

    def _ask_again(self, server: Server) -> None:
        self._ask(server, done=True, wait=False, insist=True)

    def ended(self, server: Server) -> None:
        """It has died before it could go."""
        self._leaving.pop(server, None)
        self._waiting.discard(server)

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
