"""A question of the trainer and its answer, with what becomes of it when the other side dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm.sim.server import Server
    from swarm.sim.simulation import Simulation

PAUSE_S = 0.3
"""Before another try where no connection could be opened."""


class Call:
    """One call of the trainer to ``server``; ``send`` sets it going.

    Args:
        handle: called at the server as ``handle(reply, *args)``.
        answered: called at the trainer with what ``reply`` was given; None: a refusal.
        failed: called at the trainer when it is clear that no answer will come.
        tries: how often it is sent before that.
    """

    __slots__ = ("_answered", "_args", "_failed", "_handle", "_server", "_sim", "_tries")

    def __init__(
        self,
        sim: Simulation,
        server: Server,
        handle: Callable[..., None],
        args: tuple[Any, ...],
        *,
        answered: Callable[..., None],
        failed: Callable[[], None],
        tries: int = 2,
    ) -> None:
        self._sim, self._server, self._handle, self._args = sim, server, handle, args
        self._answered, self._failed, self._tries = answered, failed, tries

    def send(self) -> None:
        self._sim.clock.at(self._sim.clock.now + self._delay(), self._arrive)

    def _delay(self) -> float:
        return self._sim.delays.between(self._sim.trainer.host, self._server.host)

    def _arrive(self) -> None:
        server, sim = self._server, self._sim
        if server.host.dead_at <= sim.clock.now:
            self.broken(PAUSE_S)
        elif server.gone:
            sim.clock.at(sim.clock.now + self._delay(), self._answered, None)
        else:
            server.calls[self] = None
            self._handle(self._reply, *self._args)

    def _reply(self, answer: object) -> None:
        clock = self._sim.clock
        self._server.calls.pop(self, None)
        if self._server.host.dead_at > clock.now:
            clock.at(clock.now + self._delay(), self._answered, answer)

    def broken(self, pause_s: float = 0.0) -> None:
        """The server is dead: the trainer finds that out after a while, and tries again."""
        sim = self._sim
        self._tries -= 1
        at = sim.noticed_at(self._server.host, self._delay())
        if self._tries:
            sim.clock.at(at + pause_s, self.send)
        else:
            sim.clock.at(at, self._failed)
