"""The whole swarm on virtual time, without faults: it does what one process does."""

from __future__ import annotations

import pytest

from tests.chaos.harness import World, digits_manifest, reference, run_world


def train(manifest, replicas: int, steps: int) -> World:
    async def scenario(world: World) -> None:
        await world.start_all(replicas)
        await world.train(steps)

    return run_world(manifest.changed({"start.replicas": replicas}), scenario)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_losses_equal_the_reference(replicas: int) -> None:
    manifest = digits_manifest()
    world = train(manifest, replicas, 5)
    expected = [result.loss for result in reference(manifest, 5).results]
    assert [step.loss for step in world.done] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_reproducible_mode_gives_the_reference_s_bits(replicas: int) -> None:
    manifest = digits_manifest(reproducible__enabled=True)
    world = train(manifest, replicas, 4)
    assert world.sha256() == reference(manifest, 4).sha256
