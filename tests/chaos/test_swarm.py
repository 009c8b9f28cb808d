"""The whole swarm on virtual time, without faults: it does what one process does."""

from __future__ import annotations

import pytest

from swarm.reference import run_reference
from tests.chaos.harness import DIGITS, SAMPLES, World, digits_manifest, run_world


def train(manifest, replicas: int, steps: int, seed: int = 0) -> tuple[World, list]:
    done = []

    async def scenario(world: World) -> None:
        for _ in range(replicas):
            for stage in range(manifest.stages.count):
                await world.start(stage)
        await world.trainer.wait_for_start()
        for _ in range(steps):
            done.append(await world.trainer.step())

    manifest = manifest.changed({"start.replicas": replicas})
    return run_world(manifest, scenario, seed=seed), done


def reference(manifest, steps: int):
    return run_reference(manifest, steps=steps, clock=lambda: 0.0, allow={DIGITS, SAMPLES})


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_losses_equal_the_reference(replicas: int) -> None:
    manifest = digits_manifest()
    _, done = train(manifest, replicas, 5)
    expected = [result.loss for result in reference(manifest, 5).results]
    assert [step.loss for step in done] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_reproducible_mode_gives_the_reference_s_bits(replicas: int) -> None:
    manifest = digits_manifest(reproducible__enabled=True)
    world, done = train(manifest, replicas, 4)
    assert world.sha256() == reference(manifest, 4).sha256
