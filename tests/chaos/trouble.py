"""Trains while something goes wrong, and compares what comes of it with the reference."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from swarm.manifest import Manifest
from swarm.reference import ReferenceRun
from tests.chaos.audit import Audit
from tests.chaos.harness import World, run_world
from tests.chaos.realm import MemoryCheckpoints, Realm, run_realm

LIMIT_S = 3600.0
"""So long may a run take, on the virtual clock."""


def run_world_in(
    trouble: Callable[[World], Awaitable[None]],
    expected: ReferenceRun,
    manifest: Manifest,
    *,
    steps: int,
    replicas: int,
) -> World:
    """``steps`` steps under one trainer, with ``trouble`` beside them, end in the bits expected."""
    audits: list[Audit] = []

    async def scenario(world: World) -> None:
        audits.append(Audit(world, counting=False))
        await world.start_all(replicas)
        world.tasks.start_soon(trouble, world)
        with anyio.fail_after(LIMIT_S):
            await world.train(steps)

    world = run_world(manifest, scenario)
    assert not audits[0].problems
    assert world.sha256() == expected.sha256
    return world


def run_realm_in(
    trouble: Callable[[Realm], Awaitable[None]],
    expected: ReferenceRun,
    manifest: Manifest,
    *,
    disk: MemoryCheckpoints | None = None,
    shelves: Path | None = None,
) -> Realm:
    """A run of two stages with two replicas each, led by whoever can, ends as expected."""
    audits: list[Audit] = []

    async def scenario(realm: Realm) -> None:
        audits.append(Audit(realm, counting=False))
        realm.seat(disk=disk)
        for _ in range(2):
            for stage in range(2):
                await realm.start(stage, shelves=shelves)
        realm.tasks.start_soon(trouble, realm)
        with anyio.fail_after(LIMIT_S):
            await realm.finished.wait()

    realm = run_realm(manifest, scenario)
    assert not audits[0].problems
    assert realm.weights == expected.sha256
    losses = [result.loss for result in expected.results]
    told = [realm.losses[step] for step in range(manifest.run.steps)]
    assert told == pytest.approx(losses, rel=1e-5)
    return realm
