"""Looks around in a run without taking part: who is announced, and what each says of itself."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import anyio

from dht.directory import Directory
from dht.records import (
    PeerRecord,
    TrainerRecord,
    decode_all,
    newest,
    stage_key,
    trainers_key,
)
from peers import messages as msg
from peers.rpc import Caller
from swarm.errors import BadInput, TransportError
from swarm.manifest import Manifest
from swarm.types import Boot, PeerId, Replica

log = logging.getLogger("swarm")

FORGET = 6
"""Who has been looked for in vain so often, and is announced no more, is forgotten."""


@dataclass(slots=True)
class Sight:
    """What one look has shown. ``silent``: why no answer came from a replica.

    ``announced`` is what the directory shows now; ``stages`` has those too that it showed before.
    """

    announced: dict[Replica, PeerRecord] = field(default_factory=dict)
    stages: dict[Replica, int] = field(default_factory=dict)
    statuses: dict[Replica, msg.Status] = field(default_factory=dict)
    silent: dict[Replica, str] = field(default_factory=dict)
    trainers: list[TrainerRecord] = field(default_factory=list)
    trainer_statuses: dict[PeerId, msg.Status] = field(default_factory=dict)


class Lookout:
    """Remembers whom it has seen: a directory may lose sight of peers that live."""

    def __init__(self, manifest: Manifest, caller: Caller, directory: Directory) -> None:
        self._manifest, self._caller, self._directory = manifest, caller, directory
        self._known: dict[Replica, int] = {}
        self._vain: dict[Replica, int] = {}

    async def look(self, *, detail: bool = False) -> Sight:
        """Read the directory and ask everybody where they are. Raises nothing."""
        sight = Sight()
        async with anyio.create_task_group() as tasks:
            for stage in range(self._manifest.stages.count):
                tasks.start_soon(self._read_stage, sight, stage)
            tasks.start_soon(self._read_trainers, sight)
        self._merge(sight)
        async with anyio.create_task_group() as tasks:
            for replica in sight.stages:
                tasks.start_soon(self._ask, sight, replica, detail)
            if detail:
                for record in sight.trainers:
                    tasks.start_soon(self._ask_trainer, sight, record.peer)
        return sight

    async def _read_stage(self, sight: Sight, stage: int) -> None:
        key = stage_key(self._manifest.run_id, stage)
        records, _ = decode_all(await self._directory.lookup(key), key=key)
        for record in records:
            if isinstance(record, PeerRecord):
                sight.announced[Replica(record.peer, record.boot)] = record

    async def _read_trainers(self, sight: Sight) -> None:
        key = trainers_key(self._manifest.run_id)
        records, _ = decode_all(await self._directory.lookup(key), key=key)
        allowed = self._manifest.trainers
        sight.trainers += [r for r in records if isinstance(r, TrainerRecord) and r.peer in allowed]

    def _merge(self, sight: Sight) -> None:
        """Those announced now, and those of before that have not restarted or moved since."""
        last = newest(sight.announced.values())
        sight.announced = {Replica(r.peer, r.boot): r for r in last.values()}
        peers = {replica.peer for replica in sight.announced}
        kept = {
            replica: stage
            for replica, stage in self._known.items()
            if self._vain.get(replica, 0) < FORGET and replica.peer not in peers
        }
        self._known = kept | {replica: rec.stage for replica, rec in sight.announced.items()}
        self._vain = {r: times for r, times in self._vain.items() if r in self._known}
        sight.stages = dict(self._known)

    async def _ask(self, sight: Sight, replica: Replica, detail: bool) -> None:
        try:
            sight.statuses[replica] = await self._status(replica.peer, replica.boot, detail)
            self._vain.pop(replica, None)
        except (TransportError, BadInput) as error:
            self._vain[replica] = self._vain.get(replica, 0) + 1
            sight.silent[replica] = str(error)

    async def _ask_trainer(self, sight: Sight, peer: PeerId) -> None:
        try:
            sight.trainer_statuses[peer] = await self._status(peer, "", detail=True)
        except (TransportError, BadInput) as error:
            log.debug("trainer %s does not answer: %s", peer, error)

    async def _status(self, peer: PeerId, boot: Boot, detail: bool) -> msg.Status:
        """Raises TransportError, or BadInput for any other answer."""
        question = msg.Question(run=self._manifest.run_id, to=boot, detail=detail)
        answer = (await self._caller.call(peer, question)).message
        if not isinstance(answer, msg.Status):
            raise BadInput(getattr(answer, "reason", answer.kind))
        return answer
