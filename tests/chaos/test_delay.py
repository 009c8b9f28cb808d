"""Delayed updates: averaging and update run while the next step is computed on older weights."""

from __future__ import annotations

import anyio
import pytest

from peers.faults import Delay
from swarm.reference import Reference
from tests.chaos.audit import Audit, AuditedStage
from tests.chaos.harness import ALLOWED, World, digits_manifest, reference, run_world

EXACT = {"reproducible__enabled": True}


def delayed(**changes: object):
    return digits_manifest(step__delay=1, **changes)


def train(manifest, replicas: int, steps: int, *, counting: bool = False) -> World:
    audits: list[Audit] = []

    async def scenario(world: World) -> None:
        audits.append(Audit(world, counting=counting))
        await world.start_all(replicas)
        await world.train(steps)

    world = run_world(manifest.changed({"start.replicas": replicas}), scenario)
    assert not audits[0].problems
    assert audits[0].applies == replicas * 2 * steps
    return world


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_reproducible_mode_gives_the_reference_s_bits(replicas: int) -> None:
    manifest = delayed(**EXACT)
    world = train(manifest, replicas, 5)
    expected = reference(manifest, 5)
    assert world.sha256() == expected.sha256
    assert [done.loss for done in world.done] == [result.loss for result in expected.results]


def test_the_first_two_steps_are_computed_on_the_initial_weights() -> None:
    """Then each on the weights before the last update; the loss still falls."""
    late = [result.loss for result in reference(delayed(**EXACT), 30).results]
    prompt = [result.loss for result in reference(digits_manifest(**EXACT), 30).results]
    assert late[0] == prompt[0]
    assert late[1:3] != prompt[1:3]
    assert sum(late[-5:]) < sum(late[:5]) * 0.75


def test_the_first_steps_may_be_done_without_delay() -> None:
    manifest = delayed(step__delay_after=3, **EXACT)
    world = train(manifest, 2, 6)
    expected = reference(manifest, 6)
    assert world.sha256() == expected.sha256
    prompt = [result.loss for result in reference(digits_manifest(**EXACT), 6).results]
    losses = [result.loss for result in expected.results]
    assert losses[:3] == prompt[:3]
    assert losses[3:] != prompt[3:]


def test_every_microbatch_counts_once_in_either_book() -> None:
    train(delayed(), 2, 4, counting=True)


def test_the_next_step_is_computed_while_the_sums_are_on_their_way() -> None:
    """Where parts and sums are slow, a delayed step takes as long as computing or averaging alone,
    not both."""

    def seconds(manifest) -> float:
        async def scenario(world: World) -> None:
            await world.start_all(2)
            await world.train(2)
            world.faults.add(lambda _, header: header["kind"] in ("part", "sum"), Delay(0.15))
            await world.train(6)

        world = run_world(manifest.changed({"start.replicas": 2}), scenario)
        return sum(done.seconds for done in world.done[2:])

    assert seconds(delayed()) < 0.75 * seconds(digits_manifest())


def test_work_of_the_next_step_is_held_when_a_step_is_applied() -> None:
    ahead: list[int] = []

    class Watched(AuditedStage):
        def decide(self, decision):
            if decision.mark == self.mark and self.ahead is not None:
                ahead.append(len(self.ahead.held))
            return super().decide(decision)

    async def scenario(world: World) -> None:
        audit = Audit(world, counting=False)

        def watch(peer) -> None:
            audit.watch(peer)
            peer.stage.__class__ = Watched

        world.on_start = watch
        await world.start_all(2)
        await world.train(4)
        assert not audit.problems

    run_world(delayed(start__replicas=2), scenario)
    assert sum(ahead) > 0
    assert len(ahead) == 16


def test_an_evaluation_between_steps_is_of_the_newest_weights() -> None:
    manifest = delayed(run__eval_microbatches=3, **EXACT)
    expected = Reference(manifest, ALLOWED)

    async def scenario(world: World) -> None:
        await world.start_all(2)
        for _ in range(3):
            await world.train(1)
            expected.step(lambda: 0.0)
            assert await world.trainer.evaluate(3) == pytest.approx(expected.evaluate(), rel=1e-6)

    world = run_world(manifest.changed({"start.replicas": 2}), scenario)
    assert world.sha256() == reference(manifest, 3).sha256


def test_who_dies_holding_the_work_of_two_steps_changes_nothing() -> None:
    manifest = delayed(**EXACT)

    async def scenario(world: World) -> None:
        await world.start_all(2)
        await world.train(2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.train, 3)
            victim = world.of_stage(0)[0]
            while not (victim.stage.ledger.held and victim.stage.ahead.held):  # noqa: ASYNC110
                await anyio.sleep(0.001)  # of virtual time
            await world.kill(victim)

    world = run_world(manifest.changed({"start.replicas": 2}), scenario)
    assert world.sha256() == reference(manifest, 5).sha256


def test_who_joins_gets_the_older_weights_too() -> None:
    """All that were there from the beginning die, so what was lost is redone by who has joined."""
    manifest = delayed(**EXACT)

    async def scenario(world: World) -> None:
        await world.start_all(1)
        await world.train(2)
        veterans = [world.of_stage(stage)[0] for stage in range(2)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.train, 40)
            for stage in range(2):
                await world.start(stage)
                await world.wait_for(stage, 2)
            for veteran in veterans:
                await world.kill(veteran)

    world = run_world(manifest, scenario)
    assert world.sha256() == reference(manifest, 42).sha256


def test_work_ahead_is_refused_in_a_run_without_delay() -> None:
    refused: list[str] = []

    async def scenario(world: World) -> None:
        await world.start_all(1)
        await world.train(1)
        peer = world.of_stage(0)[0]
        offered = peer.node.server.passes.offered
        header: dict = {}

        async def listen(message, payload):
            if not header:
                header["yes"] = True
                answer = await offered(message.model_copy(update={"ahead": True}), payload)
                refused.append(answer.reason)
            return await offered(message, payload)

        peer.node.server.passes.offered = listen
        await world.train(1)

    run_world(digits_manifest(), scenario)
    assert refused == ["this run has no delayed updates (step.delay = 0)"]
