"""Stochastic wiring on virtual time: replicas get microbatches in proportion to their speed."""

from __future__ import annotations

import anyio
import pytest

from tests.chaos.harness import Peer, World, digits_manifest, run_world

SPEEDS = (1.0, 2.0, 4.0)
"""How much slower each of the three replicas is."""

UNIT_S = 0.01


class Tally:
    """The order in which the replicas of one stage counted their microbatches."""

    def __init__(self, world: World, stage: int) -> None:
        self.order: list[str] = []
        self._stage = stage
        self._at: list[tuple[int, anyio.Event]] = []
        world.on_start = self.watch

    def watch(self, peer: Peer) -> None:
        if peer.node.stage != self._stage:
            return
        owner, add = peer.stage, peer.stage._add

        def counted(book) -> None:
            add(book)
            self.order.append(peer.peer_id)
            for at, event in self._at:
                if len(self.order) >= at:
                    event.set()

        owner._add = counted  # type: ignore[method-assign]

    async def reaches(self, count: int) -> None:
        event = anyio.Event()
        self._at.append((count, event))
        await event.wait()

    def shares(self, peers: list[Peer], start: int = 0, stop: int | None = None) -> list[float]:
        part = self.order[start:stop]
        return [part.count(peer.peer_id) / len(part) for peer in peers]


def ratio(*slowness: float) -> list[float]:
    speeds = [1 / value for value in slowness]
    return [speed / sum(speeds) for speed in speeds]


@pytest.mark.parametrize("stage", [0, 1], ids=["slow stage first", "slow stage last"])
def test_three_replicas_slowed_1_2_4_get_4_2_1(stage: int) -> None:
    peers: list[Peer] = []

    async def scenario(world: World) -> None:
        tally = Tally(world, stage)
        await world.start(1 - stage, unit_s=UNIT_S / 10)
        for slowness in SPEEDS:
            peers.append(await world.start(stage, unit_s=UNIT_S * slowness))
        await world.wait_for(0, 1 if stage else 3)
        await world.wait_for(1, 3 if stage else 1)
        await world.train(1)
        world.tally = tally  # type: ignore[attr-defined]

    world = run_world(digits_manifest(batch__microbatches=1000), scenario)
    counts = world.done[0].counts[stage]
    assert sum(counts.values()) == 1000
    shares = [counts[peer.peer_id] / 1000 for peer in peers]
    assert shares == pytest.approx(ratio(*SPEEDS), rel=0.05)


@pytest.mark.parametrize("stage", [0, 1], ids=["slow stage first", "slow stage last"])
def test_a_replica_that_becomes_slow_loses_its_share_within_twenty(stage: int) -> None:
    peers: list[Peer] = []
    at = 150

    async def scenario(world: World) -> None:
        tally = Tally(world, stage)
        await world.start(1 - stage, unit_s=UNIT_S / 10)
        for _ in range(3):
            peers.append(await world.start(stage, unit_s=UNIT_S))
        await world.wait_for(0, 1 if stage else 3)
        await world.wait_for(1, 3 if stage else 1)

        async def slow_down() -> None:
            await tally.reaches(at)
            peers[1].slow_down(4.0)

        world.tasks.start_soon(slow_down)
        await world.train(1)
        world.tally = tally  # type: ignore[attr-defined]

    world = run_world(digits_manifest(batch__microbatches=480), scenario)
    tally = world.tally  # type: ignore[attr-defined]
    assert tally.shares(peers, at - 120, at) == pytest.approx(ratio(1, 1, 1), rel=0.1)
    assert tally.shares(peers, at + 20, at + 320) == pytest.approx(ratio(1, 4, 1), rel=0.1)


def test_a_newcomer_is_neither_starved_nor_flooded() -> None:
    peers: list[Peer] = []
    at = 150

    async def scenario(world: World) -> None:
        tally = Tally(world, 1)
        await world.start(0, unit_s=UNIT_S / 10)
        for _ in range(2):
            peers.append(await world.start(1, unit_s=UNIT_S))
        await world.wait_for(0, 1)
        await world.wait_for(1, 2)

        async def join() -> None:
            await tally.reaches(at)
            peers.append(await world.start(1, unit_s=2 * UNIT_S))

        world.tasks.start_soon(join)
        await world.train(1)
        world.tally = tally  # type: ignore[attr-defined]

    world = run_world(digits_manifest(batch__microbatches=500), scenario)
    tally = world.tally  # type: ignore[attr-defined]
    first = tally.order.index(peers[2].peer_id)
    assert sum(world.done[0].counts[1].values()) == 500
    # Of its first forty microbatches and of the rest of the step it gets its share, no more.
    early = tally.shares(peers, first, first + 40)[2]
    late = tally.shares(peers, first + 40)[2]
    assert 0.5 * 0.2 <= early <= 1.5 * 0.2
    assert late == pytest.approx(0.2, rel=0.1)
