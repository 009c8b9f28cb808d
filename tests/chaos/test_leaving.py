"""Replicas that leave in good order: no work is lost, no stage is left empty."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from peers.faults import Drop, requests
from tests.chaos.harness import Peer, World, digits_manifest, reference, run_world
from tests.chaos.trouble import run_world_in

STEPS = 10
MANIFEST = digits_manifest(reproducible__enabled=True, limits__state_piece=64)
Scenario = Callable[[World], Awaitable[None]]


@pytest.fixture(scope="module")
def expected():
    return reference(MANIFEST, STEPS)


def run_with(trouble: Scenario, expected) -> World:
    return run_world_in(trouble, expected, MANIFEST, steps=STEPS, replicas=2)


def gone(peer: Peer) -> bool:
    server = peer.node.server
    return server is not None and server.orders.finished.is_set()


@pytest.mark.parametrize("stage", [0, 1])
def test_one_of_two_leaves_and_nothing_is_done_again(stage: int, expected) -> None:
    async def trouble(world: World) -> None:
        await world.reaches(2)
        world.of_stage(stage)[0].node.leave()

    world = run_with(trouble, expected)
    leaver = world.of_stage(stage)[0]
    assert gone(leaver)
    assert sum(done.resent for done in world.done) == 0
    assert leaver.node.server.orders.finish_reason == "left after step 3"
    assert leaver.peer_id in world.done[2].counts[stage]
    assert leaver.peer_id not in world.done[4].counts[stage]


def test_both_wish_to_leave_and_one_has_to_wait_for_another(expected) -> None:
    async def trouble(world: World) -> None:
        await world.reaches(1)
        first, second = world.of_stage(1)
        first.node.leave()
        second.node.leave()
        await anyio.sleep(1.0)
        assert sorted([gone(first), gone(second)]) == [False, True]
        for peer in world.peers.values():
            peer.slow_down(5.0)
        await world.start(1)

    world = run_with(trouble, expected)
    assert [gone(peer) for peer in world.of_stage(1)[:2]] == [True, True]
    assert any("not yet: no other replica" in line for line in world.events)


def test_the_last_one_goes_at_its_limit(expected) -> None:
    """The run waits, and goes on with whoever comes and holds the state: here, one who left."""
    del expected

    async def scenario(world: World) -> None:
        await world.start_all(1)
        await world.train(1)
        last = world.of_stage(1)[0]
        last.slow_down(30.0)
        last.node.leave()
        began = anyio.current_time()
        world.tasks.start_soon(world.train, 1000)
        await world.until(lambda: gone(last))
        limit_s = MANIFEST.periods.drain_s
        assert limit_s <= anyio.current_time() - began < limit_s + 3
        assert "too long" in last.node.server.orders.finish_reason

    run_world(MANIFEST, scenario)


def test_one_leaves_before_the_run_has_begun() -> None:
    async def scenario(world: World) -> None:
        world.tasks.start_soon(world.trainer.wait_for_start)
        early = await world.start(0)
        await world.until(lambda: early.node.server.host.trainer is not None)
        early.node.leave()
        await world.until(lambda: gone(early))

    run_world(MANIFEST, scenario)


def test_one_leaves_whom_no_trainer_has_ever_called() -> None:
    async def scenario(world: World) -> None:
        world.faults.add(requests(source=world.trainer.me.peer), Drop())
        early = await world.start(0)
        early.node.leave()
        await world.until(lambda: gone(early))

    run_world(MANIFEST, scenario)


@pytest.mark.parametrize("kind", ["leave", "prepare", "vote", "decide"])
def test_one_that_leaves_is_killed_meanwhile(kind: str, expected) -> None:
    async def trouble(world: World) -> None:
        await world.reaches(2)
        leaver = world.of_stage(1)[0]
        reached = anyio.Event()

        def seen(link, header) -> bool:
            if header["kind"] == kind and leaver.peer_id in (link.source, link.target):
                reached.set()
            return False

        world.faults.add(seen, Drop())
        leaver.node.leave()
        await reached.wait()
        await world.kill(leaver)

    run_with(trouble, expected)


def test_its_mate_dies_while_it_leaves(expected) -> None:
    """It is then the last one, and is given work again: the step needs it."""

    async def trouble(world: World) -> None:
        await world.reaches(2)
        leaver, mate = world.of_stage(1)
        leaver.node.leave()
        await anyio.sleep(0.01)
        await world.kill(mate)
        await world.start(1)

    run_with(trouble, expected)
