"""How a node asks its trainer to be let go, and leaves no work undone."""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from peers import messages as msg
from peers.replica import ReplicaServer
from swarm.core.backoff import Backoff
from swarm.errors import SwarmError
from swarm.types import PeerId

log = logging.getLogger("swarm.node")

TRIES = 3
"""How often the trainer is asked if it does not answer."""

AGAIN = Backoff(first_s=0.1, cap_s=1.0)
"""Before it is asked once more whether we may go: often our mates are just applying the step."""


class Drain:
    """One wish to go: to another stage, or for good (``to_stage`` None)."""

    def __init__(
        self, server: ReplicaServer, to_stage: int | None, *, say: Callable[[str], None]
    ) -> None:
        self._server, self._to_stage, self._tell = server, to_stage, say
        self._said = ""

    async def let_go(self) -> bool:
        """Until the trainer lets us go, or cannot be heard. True: it said that we may go.

        Who only wants to move takes the first *not now* that comes before it was let go.
        """
        server, waited, in_vain, not_yet = self._server, False, 0, 0
        while in_vain < TRIES:
            trainer, mark = server.host.trainer, server.mark
            if trainer is None or not server.heard_lately():
                return False  # nobody is there to tell
            done = waited and not server.holds_work
            match await self._ask(trainer, done=done):
                case msg.Granted(wait=True) if mark is not None:
                    # Whoever applies this step as well is alive, and can go on without us.
                    await server.donor.moved_from(mark)
                    waited = True
                    continue
                case msg.Granted():
                    return True
                case msg.Refused(reason=reason):
                    self._stays(reason)
                    return False
                case msg.Busy(reason=reason) if self._to_stage is not None and not done:
                    self._stays(reason)
                    return False
                case msg.Busy(reason=reason):
                    self._say(f"not yet: {reason}")
                case _:
                    self._say("not yet: the trainer cannot be asked")
                    in_vain += 1
            not_yet += 1
            await anyio.sleep(AGAIN.pause(not_yet, server.host.rng))
        return False

    async def _ask(self, trainer: PeerId, *, done: bool) -> msg.Message | None:
        host = self._server.host
        question = msg.Leave(
            run=host.manifest.run_id, boot=host.me.boot, done=done, to_stage=self._to_stage
        )
        try:
            return (await host.caller.call(trainer, question)).message
        except SwarmError as error:
            log.debug("the trainer cannot be asked: %s", error)
            return None

    def _stays(self, reason: str) -> None:
        if self._to_stage is not None:
            self._say(f"stays after all: {reason}")

    def _say(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self._tell(line)
