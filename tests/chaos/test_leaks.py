"""A hundred nodes come and go in one run: nothing of them is left."""

from __future__ import annotations

import gc
import weakref

import anyio
import trio

from peers.replica import ReplicaServer
from tests.chaos.harness import World, digits_manifest, run_world

CYCLES = 100
MANIFEST = digits_manifest(
    limits__state_piece=256, periods__watch_s=0.2, periods__announce_s=1, periods__record_ttl_s=3
)


def held(world: World) -> dict[str, int]:
    """What the swarm holds on to, by name."""
    trainer = world.trainer
    return {
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "peers on the network": len(world.network._peers),
        "members": len(trainer.roster.all()),
        "heard": len(trainer.heard),
        "addresses": len(trainer.addresses),
        "lengths": len(trainer.admissions._lengths),
        "servers": sum(len(trainer.wiring.loads(stage)) for stage in range(2)),
        "rules": len(world.faults.rules),
    }


def test_a_hundred_join_and_leave() -> None:
    servers: list[weakref.ref[ReplicaServer]] = []
    before: dict[str, int] = {}
    after: dict[str, int] = {}

    async def cycle(world: World, stage: int) -> None:
        peer = await world.start(stage)
        servers.append(weakref.ref(peer.node.server))
        await world.until(lambda: peer.node.me in world.trainer.ready(stage))
        peer.node.leave()
        await world.until(lambda: peer.node.server.orders.finished.is_set())
        await anyio.sleep(0.1)
        await world.kill(peer)
        world.peers = {name: one for name, one in world.peers.items() if one is not peer}

    async def scenario(world: World) -> None:
        await world.start_all(2)
        for peer in world.peers.values():
            peer.slow_down(10.0)
        world.tasks.start_soon(world.train, 100_000)
        await cycle(world, 0)
        await anyio.sleep(10.0)
        before.update(held(world))
        for _ in range(CYCLES // 4):
            async with anyio.create_task_group() as tasks:
                for stage in (0, 0, 1, 1):
                    tasks.start_soon(cycle, world, stage)
            world.events.clear()
        await anyio.sleep(10.0)
        after.update(held(world))

    run_world(MANIFEST, scenario)
    gc.collect()
    assert len(servers) == CYCLES + 1
    assert sum(ref() is not None for ref in servers) == 0
    assert after == before
