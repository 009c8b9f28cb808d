"""What the live view shows of moves, and where ``swarm local`` finds a node that has moved."""

from __future__ import annotations

import random
from collections import Counter

import anyio

from peers.status import Monitor, Seat
from swarm.core.rebalancing import Need
from tests.chaos.harness import World, digits_manifest, run_world

EQUAL = [Need(1.0), Need(1.0)]


def manifest():
    return digits_manifest(rebalancing__period_s=1.0, periods__announce_s=0.5, periods__watch_s=0.2)


def shown(monitor: Monitor) -> list[Counter[str]]:
    """How many replicas are in which state, by stage."""
    return [Counter(r.state for r in stage.replicas) for stage in monitor.look().stages]


def notes(monitor: Monitor, state: str) -> set[str]:
    stages = monitor.look().stages
    return {r.note for stage in stages for r in stage.replicas if r.state == state}


def test_a_move_is_seen_draining_then_joining_elsewhere_and_never_twice():
    looks: list[list[Counter[str]]] = []
    said: set[str] = set()
    monitor = Monitor()

    async def scenario(world: World) -> None:
        monitor.attach(world.trainer)
        world.may_move(EQUAL)
        await world.start_all(3)
        await world.train(2)
        for peer in world.of_stage(1)[:2]:
            await world.kill(peer)

        async def watch() -> None:
            while True:
                looks.append(shown(monitor))
                said.update(notes(monitor, "draining"))
                await anyio.sleep(0.02)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            while [len(world.trainer.ready(s)) for s in (0, 1)] != [2, 2]:
                await world.train(1)
            tasks.cancel_scope.cancel()
        looks.append(shown(monitor))

    run_world(manifest(), scenario)
    assert max(look[0]["draining"] for look in looks) == 1
    assert said == {"moves to stage 1"}
    assert max(look[1]["joining"] for look in looks) == 1
    for look in looks:
        assert look[0]["draining"] + look[1]["joining"] <= 1, "the mover has one line"
    assert looks[-1][0] + looks[-1][1] == Counter(ready=4)
    assert sum(looks[-1][0].values()) == 2


def test_one_that_has_moved_sits_where_it_is_now():
    monitor = Monitor()
    seats: list[dict[str, Seat]] = []

    async def scenario(world: World) -> None:
        monitor.attach(world.trainer)
        world.may_move(EQUAL)
        await world.start_all(3)
        await world.train(2)
        seats.append(monitor.members())
        for peer in world.of_stage(1)[:2]:
            await world.kill(peer)
        while [len(world.trainer.ready(s)) for s in (0, 1)] != [2, 2]:
            await world.train(1)
        seats.append(monitor.members())

    run_world(manifest(), scenario)
    before, after = seats
    assert Counter(seat.stage for seat in before.values()) == {0: 3, 1: 3}
    assert Counter(seat.stage for seat in after.values()) == {0: 2, 1: 2}
    assert all(seat.serves for seat in (*before.values(), *after.values()))
    (moved,) = [peer for peer in after if after[peer].stage != before[peer].stage]
    assert after[moved].stage == 1


def test_a_newcomer_goes_where_the_living_lack_one():
    """The dead do not count, nor does it matter that the trainer has not missed them yet; those
    who are on their way do."""
    monitor = Monitor()
    found: dict[str, set[int]] = {}

    async def scenario(world: World) -> None:
        monitor.attach(world.trainer)
        await world.start_all(2)
        await world.train(2)

        def in_need(coming, gone=()) -> set[int]:
            return {monitor.stage_in_need(coming, gone, random.Random(i)) for i in range(20)}

        dead = [peer.peer_id for peer in world.of_stage(1)][:1]
        living = {p.peer_id: p.node.stage for p in world.peers.values() if p.peer_id not in dead}
        found["one of stage 1 is dead"] = in_need(living, dead)
        found["another comes"] = in_need({**living, "its process has begun": 1}, dead)

    run_world(manifest(), scenario)
    assert found["one of stage 1 is dead"] == {1}
    assert found["another comes"] != {1}
