"""bf16 where it is wished for, float32 everywhere else; swarm and one process agree."""

from __future__ import annotations

import pytest
import torch

from swarm.core.update import Update
from swarm.manifest import Manifest
from swarm.model.registry import model_spec
from swarm.model.stage import StageModel
from tests.chaos.harness import World, digits_manifest, reference, run_world

GPT = {
    "model": {"d_model": 16, "layers": 2, "heads": 2, "sequence": 8, "autocast": "bf16"},
    "batch": {"microbatch": 3, "microbatches": 2},
    "stages": {"count": 2},
}


def stages_of(**model: object) -> list[StageModel]:
    manifest = Manifest.from_tree({**GPT, "model": GPT["model"] | model})
    spec = model_spec(manifest)
    return [StageModel(manifest, spec, stage) for stage in range(2)]


def tokens() -> torch.Tensor:
    return torch.arange(24, dtype=torch.uint8).view(3, 8)


def test_what_crosses_a_boundary_or_is_kept_is_float32() -> None:
    first, last = stages_of()
    x, below = first.forward(tokens())
    loss, above = last.forward_loss(x, tokens())
    gradient = last.backward(above, None)
    assert gradient is not None
    first.backward(below, gradient)
    for stage in (first, last):
        assert stage.gradient_finite()
        stage.accumulate()
        stage.apply(stage.accumulators, Update(0.1, 1.0, 0.1, 0.05, False))
    kept = [x, gradient, *first.tensors().values(), *last.state().values(), last.accumulators]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    assert isinstance(loss, float)


def test_products_are_bf16_only_where_the_manifest_says_so() -> None:
    for autocast, dtype in (("none", torch.float32), ("bf16", torch.bfloat16)):
        first, _ = stages_of(autocast=autocast)
        linear = first._now.modules[1].get_submodule("up")
        seen: list[torch.dtype] = []
        linear.register_forward_hook(lambda *given, seen=seen: seen.append(given[2].dtype))
        first.forward(tokens())
        assert seen == [dtype]


def test_computing_again_gives_the_same_bits() -> None:
    first, _ = stages_of()
    assert torch.equal(first.forward(tokens())[0], first.forward(tokens())[0])


def test_the_losses_of_a_swarm_are_those_of_one_process() -> None:
    plain = digits_manifest(run__eval_every=3, run__steps=3)
    manifest = plain.changed({"model.autocast": "bf16"})
    found: list[float] = []

    async def scenario(world: World) -> None:
        await world.start_all(2)
        await world.train(3)
        evaluated = await world.trainer.evaluate(manifest.run.eval_microbatches)
        found.extend([*(done.loss for done in world.done), evaluated])

    run_world(manifest, scenario)
    results = reference(manifest, 3).results
    evaluated = results[-1].eval_loss
    assert evaluated is not None
    expected = [*(result.loss for result in results), evaluated]
    # Replicas add in another order, and a weight may then be rounded to its other neighbour.
    assert found == pytest.approx(expected, rel=1e-4)
    full = [result.loss for result in reference(plain, 3).results]
    assert expected[:3] != full
    assert expected[:3] == pytest.approx(full, rel=2e-2)
