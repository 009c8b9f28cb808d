"""Delayed updates: averaging and update run while the next step is computed on older weights."""

from __future__ import annotations

import pytest

from tests.chaos.audit import Audit
from tests.chaos.harness import World, digits_manifest, reference, run_world

DELAY = {"step__delay": 1}


def train(manifest, replicas: int, steps: int) -> World:
    audits: list[Audit] = []

    async def scenario(world: World) -> None:
        audits.append(Audit(world, counting=False))
        await world.start_all(replicas)
        await world.train(steps)

    world = run_world(manifest.changed({"start.replicas": replicas}), scenario)
    assert not audits[0].problems
    assert audits[0].applies
    return world


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_reproducible_mode_gives_the_reference_s_bits(replicas: int) -> None:
    manifest = digits_manifest(reproducible__enabled=True, **DELAY)
    world = train(manifest, replicas, 5)
    expected = reference(manifest, 5)
    assert world.sha256() == expected.sha256
    assert [done.loss for done in world.done] == [result.loss for result in expected.results]
    assert expected.sha256 != reference(manifest.changed({"step.delay": 0}), 5).sha256
