"""What each stage takes: cost and memory, compared with stages that are really built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from swarm.errors import ConfigError
from swarm.manifest import Manifest
from swarm.model.needs import bytes_per_value, stage_needs
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


def held_bytes(m: Manifest, inputs: TensorSpec) -> int:
    return 2 * inputs.nbytes(m.batch.microbatch)


@pytest.mark.parametrize(("tied", "stages"), [(False, 1), (False, 2), (True, 1)])
def test_memory_follows_the_numbers_that_the_stages_have(tied: bool, stages: int):
    m = manifest(**{k.replace(".", "__"): v for k, v in GPT.items()}, model__tied=tied)
    m = m.changed({"stages.count": stages})
    spec = model_spec(m, frozenset())
    for stage, need in enumerate(stage_needs(m, spec)):
        model = StageModel(m, spec, stage)
        inputs = spec.input if stage == 0 else model.input_spec
        assert need.memory_bytes == model.length * bytes_per_value(m) + held_bytes(m, inputs)


def test_costs_are_those_of_the_layers():
    m = manifest(stages__cuts=[1], stages__count=2)
    spec = mlp()
    assert [need.cost for need in stage_needs(m, spec)] == [64 * 32, 32 * 32 + 32 * 10]


def test_what_is_not_trained_takes_its_weights_only():
    m = manifest(stages__count=3)
    spec = mlp(frozen=True)
    first = stage_needs(m, spec)[0]
    assert first.memory_bytes == 4 * (64 * 32 + 32) + held_bytes(m, spec.input)


def test_a_stage_that_costs_nothing_costs_a_little():
    wide = TensorSpec((4,))
    layers = tuple(LayerSpec(name, nn.Identity, wide, 0.0) for name in "ab")
    spec = ModelSpec(wide, TensorSpec((), "int64"), layers, class_loss)
    needs = stage_needs(manifest(stages__count=2), spec)
    assert all(need.cost > 0 for need in needs)
    assert all(need.memory_bytes == held_bytes(manifest(), wide) for need in needs)


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
    need = stage_needs(m, spec)[0]
    assert need.memory_bytes == 20 * bytes_per_value(m) + held_bytes(m, wide)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optimizer__kind": "adamw"}, 4 * 4 + 12),
        ({"optimizer__kind": "sgd", "optimizer__momentum": 0.0}, 4 * 2 + 12),
        ({"optimizer__kind": "sgd", "optimizer__momentum": 0.9}, 4 * 3 + 12),
        ({"optimizer__kind": "adamw", "reproducible__enabled": True}, 4 * 4 + 24),
    ],
)
def test_bytes_for_each_number(changes: dict[str, object], expected: int):
    assert bytes_per_value(manifest(**changes)) == expected


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="the model's layers"):
        stage_needs(manifest(stages__count=4), mlp())


def test_what_waits_takes_memory_too():
    small, large = (manifest(stages__count=2, limits__queue=q, limits__contexts=8) for q in (1, 9))
    spec = replace(mlp(), input=TensorSpec((64,)))
    more = stage_needs(large, spec)[0].memory_bytes - stage_needs(small, spec)[0].memory_bytes
    assert more == 8 * spec.input.nbytes(2)


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
