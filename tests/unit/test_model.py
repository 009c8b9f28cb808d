"""Models by name: each layer from (seed, index) alone, cuts by cost, own code only if allowed."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from swarm.errors import ConfigError
from swarm.manifest import Manifest
from swarm.model.digest import weights_sha256
from swarm.model.registry import build_layer, model_spec, stage_layers
from swarm.model.spec import LayerSpec, ModelSpec, TensorSpec, Tie
from swarm.model.stage import StageModel

TINY = {"d_model": 16, "layers": 2, "heads": 2, "sequence": 8}
TOKENS = torch.zeros((1, 8), dtype=torch.uint8)
DIGITS = "tests.digits_model:mlp"


@pytest.fixture(autouse=True)
def _own_models_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def manifest_of(**tables: object) -> Manifest:
    return Manifest.from_tree({"model": TINY, **tables})


def own(function: str, **tables: object) -> Manifest:
    return Manifest.from_tree({"model": {"kind": f"tests.digits_model:{function}"}, **tables})


def test_stages_built_alone_equal_the_slices_of_the_whole() -> None:
    whole_manifest = manifest_of()
    whole = StageModel(whole_manifest, model_spec(whole_manifest), 0).tensors()
    cut_manifest = manifest_of(stages={"count": 3})
    alone: dict[str, torch.Tensor] = {}
    for stage in (2, 0, 1):
        alone |= StageModel(cut_manifest, model_spec(cut_manifest), stage).tensors()
    assert alone.keys() == whole.keys()
    assert weights_sha256(alone) == weights_sha256(whole)


def test_initial_weights_ignore_every_global_random_source() -> None:
    manifest = manifest_of()
    hashes = set()
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        hashes.add(weights_sha256(StageModel(manifest, model_spec(manifest), 0).tensors()))
    assert len(hashes) == 1


def test_building_leaves_the_global_random_source_as_it_was() -> None:
    manifest = manifest_of()
    before = torch.get_rng_state()
    StageModel(manifest, model_spec(manifest), 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_and_seeds_differ() -> None:
    manifest = manifest_of()
    spec = model_spec(manifest)
    first, second = (build_layer(manifest, spec, i).up.weight for i in (1, 2))
    other = build_layer(manifest.changed({"seed": 1}), spec, 1).up.weight
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_cuts_by_cost_count_embedding_and_head() -> None:
    manifest = Manifest.from_tree({"stages": {"count": 3}})
    assert stage_layers(manifest, model_spec(manifest)) == [range(0, 3), range(3, 5), range(5, 8)]
    manifest = Manifest.from_tree({"stages": {"cuts": [1, 2]}})
    assert stage_layers(manifest, model_spec(manifest)) == [range(0, 1), range(1, 2), range(2, 8)]


def test_a_large_head_is_counted() -> None:
    manifest = Manifest.from_tree({"model": {"vocabulary": 8192}, "stages": {"count": 2}})
    assert stage_layers(manifest, model_spec(manifest))[1] == range(6, 8)


def test_position_sees_no_later_token() -> None:
    manifest = manifest_of()
    stage = StageModel(manifest, model_spec(manifest), 0)
    tokens = torch.arange(8, dtype=torch.uint8).view(1, 8)
    changed = tokens.clone()
    changed[0, 5:] += 100
    one, other = (stage.forward(t)[0] for t in (tokens, changed))
    torch.testing.assert_close(one[0, :5], other[0, :5])
    assert not torch.allclose(one[0, 5:], other[0, 5:])


def test_a_fresh_model_knows_nothing() -> None:
    manifest = manifest_of(batch={"microbatch": 4, "microbatches": 1})
    stage = StageModel(manifest, model_spec(manifest), 0)
    tokens = torch.randint(0, 256, (4, 8), generator=torch.Generator().manual_seed(0))
    loss, _ = stage.forward_loss(tokens.byte(), tokens.roll(1, 1).byte())
    assert loss == pytest.approx(np.log(256), abs=0.1)


def test_a_tied_head_shares_the_embedding() -> None:
    manifest = Manifest.from_tree({"model": {**TINY, "tied": True}})
    stage = StageModel(manifest, model_spec(manifest), 0)
    names = stage.tensors()
    assert "layers.0.tokens.weight" in names
    assert "layers.3.logits.weight" not in names
    head, embedding = stage.forward(TOKENS)[0], names["layers.0.tokens.weight"]
    # Token 1 is not in the input, so its row is the head's alone.
    embedding[1].mul_(2.0)
    torch.testing.assert_close(stage.forward(TOKENS)[0][..., 1], 2 * head[..., 1])


def test_own_code_runs_only_when_allowed() -> None:
    with pytest.raises(ConfigError, match=f"--allow-model {DIGITS}"):
        model_spec(own("mlp"), allow=["tests.digits_model:other"])
    assert len(model_spec(own("mlp"), allow=[DIGITS]).layers) == 3


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("not_there", "AttributeError"),
        ("broken", "RuntimeError: two lines"),
        ("not_a_model", "returns a ModelSpec"),
    ],
)
def test_own_code_that_fails_is_said_in_one_line(function: str, why: str) -> None:
    manifest = own(function)
    with pytest.raises(ConfigError, match=why) as caught:
        model_spec(manifest, allow=[manifest.model.kind])
    assert "\n" not in str(caught.value)


def test_a_module_that_is_not_there() -> None:
    manifest = Manifest.from_tree({"model": {"kind": "no.such.module:f"}})
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        model_spec(manifest, allow=["no.such.module:f"])


@pytest.mark.parametrize(
    ("stages", "field"), [({"count": 4}, "stages.count"), ({"cuts": [1, 3]}, "stages.cuts")]
)
def test_cuts_beyond_an_own_model(stages: dict[str, object], field: str) -> None:
    manifest = own("mlp", stages=stages)
    with pytest.raises(ConfigError, match=field):
        stage_layers(manifest, model_spec(manifest, allow=[DIGITS]))


def test_a_tensor_spec_knows_its_size() -> None:
    assert TensorSpec((128, 16)).nbytes(4) == 4 * 128 * 16 * 4
    assert TensorSpec((128,), "uint8").batch_shape(3) == (3, 128)
    with pytest.raises(ValueError, match="no torch dtype"):
        TensorSpec((), "nn").torch_dtype  # noqa: B018


def layered(*dtypes: str, **fields: object) -> ModelSpec:
    layers = tuple(LayerSpec("x", nn.Identity, TensorSpec((4,), d), 1.0) for d in dtypes)
    spec = ModelSpec(TensorSpec((4,)), TensorSpec((4,)), layers, loss=lambda a, b: a.sum())
    return dataclasses.replace(spec, **fields)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (layered(), "a ModelSpec with layers"),
        (layered("float32", loss_terms=0), "loss_terms of 1 or more"),
        (layered("no_dtype"), "'no_dtype' is no torch dtype"),
        (
            layered(layers=(LayerSpec("x", nn.Identity, TensorSpec(()), -1.0),)),
            "costs are 0 or more",
        ),
        (
            layered(layers=(LayerSpec("x", nn.Identity, TensorSpec(()), math.nan),)),
            "costs are 0 or more",
        ),
    ],
)
def test_specs_that_cannot_be_used_are_refused(
    spec: ModelSpec, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import digits_model

    # The same function is fine as long as it returns a usable model.
    monkeypatch.setattr(digits_model, "mlp", lambda: layered("float32"))
    model_spec(own("mlp"), allow=[DIGITS])
    monkeypatch.setattr(digits_model, "mlp", lambda: spec)
    with pytest.raises(ConfigError, match=why):
        model_spec(own("mlp"), allow=[DIGITS])


def test_stages_meet_where_tensors_are_float32() -> None:
    manifest = own("mlp", stages={"count": 2})
    assert len(stage_layers(manifest, layered("float32", "int64"))) == 2
    with pytest.raises(ConfigError, match="int64 after layer 0"):
        stage_layers(manifest, layered("int64", "float32"))


def test_a_tie_across_a_cut_is_refused() -> None:
    tied = LayerSpec("x", nn.Identity, TensorSpec((4,)), 1.0, (Tie("weight", 0, "weight"),))
    spec = layered(layers=(layered("float32").layers[0], tied))
    assert stage_layers(own("mlp"), spec) == [range(0, 2)]
    with pytest.raises(ConfigError, match="layer 1 tied to layer 0"):
        stage_layers(own("mlp", stages={"count": 2}), spec)
