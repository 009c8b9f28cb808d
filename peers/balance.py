"""Which stage lacks a peer: what the directory's records say, and what a node says of itself."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import psutil

from dht.directory import Directory
from dht.records import PeerRecord, PeerState, decode_all, newest, stage_key
from peers.passes import Counters
from swarm.core.estimates import Estimate
from swarm.core.rebalancing import Need, Serving, Settings, View, choose
from swarm.manifest import Manifest
from swarm.types import PeerId

GIB = 1 << 30

FULL = -1
"""Less than any stage takes."""

SETTLED = (PeerState.WAITING, PeerState.READY)


def settings_of(manifest: Manifest) -> Settings:
    return Settings(gain=manifest.rebalancing.gain, least=manifest.start.replicas)


def view_of(needs: Sequence[Need], records: Iterable[PeerRecord]) -> View:
    """What ``records`` make of the swarm. Who drains is as good as gone."""
    return View(
        needs,
        [
            Serving(
                peer=record.peer,
                stage=record.stage,
                samples_per_s=record.samples_per_s,
                queued=record.queued,
                memory_bytes=room_of(record),
                settled=record.state in SETTLED,
            )
            for record in newest(records).values()
            if record.state is not PeerState.DRAINING
        ],
    )


def room_of(record: PeerRecord) -> int | None:
    """Bytes that it has for a stage; None: it does not say. Nothing fits one that stays."""
    return FULL if record.stays else record.memory_bytes or None


async def look(directory: Directory, manifest: Manifest) -> list[PeerRecord]:
    """All records of peers that the directory has for this run."""
    records: list[PeerRecord] = []
    for stage in range(manifest.stages.count):
        key = stage_key(manifest.run_id, stage)
        found, _ = decode_all(await directory.lookup(key), key=key)
        records += [record for record in found if isinstance(record, PeerRecord)]
    return records


async def choose_stage(
    directory: Directory,
    manifest: Manifest,
    needs: Sequence[Need],
    me: PeerId,
    memory_bytes: int,
    rng: random.Random,
) -> tuple[int, list[int]]:
    """The stage that lacks a peer most, and how many each has.

    Raises:
        ValueError: none fits into ``memory_bytes``.
    """
    view = view_of(needs, await look(directory, manifest)).without(me)
    stage = choose(view, memory_bytes, settings_of(manifest), rng)
    return stage, [len(members) for members in view.members]


def free_memory() -> int:
    """Bytes that this machine can give to a stage."""
    return int(psutil.virtual_memory().available)


class Meter:
    """What a replica can do when it never waits, and how much waits for it, from its counters."""

    def __init__(self, counters: Counters, microbatch: int) -> None:
        self._counters, self._microbatch = counters, microbatch
        self._service = Estimate()
        self._counted, self._busy_s, self._queue_s = 0, 0.0, 0.0
        self._since: float | None = None
        self.queued = 0.0

    def read(self, now: float) -> None:
        """Take in what was done since the last reading."""
        counters = self._counters
        counted = counters.counted - self._counted
        if counted > 0:
            self._service.update((counters.busy_s - self._busy_s) / counted)
            self._counted, self._busy_s = counters.counted, counters.busy_s
        if self._since is not None and now > self._since:
            # Little's law: the time that all of them waited, over the time that has passed.
            self.queued = (counters.queue_s - self._queue_s) / (now - self._since)
        self._queue_s, self._since = counters.queue_s, now

    @property
    def samples_per_s(self) -> float:
        """0 until something has been counted."""
        service_s = self._service.value
        return self._microbatch / service_s if service_s else 0.0
