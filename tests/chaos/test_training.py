"""It trains rightly: batch and learning rate, first weights, NaN, evaluation, codecs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from swarm.core.update import learning_rate
from tests.chaos.audit import Audit
from tests.chaos.harness import Peer, World, digits_manifest, reference, run_world

SCHEDULE = {"optimizer__warmup_steps": 2, "optimizer__total_steps": 6}


def train(manifest, replicas: int, steps: int, tamper: Callable[[World], None] | None = None):
    """The world after ``steps`` steps; weights are compared at every mark on the way."""

    audits: list[Audit] = []

    async def scenario(world: World) -> None:
        audits.append(Audit(world, counting=False))
        await world.start_all(replicas)
        if tamper is not None:
            tamper(world)
        await world.train(steps)

    world = run_world(manifest.changed({"start.replicas": replicas}), scenario)
    assert not audits[0].problems
    return world


def losses(results) -> list[float]:
    return [result.loss for result in results]


# -- what a step is (C35, C36, C39) ---------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_batch_and_learning_rate_do_not_depend_on_the_number_of_replicas(replicas: int) -> None:
    manifest = digits_manifest(**SCHEDULE)
    world = train(manifest, replicas, 5)
    expected = reference(manifest, 5).results
    assert losses(world.done) == pytest.approx(losses(expected), rel=1e-5)
    assert [done.lr for done in world.done] == [result.lr for result in expected]
    assert [done.lr for done in world.done] == [
        learning_rate(manifest.optimizer, t) for t in range(5)
    ]
    assert {done.samples for done in world.done} == {
        manifest.batch.microbatch * manifest.batch.microbatches
    }
    for done in world.done:
        assert [sum(counts.values()) for counts in done.counts] == [8, 8]


def test_frozen_weights_are_neither_summed_nor_changed() -> None:
    manifest = digits_manifest(model__args={"frozen": True})
    world = train(manifest, 2, 3)
    expected = reference(manifest, 3)
    assert losses(world.done) == pytest.approx(losses(expected.results), rel=1e-5)
    first = world.of_stage(0)[0].stage.model
    frozen = first.tensors()["layers.0.0.weight"]
    assert torch.equal(frozen, expected.stages[0].tensors()["layers.0.0.weight"])
    assert first.length < sum(tensor.numel() for tensor in first.tensors().values())


def test_the_same_run_gives_the_same_losses_whatever_was_drawn_before() -> None:
    """C38: first weights and data follow from the manifest, not from torch's random state."""
    manifest = digits_manifest(reproducible__enabled=True)
    seeds = iter((11, 22, 33, 44, 55, 66))
    digests: list[set[str]] = []

    async def scenario(world: World) -> None:
        for _ in range(3):
            for stage in range(2):
                torch.manual_seed(next(seeds))
                await world.start(stage)
        await world.trainer.wait_for_start()
        digests.append({world.sha256()})
        await world.train(2)

    world = run_world(manifest.changed({"start.replicas": 3}), scenario)
    expected = reference(manifest, 2)
    assert digests == [{reference(manifest, 0).sha256}]
    assert world.sha256() == expected.sha256


# -- what is not finite (C37) ---------------------------------------------------------------------


def nan(tensor: torch.Tensor) -> torch.Tensor:
    spoilt = tensor.clone()
    spoilt.view(-1)[0] = math.nan
    return spoilt


def bad_gradients(peer: Peer) -> None:
    """A single NaN in each gradient that it computes."""
    model = peer.stage.model
    backward = model.backward

    def spoilt(graph, grad_output):
        output = backward(graph, grad_output)
        model._gradients[0] = nan(model._gradients[0])
        return output

    model.backward = spoilt


def bad_activations(peer: Peer) -> None:
    """Checks that its own check finds."""
    model = peer.stage.model
    forward = model.forward

    def spoilt(inputs, **older):
        output, graph = forward(inputs, **older)
        return nan(output), graph

    model.forward = spoilt


def corrupting_sender(peer: Peer) -> None:
    """Its memory spoils what it sends on, after its own check."""
    forward = peer.stage.forward

    def spoilt(attempt, inputs, *, keep):
        passed = forward(attempt, inputs, keep=keep)
        return type(passed)(nan(passed.output), passed.verdict, passed.loss, passed.blame_sender)

    peer.stage.forward = spoilt


def bad_input_gradients(peer: Peer) -> None:
    model = peer.stage.model
    backward = model.backward
    model.backward = lambda graph, grad_output: nan(backward(graph, grad_output))


def corrupting_gradients(peer: Peer) -> None:
    owner = peer.stage
    whole = owner.forward_backward

    def spoilt(attempt, inputs, targets):
        passed = whole(attempt, inputs, targets)
        if passed.output is None:
            return passed
        return type(passed)(nan(passed.output), passed.verdict, passed.loss, passed.blame_sender)

    owner.forward_backward = spoilt


