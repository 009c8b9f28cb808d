"""What replicas announce that they can do is what they were made to be able to do."""

from __future__ import annotations

import anyio
import pytest

from dht.memory import MemoryDirectory
from peers.balance import look
from tests.chaos.harness import World, digits_manifest, run_world

UNIT_S, MICROBATCH = 0.01, 4
SLOWER = 3.0


def test_a_speed_is_announced_as_it_is_however_few_microbatches_it_was_measured_with():
    """Between two announcements there may be many forward passes and few backward ones."""
    m = digits_manifest(periods__announce_s=0.05, batch__microbatch=MICROBATCH)
    told: dict[str, set[float]] = {}
    expected: dict[str, float] = {}

    async def listen(world: World) -> None:
        while True:
            for record in await look(MemoryDirectory(world.store), world.manifest):
                if record.samples_per_s:
                    told.setdefault(record.peer, set()).add(record.samples_per_s)
            await anyio.sleep(0.02)

    async def scenario(world: World) -> None:
        for stage in range(2):
            for slower in (1.0, SLOWER):
                peer = await world.start(stage, unit_s=slower * UNIT_S)
                expected[peer.peer_id] = MICROBATCH / (3 * slower * UNIT_S)
        await world.trainer.wait_for_start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen, world)
            await world.train(4)
            tasks.cancel_scope.cancel()

    run_world(m, scenario)
    assert told.keys() == expected.keys()
    for peer, speeds in told.items():
        assert sorted(speeds) == pytest.approx([expected[peer]] * len(speeds)), speeds
