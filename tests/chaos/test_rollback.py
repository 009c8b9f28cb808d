"""A stage lost whole: all go back to the newest checkpoint, or to the beginning."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from peers.checkpoints import Checkpoint, CheckpointUnusable
from peers.leading import Start
from tests.chaos.harness import digits_manifest, reference
from tests.chaos.realm import MemoryCheckpoints, Realm, Shelved
from tests.chaos.trouble import run_realm_in

STEPS = 10
MANIFEST = digits_manifest(
    reproducible__enabled=True,
    limits__state_piece=64,
    run__steps=STEPS,
    run__checkpoint_every=3,
    start__replicas=1,
)
Scenario = Callable[[Realm], Awaitable[None]]


@pytest.fixture(scope="module")
def expected():
    return reference(MANIFEST, STEPS)


def run_with(trouble: Scenario, expected, *, shelves: Path | None = None) -> Realm:
    disk = MemoryCheckpoints()
    realm = run_realm_in(trouble, expected, MANIFEST, disk=disk, shelves=shelves)
    counted = [sum(counts.values()) for counts in realm.totals]
    assert counted == [MANIFEST.batch.microbatches * STEPS] * 2
    return realm


async def lose(realm: Realm, stage: int) -> None:
    for peer in realm.of_stage(stage):
        await realm.kill(peer)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("step", [1, 5])
def test_a_stage_is_lost_and_new_nodes_come(stage: int, step: int, expected) -> None:
    """Before the first checkpoint the run begins again from the initial weights."""

    async def trouble(realm: Realm) -> None:
        await realm.reaches(step)
        await lose(realm, stage)
        await anyio.sleep(20.0)
        await realm.start(stage)
        await realm.start(stage)

    realm = run_with(trouble, expected)
    back = 3 if step == 5 else 0
    assert [mark.t for mark in realm.seats[0].reigns] == [back]
    assert [done.step for _, done in realm.steps].count(back) == 2


def test_one_that_was_thought_lost_comes_back_before_the_patience_ends(expected) -> None:
    async def trouble(realm: Realm) -> None:
        await realm.reaches(5)
        frozen = [realm.freeze(peer) for peer in realm.of_stage(1)]
        await anyio.sleep(40.0)
        for rule in frozen:
            realm.thaw(rule)

    realm = run_with(trouble, expected)
    assert realm.seats[0].reigns == []


def test_one_of_the_abandoned_timeline_comes_back_and_joins(expected) -> None:
    """It is at a later step than the run, and must not be believed."""

    async def trouble(realm: Realm) -> None:
        await realm.reaches(5)
        late = realm.of_stage(1)
        frozen = [realm.freeze(peer) for peer in late]
        await anyio.sleep(30.0)
        await realm.start(1)
        await realm.until(lambda: bool(realm.seats[0].reigns))
        for rule in frozen:
            realm.thaw(rule)

    run_with(trouble, expected)


@pytest.mark.parametrize("with_disk", [True, False])
def test_all_die_and_the_coordinator_resumes(with_disk: bool, expected) -> None:
    async def trouble(realm: Realm) -> None:
        await realm.reaches(5)
        disk = realm.seats[0].disk
        await realm.kill_seat(realm.seats[0])
        for stage in range(2):
            await lose(realm, stage)
        await anyio.sleep(100.0)
        realm.seat(Start.RESUME, disk=disk if with_disk else MemoryCheckpoints())
        for _ in range(2):
            for stage in range(2):
                await realm.start(stage)

    realm = run_with(trouble, expected)
    assert realm.seats[1].reigns[-1].t == (3 if with_disk else 0)


def test_a_standby_has_the_checkpoint_too(expected) -> None:
    """Its coordinator and all nodes die: the standby goes on from what it has fetched itself."""

    async def trouble(realm: Realm) -> None:
        realm.seat(Start.STANDBY, key=2, disk=MemoryCheckpoints())
        await realm.reaches(4)
        for peer in realm.peers.values():
            peer.slow_down(50.0)
        await anyio.sleep(5.0)
        await realm.kill_seat(realm.seats[0])
        for stage in range(2):
            await lose(realm, stage)
        await anyio.sleep(100.0)
        for stage in range(2):
            await realm.start(stage)

    realm = run_with(trouble, expected)
    assert realm.seats[1].reigns[-1].t >= 3


def test_nodes_that_are_started_again_offer_what_they_keep(tmp_path: Path, expected) -> None:
    """All die, and the disks of all that could lead: copies on nodes' disks are enough."""

    async def trouble(realm: Realm) -> None:
        await realm.reaches(5)
        await realm.kill_seat(realm.seats[0])
        kept = [peer for peer in realm.peers.values() if peer.node.server.donor.kept is not None]
        assert sorted(peer.node.stage for peer in kept) == [0, 1]
        for stage in range(2):
            await lose(realm, stage)
        await anyio.sleep(100.0)
        for peer in kept:
            await realm.start(peer.node.stage, key=peer.key, shelves=tmp_path)
        for stage in range(2):
            await realm.start(stage)
        await anyio.sleep(5.0)
        realm.seat(Start.RESUME, disk=MemoryCheckpoints())

    realm = run_with(trouble, expected, shelves=tmp_path)
    assert realm.seats[1].reigns[-1].t == 3


class Damaged(MemoryCheckpoints):
    """The file of stage 1 in the newest checkpoint has other bytes than its hash says."""

    def open_stage(self, checkpoint: Checkpoint, stage: int) -> Shelved:
        if stage == 1 and checkpoint.mark == max(self.kept):
            raise CheckpointUnusable("stage-1.safetensors: its bytes have changed")
        return super().open_stage(checkpoint, stage)


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(expected) -> None:
    async def trouble(realm: Realm) -> None:
        await realm.reaches(8)
        disk = Damaged()
        first = realm.seats[0].disk
        assert isinstance(first, MemoryCheckpoints)
        disk.kept, disk.stages = first.kept, first.stages
        await realm.kill_seat(realm.seats[0])
        for stage in range(2):
            await lose(realm, stage)
        realm.seat(Start.RESUME, disk=disk)
        for stage in range(2):
            await realm.start(stage)

    realm = run_with(trouble, expected)
    assert realm.seats[1].reigns[-1].t == 3
    assert any("is of no use" in line for line in realm.events)
