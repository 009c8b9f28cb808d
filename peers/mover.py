"""A node's wish to serve another stage: decided from the directory, granted by the trainer."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from math import inf

import anyio

from dht.directory import Directory
from peers import messages as msg
from peers.balance import look, settings_of, view_of
from peers.replica import ReplicaServer
from swarm.core.rebalancing import Move, Need, View, decide, rested
from swarm.errors import SwarmError
from swarm.manifest import Manifest
from swarm.types import PeerId

log = logging.getLogger("swarm.node")

JITTER = 0.1
"""Share of the period by which looks differ, so that not all nodes look at the same moment."""


class Mover:
    """Looks once a period whether this node should move, and asks the trainer if so.

    Args:
        needs: what each stage takes. me: this node.
        say: called with a line for people.
    """

    def __init__(
        self,
        manifest: Manifest,
        needs: Sequence[Need],
        directory: Directory,
        *,
        me: PeerId,
        rng: random.Random,
        say: Callable[[str], None],
    ) -> None:
        self._manifest, self._needs, self._directory = manifest, needs, directory
        self._me, self._rng, self._say = me, rng, say
        self._settings = settings_of(manifest)
        self._said = ""

    async def granted(self, server: ReplicaServer) -> Move:
        """Once the trainer has let this node move. ``server`` serves until then."""
        serving_since: float | None = None
        while True:
            await anyio.sleep(self._period_s(server))
            if server.draining or server.orders.joiner is not None:
                serving_since = None
                continue
            if server.mark is None:
                serving_since = None  # it waits for a trainer, and rests from nothing
            elif serving_since is None:
                serving_since = anyio.current_time()
            move = await self._find()
            served_s = inf  # before the first step there is nothing to rest from
            if serving_since is not None and self._began(server):
                served_s = anyio.current_time() - serving_since
            if move is None or not rested(move, served_s, self._manifest.rebalancing.period_s):
                continue
            if await self._ask(server, move):
                return move

    def _began(self, server: ReplicaServer) -> bool:
        """The run has made a step: before that there is nothing to rest from."""
        return server.mark is not None and server.mark.t > 0

    def _period_s(self, server: ReplicaServer) -> float:
        """Shorter until the run has begun: then a stage that has nobody holds up all."""
        periods = self._manifest.periods
        period_s = self._manifest.rebalancing.period_s
        if not self._began(server):
            period_s = min(period_s, periods.announce_s)
        return period_s * self._rng.uniform(1 - JITTER, 1 + JITTER)

    async def _find(self) -> Move | None:
        try:
            view = await self.view()
        except SwarmError as error:
            log.debug("the directory cannot be read: %s", error)
            return None
        found = decide(view, self._me, self._settings)
        if isinstance(found, Move):
            return found
        log.debug("stays: %s", found.reason)
        return None

    async def view(self) -> View:
        return view_of(self._needs, await look(self._directory, self._manifest))

    async def _ask(self, server: ReplicaServer, move: Move) -> bool:
        trainer = server.host.trainer
        if trainer is None or not server.heard_lately():
            return False
        wish = msg.Leave(run=self._manifest.run_id, boot=server.host.me.boot, to_stage=move.stage)
        try:
            # Insisting: whoever was let go, and has not heard it, gets no more work.
            answer = await server.host.caller.insist(trainer, wish)
        except SwarmError as error:
            log.debug("the trainer cannot be asked: %s", error)
            return False
        if isinstance(answer, msg.Granted):
            return True
        why = getattr(answer, "reason", answer.kind)
        if why != self._said:
            self._said = why
            self._say(f"would move to stage {move.stage} ({move.reason}); not now: {why}")
        return False
