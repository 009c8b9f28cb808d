"""What each stage takes: cost and memory, compared with stages that are really built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from swarm.errors import ConfigError
from swarm.manifest import Manifest
from swarm.model.needs import bytes_per_value, stage_memories, stage_needs
from swarm.model.registry import build_layer, model_spec
from swarm.model.spec import LayerSpec, ModelSpec, TensorSpec
from swarm.model.stage import StageModel
from tests.digits_model import class_loss, mlp

NO_QUEUE = {"limits.queue": 1, "limits.contexts": 1}
GPT = {
    "model.layers": 2,
    "model.d_model": 16,
    "model.heads": 2,
    "model.vocabulary": 256,
    "model.sequence": 8,
}


def manifest(**changes: object) -> Manifest:
    given = {name.replace("__", "."): value for name, value in changes.items()}
    return Manifest.from_tree({}).changed({"batch.microbatch": 2} | NO_QUEUE | given)


def vectors(m: Manifest, spec: ModelSpec) -> list[int]:
    return [memory.vectors for memory in stage_memories(m, spec)]


@pytest.mark.parametrize(("tied", "stages"), [(False, 1), (False, 2), (True, 1)])
def test_memory_follows_the_numbers_that_the_stages_have(tied: bool, stages: int):
    m = manifest(**{k.replace(".", "__"): v for k, v in GPT.items()}, model__tied=tied)
    m = m.changed({"stages.count": stages})
    spec = model_spec(m, frozenset())
    for stage, found in enumerate(vectors(m, spec)):
        assert found == StageModel(m, spec, stage).length * bytes_per_value(m)


def test_a_stage_needs_what_it_takes_at_least():
    m = manifest(**{k.replace(".", "__"): v for k, v in GPT.items()}, stages__count=2)
    spec = model_spec(m, frozenset())
    needs, memories = stage_needs(m, spec), stage_memories(m, spec)
    assert [need.memory_bytes for need in needs] == [memory.least for memory in memories]
    assert all(memory.least > memory.vectors for memory in memories)


def test_costs_are_those_of_the_layers():
    m = manifest(stages__cuts=[1], stages__count=2)
    spec = mlp()
    assert [need.cost for need in stage_needs(m, spec)] == [64 * 32, 32 * 32 + 32 * 10]


def test_what_is_not_trained_takes_its_weights_only():
    m = manifest(stages__count=3)
    spec = mlp(frozen=True)
    assert vectors(m, spec)[0] == 4 * (64 * 32 + 32)


def test_a_stage_that_costs_nothing_costs_a_little():
    wide = TensorSpec((4,))
    layers = tuple(LayerSpec(name, nn.Identity, wide, 0.0) for name in "ab")
    spec = ModelSpec(wide, TensorSpec((), "int64"), layers, class_loss)
    needs = stage_needs(manifest(stages__count=2), spec)
    assert all(need.cost > 0 for need in needs)
    assert vectors(manifest(stages__count=2), spec) == [0, 0]


class NeedsNumbers(nn.Module):
    """Looks at its numbers while it is built, as a layer on no device cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        assert float(self.inner.weight.detach().abs().sum()) > 0


def test_a_layer_that_cannot_be_built_without_numbers_is_built_with_them():
    wide = TensorSpec((4,))
    with torch.device("meta"), pytest.raises(RuntimeError):
        NeedsNumbers()
    layers = (LayerSpec("odd", NeedsNumbers, wide, 1.0), LayerSpec("last", nn.Identity, wide, 1.0))
    spec = ModelSpec(wide, TensorSpec((), "int64"), layers, class_loss)
    m = manifest(stages__count=2)
    assert vectors(m, spec)[0] == 20 * bytes_per_value(m)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optimizer__kind": "adamw"}, 4 * 4 + 12),
        ({"optimizer__kind": "sgd", "optimizer__momentum": 0.0}, 4 * 2 + 12),
        ({"optimizer__kind": "sgd", "optimizer__momentum": 0.9}, 4 * 3 + 12),
        ({"optimizer__kind": "adamw", "reproducible__enabled": True}, 4 * 4 + 24),
        ({"optimizer__kind": "adamw", "wire__averaging": "int8"}, 4 * 4 + 12 + 8),
        ({"optimizer__kind": "adamw", "step__delay": 1}, 4 * 5 + 16),
    ],
)
def test_bytes_for_each_number(changes: dict[str, object], expected: int):
    assert bytes_per_value(manifest(**changes)) == expected


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="the model's layers"):
        stage_needs(manifest(stages__count=4), mlp())


def test_what_waits_takes_memory_too_but_never_more_than_a_step_has():
    spec = replace(mlp(), input=TensorSpec((64,)))

    def held(stage: int, **changes: object) -> float:
        m = manifest(stages__count=2, limits__queue=4, limits__contexts=8, **changes)
        inputs = spec.input if stage == 0 else spec.layers[0].output
        return stage_memories(m, spec)[stage].inputs / inputs.nbytes(2)

    assert held(0, batch__microbatches=100) == 4 + 8
    assert held(1, batch__microbatches=100) == 4  # its backward follows at once
    assert held(0, batch__microbatches=3) == 3
    assert held(0, batch__microbatches=3, step__delay=1) == 6
    assert held(0, batch__microbatches=100, limits__window=5) == 5


@pytest.mark.parametrize("stage", [0, 1])
def test_a_graph_saves_what_autograd_saves(stage: int):
    m = manifest(**{k.replace(".", "__"): v for k, v in GPT.items()}, stages__count=2)
    spec = model_spec(m, frozenset())
    memory, model = stage_memories(m, spec)[stage], StageModel(m, spec, stage)
    own = {p.untyped_storage().data_ptr() for p in model.tensors().values()}
    saved: dict[int, tuple[torch.Tensor, int]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    given = spec.input if stage == 0 else model.input_spec
    inputs = torch.zeros(given.batch_shape(2), dtype=given.torch_dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        if stage == 0:
            model.forward(inputs)
        else:
            model.forward_loss(inputs, torch.zeros(2, 8, dtype=torch.uint8))
    # Layers next to each other may save the same tensor, which is counted twice.
    assert memory.saved == pytest.approx(sum(size for _, size in saved.values()), rel=0.1)


def test_a_layer_that_fails_on_zeros_is_told_and_not_counted(caplog):
    class Choosy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("zeros are beneath me")

    wide = TensorSpec((4,))
    layers = (LayerSpec("choosy", Choosy, wide, 1.0), LayerSpec("last", nn.Identity, wide, 1.0))
    spec = ModelSpec(wide, TensorSpec((), "int64"), layers, class_loss)
    assert stage_memories(manifest(stages__count=2), spec)[0].saved == 0
    assert "layer choosy cannot be tried (zeros are beneath me)" in caplog.text


def test_a_small_model_is_built_with_its_numbers_since_that_is_quicker(monkeypatch):
    built = []

    def counted(manifest, spec, index):
        built.append(index)
        return build_layer(manifest, spec, index)

    monkeypatch.setattr("swarm.model.needs.build_layer", counted)
    small = Manifest.from_tree({"model": {"d_model": 16, "layers": 2, "heads": 2}})
    stage_needs(small, model_spec(small, ()))
    assert built == [0, 1, 2, 3]
    monkeypatch.setattr("swarm.model.needs.FEW", 0)
    stage_needs(small, model_spec(small, ()))
    assert built == [0, 1, 2, 3]
