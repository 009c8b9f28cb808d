"""With delayed updates a stage holds two sets of weights, and the sums of two steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarm.core.update import Update
from swarm.manifest import Manifest
from swarm.model.spec import LayerSpec, ModelSpec, TensorSpec
from swarm.model.stage import OLDER, StageModel, state_names
from tests.digits_model import class_loss, mlp

UPDATE = Update(lr=0.1, scale=0.5, bias1=0.1, bias2=0.05, skip=False)
SKIP = Update(lr=0.1, scale=1.0, bias1=0.1, bias2=0.05, skip=True)
MANIFEST = Manifest.from_tree(
    {
        "model": {"kind": "tests.digits_model:mlp"},
        "batch": {"microbatch": 3, "microbatches": 4},
        "step": {"delay": 1},
    }
)


@pytest.fixture
def stage() -> StageModel:
    return StageModel(MANIFEST, mlp(), 0)


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))


def sums(stage: StageModel, seed: int = 1) -> Tensor:
    return torch.randn(stage.length, generator=torch.Generator().manual_seed(seed))


def bits(stage: StageModel) -> dict[str, bytes]:
    return {name: vector.numpy().tobytes() for name, vector in stage.state().items()}


def test_the_state_ends_with_the_older_weights(stage: StageModel) -> None:
    assert (
        tuple(stage.state()) == state_names(MANIFEST) == ("weights", "exp_avg", "exp_avg_sq", OLDER)
    )
    assert bits(stage)["weights"] == bits(stage)[OLDER]
    without = MANIFEST.changed({"step.delay": 0})
    assert state_names(without) == ("weights", "exp_avg", "exp_avg_sq")


def test_an_update_makes_the_weights_the_older_ones(stage: StageModel) -> None:
    before = bits(stage)["weights"]
    here, _ = stage.forward(inputs())
    stage.apply(sums(stage), UPDATE)
    assert bits(stage)[OLDER] == before
    assert bits(stage)["weights"] != before
    assert torch.equal(stage.forward(inputs(), older=True)[0], here)
    assert not torch.equal(stage.forward(inputs())[0], here)
    stage.apply(None, SKIP)
    assert bits(stage)[OLDER] == bits(stage)["weights"]


def test_piece_by_piece_gives_the_same_state(stage: StageModel) -> None:
    other = StageModel(MANIFEST, mlp(), 0)
    for step, update in enumerate((UPDATE, SKIP, UPDATE)):
        total = sums(stage, step)
        stage.apply(None if update.skip else total, update)
        for start in range(0, stage.length, 1000):
            place = slice(start, min(start + 1000, stage.length))
            other.apply_to(place, None if update.skip else total[place], update)
    assert bits(stage) == bits(other)


def test_a_graph_of_the_weights_lives_through_the_update_that_makes_them_older(
    stage: StageModel,
) -> None:
    gradient = torch.ones(3, *stage.output_spec.shape)
    _, graph = stage.forward(inputs())
    stage.backward(graph, gradient)
    stage.accumulate()
    expected = stage.accumulators.clone()
    stage.clear_accumulators()
    _, graph = stage.forward(inputs())
    stage.apply(sums(stage), UPDATE)
    stage.backward(graph, gradient)
    stage.accumulate()
    assert torch.equal(stage.accumulators, expected)


def test_the_sums_ahead_become_the_present_ones(stage: StageModel) -> None:
    gradient = torch.ones(3, *stage.output_spec.shape)
    _, graph = stage.forward(inputs())
    stage.backward(graph, gradient)
    stage.accumulate(ahead=True)
    assert not stage.accumulators.any()
    stage.accumulators += 7
    stage.turn()
    assert stage.accumulators.any()
    assert not (stage.accumulators == 7).any()
    ahead, _ = stage.accumulators.clone(), stage.turn()
    assert not stage.accumulators.any(), "what was summed is over"
    stage.turn()
    assert not torch.equal(stage.accumulators, ahead)


def test_what_is_not_trained_is_one() -> None:
    def layer() -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10))
        made[0].bias.requires_grad_(False)
        return made.eval()

    spec = ModelSpec(
        input=TensorSpec((64,)),
        target=TensorSpec((), "int64"),
        layers=(LayerSpec("all", layer, TensorSpec((10,)), 640),),
        loss=class_loss,
    )
    stage = StageModel(MANIFEST, spec, 0)
    loaded = {name: tensor + 1 for name, tensor in stage.tensors().items()}
    stage.load_tensors(loaded)
    older, _ = stage.forward(inputs(), older=True)
    newer, _ = stage.forward(inputs())
    assert torch.equal(older, newer)
