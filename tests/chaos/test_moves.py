"""Replicas move to the stage that lacks them, on virtual time, with the real nodes and trainer."""

from __future__ import annotations

import anyio
import pytest

from swarm.core.rebalancing import Need
from tests.chaos.harness import World, digits_manifest, reference, run_world

PERIOD_S = 1.0
EQUAL = [Need(1.0), Need(1.0)]


def manifest(**changes: object):
    common: dict[str, object] = {
        "reproducible__enabled": True,
        "rebalancing__period_s": PERIOD_S,
        "periods__announce_s": 0.5,
        "periods__watch_s": 0.2,
    }
    return digits_manifest(**(common | changes))


def counts(world: World) -> list[int]:
    return [len(world.trainer.ready(stage)) for stage in range(world.trainer.stages)]


def moves(world: World) -> list[str]:
    """As the trainer tells them."""
    return [e for e in world.events if " moves to stage " in e and not e.startswith("node ")]


async def train_until(world: World, condition, *, limit: int = 400) -> None:
    for _ in range(limit):
        if condition():
            return
        await world.train(1)
    pytest.fail(f"after {limit} steps: {world.events[-20:]}")


def assert_equals_reference(world: World, m) -> None:
    found = reference(m, len(world.done))
    assert [done.loss for done in world.done] == [step.loss for step in found.results]
    assert world.sha256() == found.sha256


def test_a_stage_that_lost_most_of_its_replicas_gets_one_from_another():
    m = manifest()

    async def scenario(world: World) -> None:
        world.needs = EQUAL
        for stage, replicas in enumerate([3, 3]):
            for _ in range(replicas):
                await world.start(stage)
        await world.trainer.wait_for_start()
        await world.train(3)
        for peer in world.of_stage(1)[:2]:
            await world.kill(peer)
        await train_until(world, lambda: counts(world) == [2, 2])
        await world.train(3)

    world = run_world(m, scenario)
    assert len(moves(world)) == 1
    assert "moves to stage 1 after this step: stage 1 does 133 samples/s, stage 0" in moves(world)[0]
    assert_equals_reference(world, m)