BAD = {
    "its gradients are not finite": (0, bad_gradients),
    "its gradients are not finite, at the loss": (1, bad_gradients),
    "its outputs are not finite": (0, bad_activations),
    "it sends on what is not finite": (0, corrupting_sender),
    "its input gradients are not finite": (1, bad_input_gradients),
    "it sends back what is not finite": (1, corrupting_gradients),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("exact", [False, True], ids=["fp32", "reproducible"])
def test_one_bad_replica_skips_no_step_and_is_named(name: str, exact: bool) -> None:
    stage, spoil = BAD[name]
    manifest = digits_manifest(reproducible__enabled=exact)
    world = train(manifest, 2, 3, lambda world: spoil(world.of_stage(stage)[0]))
    expected = reference(manifest, 3)
    bad = world.of_stage(stage)[0].peer_id
    assert not any(done.skipped for done in world.done)
    assert losses(world.done) == pytest.approx(losses(expected.results), rel=1e-5)
    if exact:
        assert world.sha256() == expected.sha256
    said = [line for line in world.events if "not finite" in line]
    assert said
    assert all(line.startswith(bad[-6:]) for line in said)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_what_is_not_finite_everywhere_skips_the_step_as_in_the_reference(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's count does not advance, and the run goes on."""
    from swarm.data import ArrayBatches

    train_batch = ArrayBatches.train

    def spoilt(self, t, m):
        inputs, targets = train_batch(self, t, m)
        if (t, m) in ((1, 3), (2, 7)):
            inputs = inputs.copy()
            inputs[0, 0] = math.nan
        return inputs, targets

    monkeypatch.setattr(ArrayBatches, "train", spoilt)
    manifest = digits_manifest(reproducible__enabled=True)
    world = train(manifest, replicas, 5)
    expected = reference(manifest, 5)
    assert [done.skipped for done in world.done] == [False, True, True, False, False]
    assert [done.skipped for done in world.done] == [r.skipped for r in expected.results]
    for done, result in zip(world.done, expected.results, strict=True):
        assert done.loss == pytest.approx(result.loss, rel=1e-5, nan_ok=True)
    assert world.sha256() == expected.sha256
    assert sum("was skipped" in line for line in world.events) == 2


# -- held-out data --------------------------------------------------------------------------------


def test_an_evaluation_changes_nothing_and_equals_the_reference_s() -> None:
    manifest = digits_manifest(run__eval_every=1, run__eval_microbatches=3)
    found: list[float] = []

    async def scenario(world: World) -> None:
        await world.start_all(2)
        for _ in range(3):
            await world.train(1)
            before = world.sha256()
            found.append(await world.trainer.evaluate(3))
            assert world.sha256() == before
            for peer in world.peers.values():
                assert not peer.stage.ledger.held
                assert not peer.stage.losses
                assert not peer.stage.model.accumulators.any()

    world = run_world(manifest.changed({"start.replicas": 2}), scenario)
    expected = reference(manifest, 3).results
    assert found == pytest.approx([result.eval_loss for result in expected], rel=1e-5)
    assert losses(world.done) == pytest.approx(losses(expected), rel=1e-5)


def test_an_evaluation_gets_over_a_dead_replica() -> None:
    manifest = digits_manifest(run__eval_every=1, run__eval_microbatches=8)
    found: list[float] = []

    async def scenario(world: World) -> None:
        await world.start_all(2)
        await world.train(1)
        await world.kill(world.of_stage(1)[0])
        found.append(await world.trainer.evaluate(8))

    run_world(manifest.changed({"start.replicas": 2}), scenario)
    assert found == pytest.approx([reference(manifest, 1).results[0].eval_loss], rel=1e-5)


# -- codecs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_lossy_activations_and_gradients_equal_the_reference_s(codec: str, replicas: int) -> None:
    manifest = digits_manifest(wire__activations=codec, wire__gradients=codec)
    world = train(manifest, replicas, 5)
    assert losses(world.done) == pytest.approx(losses(reference(manifest, 5).results), rel=1e-5)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_lossy_averaging_keeps_replicas_equal_and_learns(codec: str) -> None:
    """``train`` compares the weights of replicas at every mark."""
    steps = 12
    world = train(digits_manifest(wire__averaging=codec), 3, steps)
    exact = losses(reference(digits_manifest(), steps).results)
    assert losses(world.done) == pytest.approx(exact, rel=0.03)
    assert losses(world.done) != pytest.approx(exact, rel=1e-7)
    assert world.done[-1].loss < 0.9 * world.done[0].loss
    world.sha256()
