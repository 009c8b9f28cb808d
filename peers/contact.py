"""A trainer's words to all replicas at once: that it lives, and that the run is over."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from peers import messages as msg
from swarm.core.roster import State
from swarm.errors import BadInput, NotConnected, SwarmError, TransportError
from swarm.types import Replica

if TYPE_CHECKING:
    from peers.trainer import Trainer

log = logging.getLogger("swarm.trainer")

FAREWELL_S = 2.0


class Contact:
    """Speaks to every replica of the roster."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    async def renew_for_ever(self) -> None:
        """Say now and then that the trainer lives. Who cannot be reached is probed, and removed."""
        trainer = self._trainer
        while True:
            await anyio.sleep(trainer.manifest.periods.renew_s)
            for replica in self._to_renew():
                trainer.tasks.start_soon(self._renew, replica)

    def _to_renew(self) -> list[Replica]:
        """Members and joiners; while the trainer finds out where the run is, whom it has polled."""
        trainer = self._trainer
        if not trainer.settled:
            return sorted(trainer.polled)
        serving = (State.READY, State.JOINING)
        return [m.replica for m in trainer.roster.all() if m.state in serving]

    async def _renew(self, replica: Replica) -> None:
        trainer = self._trainer
        message = msg.Renew(
            run=trainer.manifest.run_id, to=replica.boot, stamp=trainer.stamps.take()
        )
        try:
            answer = (await trainer.caller.call(replica.peer, message)).message
        except NotConnected:
            # Where all that is in flight waits for a dead one, nobody else speaks to it, and the
            # attempts' time limit is long, above all before any was measured.
            await trainer.instructions.probe(replica)
            return
        except (TransportError, BadInput) as error:
            log.debug("%s did not hear that we live: %s", replica.peer, error)
            return
        trainer.reign.refused(replica, answer)

    async def finish(self, reason: str) -> None:
        """Tell every replica that the run is over."""
        async with anyio.create_task_group() as tasks:
            for member in self._trainer.roster.all():
                tasks.start_soon(self._finish, member.replica, reason)

    async def _finish(self, replica: Replica, reason: str) -> None:
        trainer = self._trainer
        message = msg.Finish(
            run=trainer.manifest.run_id,
            to=replica.boot,
            stamp=trainer.stamps.take(),
            reason=reason,
        )
        try:
            await trainer.caller.call(replica.peer, message, timeout_s=FAREWELL_S)
        except SwarmError as error:
            log.debug("%s did not hear the end: %s", replica.peer, error)
