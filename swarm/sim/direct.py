"""The way of an output: straight from replica to replica, as in ``peers.passes``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.core.flight import Launch
from swarm.core.intake import Kind
from swarm.sim.push import Push

if TYPE_CHECKING:
    from swarm.sim.server import Load, Pass
    from swarm.sim.simulation import Simulation


class Direct:
    """Activations go on to a replica of the next stage, gradients back the same way."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def launch(self, do: Launch) -> None:
        """The trainer's push to the first stage: token numbers, of no weight."""
        sim = self._sim
        Push(
            sim,
            Kind.FORWARD,
            do.attempt,
            do.route,
            nbytes=0,
            expires_at=sim.clock.now + do.limit_s * len(sim.world.stages),
            origin=None,
            done=None,
        ).try_until(sim.clock.now + do.limit_s).start()

    def send_on(self, done: Pass, load: Load, origin: Load | None) -> None:
        """The output of a pass that still matters, if anybody needs it; and the receipt."""
        server, job = done.server, done.job
        attempt, work = job.attempt, self._sim.world.stages[server.stage]
        forward = job.kind is Kind.FORWARD and server.stage < server.last
        sender = None if origin is None else origin.origin  # gone if its time limit has passed
        if forward:
            route = load.rest
        elif attempt.evaluation or server.stage <= attempt.lowest or sender is None:
            done.tell(self._sim.clock.now, 0.0)
            return
        else:
            route = ((sender.me,),)
        Push(
            self._sim,
            Kind.FORWARD if forward else Kind.BACKWARD,
            attempt,
            route,
            nbytes=work.output_bytes if forward else work.gradient_bytes,
            expires_at=job.expires_at,
            origin=server,
            done=done,
        ).start()
