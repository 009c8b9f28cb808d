"""The way of an output in the published prototype: through the trainer, there and back.

A replica keeps nothing between the passes. The backward pass brings the stage's input again, with
the gradient, and computes the forward pass once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.core.intake import Kind
from swarm.sim.direct import Direct
from swarm.sim.push import Push, receipt_of
from swarm.types import Attempt

if TYPE_CHECKING:
    from swarm.core.journey import Route
    from swarm.sim.server import Load, Pass, Server
    from swarm.sim.simulation import Simulation


class Relay(Direct):
    """Every output goes to the trainer, over its link, and from there to whoever is next.

    The trainer keeps the inputs, and so knows the way back: the backward pass goes to the replica
    that did the forward pass, since a ledger is a replica's own.
    """

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def send_on(self, done: Pass, load: Load, origin: Load | None) -> None:
        """The output goes to the trainer; the receipt is the answer that it comes with."""
        sim, server, host = self._sim, done.server, done.server.host
        work = sim.world.stages[server.stage]
        if done.job.kind is Kind.BACKWARD:
            nbytes = work.gradient_bytes if server.stage else 0
        else:
            nbytes = work.output_bytes if server.stage < server.last else 0
        left = host.send(sim.clock.now, nbytes)
        there = left + sim.delays.between(host, sim.trainer.host)
        sim.clock.at(there, self._arrive, done, load, origin, nbytes, left)

    def _arrive(
        self, done: Pass, load: Load, origin: Load | None, nbytes: float, left: float
    ) -> None:
        sim, host = self._sim, done.server.host
        if host.dead_at < left:
            return
        now = sim.clock.now
        here = sim.trainer.host.receive(now, host.upload_s(nbytes), nbytes)
        sim.clock.at(here, self._relay, done, load, origin, now)

    def _relay(self, done: Pass, load: Load, origin: Load | None, sent_at: float) -> None:
        """All of it is at the trainer: what is next?"""
        sim, server, job = self._sim, done.server, done.job
        sim.trainer.hears(receipt_of(done, 0.0), server.host, sent_at)
        attempt = job.attempt
        if job.kind is Kind.FORWARD and server.stage < server.last:
            nbytes = sim.world.stages[server.stage].output_bytes
            self._push(Kind.FORWARD, attempt, load.rest, nbytes, job.expires_at, server)
        elif job.kind is Kind.FORWARD:
            if not attempt.evaluation:
                self._back_to(server, attempt, 0, job.expires_at)
        elif server.stage > attempt.lowest and origin is not None and origin.origin is not None:
            gradient = sim.world.stages[server.stage].gradient_bytes
            self._back_to(origin.origin, attempt, gradient, job.expires_at)

    def _back_to(
        self, server: Server, attempt: Attempt, gradient: float, expires_at: float
    ) -> None:
        """The backward pass of ``server``: its input again, and the gradient."""
        inputs = self._sim.world.stages[server.stage - 1].output_bytes if server.stage else 0
        self._push(Kind.BACKWARD, attempt, ((server.me,),), inputs + gradient, expires_at, None)

    def _push(
        self,
        kind: Kind,
        attempt: Attempt,
        route: Route,
        nbytes: float,
        expires_at: float,
        origin: Server | None,
    ) -> None:
        Push(
            self._sim,
            kind,
            attempt,
            route,
            nbytes=nbytes,
            expires_at=expires_at,
            origin=origin,
            done=None,
        ).start()
