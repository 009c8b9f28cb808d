"""How a replica gets to the mark of a run that goes on, as ``peers.joiner``: pieces and sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from swarm.core.step import Decision
from swarm.types import Mark

if TYPE_CHECKING:
    from swarm.sim.network import Host
    from swarm.sim.server import Server
    from swarm.sim.simulation import Simulation

PIECES = 32
"""The state comes in so many pieces, so that the donor's link serves others in between."""

AT_ONCE = 4


class Joiner:
    """Copies the state; for each decision meanwhile, the sum of the pieces that are there."""

    def __init__(self, sim: Simulation, server: Server) -> None:
        self._sim, self._server = sim, server
        self._donors: list[Host] = []
        self._head: Mark = sim.trainer.mark
        last = sim.trainer.last_decision
        one_behind = last is not None and server.mark == last.mark
        self._left = 0 if one_behind or server.mark == self._head else PIECES
        self._copied = PIECES - self._left
        self._under_way = 0
        self._sums: list[float] = []
        self._over = False
        if one_behind:
            self._sums.append(self._sum_bytes)

    @property
    def _sum_bytes(self) -> float:
        return self._sim.world.stages[self._server.stage].vector_bytes

    def offered(self, donors: list[Host]) -> None:
        """From whom there is something to be had."""
        self._donors = donors
        self._go_on()

    def stop(self) -> None:
        self._over = True

    def decided(self, decision: Decision) -> None:
        """What is here has to make that step; what comes from now on has made it."""
        self._head = decision.to
        share = self._copied / PIECES
        if share and not decision.update.skip:
            self._sums.append(share * self._sum_bytes)
        self._go_on()

    def _go_on(self) -> None:
        while self._donors and self._under_way < AT_ONCE and (self._sums or self._left):
            if self._sums:
                self._fetch(self._sums.pop(0), 0)
            else:
                self._left -= 1
                state = self._sim.world.stages[self._server.stage].state_bytes
                self._fetch(state / PIECES, 1)
        if self._copied == PIECES and not self._under_way and not self._sums:
            self._arrive()

    def _arrive(self) -> None:
        sim, server = self._sim, self._server
        if server.mark != self._head:
            server.arrive(self._head)
        delay = sim.delays.between(server.host, sim.trainer.host)
        sim.clock.at(sim.clock.now + delay, self._ready, self._head)

    def _ready(self, mark: Mark) -> None:
        if not self._over:
            self._sim.trainer.members.says_ready(self._server, mark)

    # -- one transfer -------------------------------------------------------------------------

    def _fetch(self, nbytes: float, pieces: int) -> None:
        self._under_way += 1
        donor = self._donors[self._sim.rng.randrange(len(self._donors))]
        delay = self._sim.delays.between(self._server.host, donor)
        self._at(self._sim.clock.now + delay, self._give, donor, nbytes, pieces)

    def _give(self, donor: Host, nbytes: float, pieces: int) -> None:
        now = self._sim.clock.now
        delay = self._sim.delays.between(self._server.host, donor)
        if donor.dead_at <= now:
            self._at(self._sim.noticed_at(donor, delay), self._failed, donor, nbytes, pieces)
            return
        left = donor.send(now, nbytes)
        self._at(left + delay, self._come, donor, left, nbytes, pieces)

    def _come(self, donor: Host, left: float, nbytes: float, pieces: int) -> None:
        now = self._sim.clock.now
        if donor.dead_at < left:
            self._at(self._sim.noticed_at(donor, 0.0), self._failed, donor, nbytes, pieces)
            return
        here = self._server.host.receive(now, donor.upload_s(nbytes), nbytes)
        self._at(here, self._done, pieces)

    def _done(self, pieces: int) -> None:
        self._under_way -= 1
        self._copied += pieces
        self._go_on()

    def _failed(self, donor: Host, nbytes: float, pieces: int) -> None:
        """From somebody else then; where nobody is left, the trainer will name others."""
        self._under_way -= 1
        self._donors = [other for other in self._donors if other is not donor]
        if pieces:
            self._left += pieces
        else:
            self._sums.append(nbytes)
        self._go_on()

    def _at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        self._sim.clock.at(time, self._unless_over, call, args)

    def _unless_over(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self._over and self._server.host.dead_at > self._sim.clock.now:
            call(*args)
