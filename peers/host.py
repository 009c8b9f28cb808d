"""What the parts of a node share."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

from anyio.abc import TaskGroup

from peers.executor import Executor
from peers.messages import Message
from peers.rpc import Caller
from peers.stage import StageOwner
from swarm.errors import BadInput, TransportError
from swarm.manifest import Manifest
from swarm.types import PeerId, Replica

log = logging.getLogger("swarm.node")


@dataclass(slots=True)
class Host:
    """One replica's means: its stage, its name, how it calls, where it computes.

    ``trainer`` is who receipts and votes go to: the last trainer that was obeyed, if any.
    """

    manifest: Manifest
    stage: StageOwner
    me: Replica
    caller: Caller
    executor: Executor
    tasks: TaskGroup
    rng: random.Random
    trainer: PeerId | None = None

    async def tell_trainer(self, message: Message, *, tries: int = 3) -> None:
        """Insist a little; a message that is lost costs a question, not truth."""
        if self.trainer is None:
            return
        try:
            await self.caller.insist(self.trainer, message, tries=tries)
        except (TransportError, BadInput) as error:
            log.debug("the trainer did not hear %s: %s", message, error)
