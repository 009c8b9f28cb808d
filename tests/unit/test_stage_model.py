"""A stage's tensors: gradients alone and summed, what may be counted, what an update changes."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from swarm.core.update import Update, make_update
from swarm.errors import BadMessage, ConfigError
from swarm.manifest import Manifest
from swarm.model.digest import weights_sha256
from swarm.model.norm import exact_squared_norm, squared_norm, squares_of, squares_together
from swarm.model.optimizer import PIECE
from swarm.model.registry import model_spec
from swarm.model.spec import LayerSpec, ModelSpec, TensorSpec
from swarm.model.stage import StageModel

TINY = {"d_model": 16, "layers": 2, "heads": 2, "sequence": 8}
BATCH = {"microbatch": 3, "microbatches": 4}
UPDATE = Update(lr=0.01, scale=0.5, bias1=0.1, bias2=0.05, skip=False)
SKIP = Update(lr=0.01, scale=1.0, bias1=0.1, bias2=0.05, skip=True)


def manifest_of(**tables: object) -> Manifest:
    return Manifest.from_tree({"model": TINY, "batch": BATCH, **tables})


def stages_of(manifest: Manifest) -> list[StageModel]:
    spec = model_spec(manifest)
    return [StageModel(manifest, spec, i) for i in range(manifest.stages.count)]


def microbatch(m: int) -> tuple[Tensor, Tensor]:
    tokens = np.random.Generator(np.random.Philox(m)).integers(0, 256, (3, 9), dtype=np.uint8)
    return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())


def count(stages: list[StageModel], ms: list[int]) -> float:
    """Count microbatches ``ms`` in all stages; their part of the loss."""
    total = 0.0
    for m in ms:
        x, targets = microbatch(m)
        graphs = []
        for stage in stages[:-1]:
            x, graph = stage.forward(x)
            graphs.append(graph)
        loss, graph = stages[-1].forward_loss(x, targets)
        graphs.append(graph)
        total += loss
        gradient = None
        for stage, made in zip(reversed(stages), reversed(graphs), strict=True):
            gradient = stage.backward(made, gradient)
            assert stage.gradient_finite()
            stage.accumulate()
        assert gradient is None
    return total


def all_tensors(stages: list[StageModel]) -> dict[str, Tensor]:
    return {name: t.clone() for stage in stages for name, t in stage.tensors().items()}


def linear_spec(build: object, outputs: int = 4) -> ModelSpec:
    """A one-layer model of 4 inputs, squared error."""
    return ModelSpec(
        input=TensorSpec((4,)),
        target=TensorSpec((4,)),
        layers=(LayerSpec("only", build, TensorSpec((outputs,)), 1.0),),  # type: ignore[arg-type]
        loss=lambda outputs, targets: ((outputs - targets) ** 2).sum(),
    )


def test_parts_of_the_loss_add_up_to_the_mean_over_the_batch() -> None:
    stages = stages_of(manifest_of(stages={"count": 3}))
    whole = stages_of(manifest_of())[0]
    inputs, targets = (torch.cat(side) for side in zip(*map(microbatch, range(4)), strict=True))
    logits, _ = whole.forward(inputs)
    mean = F.cross_entropy(logits.flatten(0, 1), targets.long().flatten())
    assert count(stages, [0, 1, 2, 3]) == pytest.approx(float(mean), rel=1e-6)


def test_accumulators_hold_the_gradient_of_the_mean_loss_over_the_batch() -> None:
    stages = stages_of(manifest_of(stages={"count": 2}))
    count(stages, [0, 1, 2, 3])
    whole = stages_of(manifest_of())[0]
    inputs, targets = (torch.cat(side) for side in zip(*map(microbatch, range(4)), strict=True))
    _, graph = whole.forward_loss(inputs, targets)
    whole.backward(graph, None)
    whole.accumulate()
    split = sum(stage.squared_norm(stage.accumulators)[0] for stage in stages)
    assert split == pytest.approx(whole.squared_norm(whole.accumulators)[0], rel=1e-5)
    assert float(whole.accumulators.abs().max()) > 0


def test_every_parameter_gets_a_gradient() -> None:
    stage = stages_of(manifest_of())[0]
    count([stage], [0])
    for view in stage._now.flat.views(stage.accumulators):
        assert float(view.abs().max()) > 0


def test_parameters_are_aligned_views_and_the_gaps_stay_zero() -> None:
    manifest = manifest_of(model={**TINY, "d_model": 6, "sequence": 8})
    stages = stages_of(manifest)
    stage = stages[0]
    own = torch.ones(stage.length, dtype=torch.bool)
    for tensor in stage.tensors().values():
        offset = (tensor.data_ptr() - stage.weights.data_ptr()) // 4
        assert tensor.data_ptr() % 64 == 0
        own[offset : offset + tensor.numel()] = False
    assert bool(own.any())
    count(stages, [0])
    before = stage.weights.clone()
    stage.apply(stage.accumulators, UPDATE)
    assert not torch.equal(stage.weights, before)
    for vector in (stage.accumulators, *stage.state().values()):
        assert float(vector[own].abs().max()) == 0.0
        assert not bool(vector[own].isnan().any())


def test_recomputing_a_forward_gives_the_same_bits() -> None:
    stage = stages_of(manifest_of())[0]
    inputs, _ = microbatch(0)
    with torch.no_grad():
        one = stage.forward(inputs)[0]
    assert torch.equal(one, stage.forward(inputs)[0])
    assert not one.requires_grad
    assert one.is_contiguous()


def test_inputs_that_are_not_aligned_give_the_same_bits() -> None:
    first, second = stages_of(manifest_of(stages={"count": 2}))
    x, _ = first.forward(microbatch(0)[0])
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    assert shifted.data_ptr() % 64
    assert torch.equal(second.forward(shifted)[0], second.forward(x)[0])


def test_a_backward_that_is_not_counted_leaves_no_trace() -> None:
    stage = stages_of(manifest_of())[0]
    stage.backward(stage.forward_loss(*microbatch(0))[1], None)
    count([stage], [1])
    other = stages_of(manifest_of())[0]
    count([other], [1])
    assert torch.equal(stage.accumulators, other.accumulators)


def test_a_gradient_is_added_once() -> None:
    stage = stages_of(manifest_of())[0]
    with pytest.raises(ValueError, match="call backward first"):
        stage.accumulate()
    count([stage], [0])
    with pytest.raises(ValueError, match="call backward first"):
        stage.accumulate()


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_found(poison: float, reproducible: bool) -> None:
    manifest = manifest_of(stages={"count": 2}, reproducible={"enabled": reproducible})
    first, _ = stages_of(manifest)
    output, graph = first.forward(microbatch(0)[0])
    gradient = torch.zeros_like(output)
    gradient[0, 0, 0] = poison
    first.backward(graph, gradient)
    assert not first.gradient_finite()


def test_large_finite_gradients_that_overflow_a_plain_sum_are_finite() -> None:
    def build() -> nn.Module:
        return nn.Linear(4, 4, bias=False)

    manifest = manifest_of()
    stage = StageModel(manifest, linear_spec(build), 0)
    inputs = torch.full((1, 4), 3e38)
    output, graph = stage.forward(inputs)
    stage.backward(graph, torch.ones_like(output))
    assert stage.gradient_finite()


def test_reproducible_mode_bounds_a_gradient_so_that_the_sum_cannot_overflow() -> None:
    def build() -> nn.Module:
        return nn.Linear(4, 4, bias=False)

    scale = 2**20
    manifest = manifest_of(reproducible={"enabled": True, "scale": scale})
    stage = StageModel(manifest, linear_spec(build), 0)
    bound = 2.0**62 / (4 * scale)
    for factor, fits in ((1.0, True), (1.001, False)):
        output, graph = stage.forward(torch.full((1, 4), bound * factor))
        stage.backward(graph, torch.ones_like(output))
        assert stage.gradient_finite() is fits
    output, graph = stage.forward(torch.full((1, 4), bound))
    stage.backward(graph, torch.ones_like(output))
    stage.accumulate()
    assert int(stage.accumulators.max()) == 2**60


def test_the_fixed_point_sum_is_the_rounded_gradient() -> None:
    scale = 2**30
    fixed = stages_of(manifest_of(reproducible={"enabled": True, "scale": scale}))[0]
    plain = stages_of(manifest_of())[0]
    count([fixed], [0])
    count([plain], [0])
    expected = torch.round(plain.accumulators.double() * scale).to(torch.int64)
    assert fixed.accumulators.dtype == torch.int64
    assert torch.equal(fixed.accumulators, expected)


def test_fixed_point_sums_do_not_depend_on_order_or_replicas() -> None:
    manifest = manifest_of(reproducible={"enabled": True})
    one, a, b = (stages_of(manifest)[0] for _ in range(3))
    count([one], [0, 1, 2, 3])
    count([a], [2, 0])
    count([b], [3, 1])
    total = a.accumulators + b.accumulators
    assert torch.equal(one.accumulators, total)
    for stage in (one, a, b):
        update = make_update(manifest.optimizer, 0, 0, [stage.squared_norm(total)[0]], True)
        stage.apply(total, update)
    assert len({weights_sha256(stage.tensors()) for stage in (one, a, b)}) == 1


@pytest.mark.parametrize("reproducible", [False, True])
def test_applying_leaves_the_sum_as_it_is(reproducible: bool) -> None:
    stage = stages_of(manifest_of(reproducible={"enabled": reproducible}))[0]
    count([stage], [0])
    before = stage.accumulators.clone()
    stage.squared_norm(stage.accumulators)
    stage.apply(stage.accumulators, UPDATE)
    assert torch.equal(stage.accumulators, before)
    stage.clear_accumulators()
    assert not bool(stage.accumulators.any())


def test_a_skipped_update_changes_nothing() -> None:
    stage = stages_of(manifest_of())[0]
    count([stage], [0])
    before = weights_sha256(stage.tensors() | stage.state())
    stage.apply(stage.accumulators, SKIP)
    assert weights_sha256(stage.tensors() | stage.state()) == before
    stage.apply(stage.accumulators, UPDATE)
    assert weights_sha256(stage.tensors() | stage.state()) != before


def test_the_scale_of_an_update_multiplies_the_gradient() -> None:
    manifest = manifest_of(optimizer={"kind": "sgd", "lr": 1.0})
    stage = stages_of(manifest)[0]
    count([stage], [0])
    before = stage.weights.clone()
    stage.apply(stage.accumulators, Update(lr=0.5, scale=0.25, bias1=1, bias2=1, skip=False))
    torch.testing.assert_close(before - stage.weights, stage.accumulators * 0.125)


def test_the_norm_is_the_same_as_of_plain_torch() -> None:
    for enabled in (False, True):
        stage = stages_of(manifest_of(reproducible={"enabled": enabled}))[0]
        count([stage], [0, 1])
        plain = stage.accumulators.double() / (2.0**40 if enabled else 1.0)
        value, finite = stage.squared_norm(stage.accumulators)
        assert finite
        assert value == pytest.approx(float((plain**2).sum()), rel=1e-6)


def test_a_sum_that_is_not_finite_has_no_norm() -> None:
    stage = stages_of(manifest_of())[0]
    stage.accumulators[3] = math.nan
    value, finite = stage.squared_norm(stage.accumulators)
    assert not finite
    assert math.isnan(value)


def test_the_exact_norm_is_exact_and_ignores_order() -> None:
    rng = np.random.Generator(np.random.Philox(5))
    numbers = rng.standard_normal(5000).astype(np.float32)
    numbers *= 2.0 ** rng.integers(-70, 60, 5000).astype(np.float32)
    numbers[:4] = [0.0, 1e-45, -3.4e38, 2.0**-149]
    exact = float(sum(Fraction(float(x)) ** 2 for x in numbers))
    for order in (numbers, numbers[::-1].copy(), np.sort(numbers)):
        vector = torch.from_numpy(order)
        assert exact_squared_norm([vector[:1234], vector[1234:]]) == exact
    assert exact_squared_norm([]) == 0.0
    assert squared_norm([torch.from_numpy(numbers)]) == pytest.approx(exact, rel=1e-9)


def numbers_of(exponent: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(3 * PIECE // 2, generator=generator) * 2.0**exponent


@pytest.mark.parametrize("exponent", [-120, -75, -60, -10, 0, 40, 60, 75, 110])
def test_the_norm_is_good_however_large_or_small_the_numbers_are(exponent: int) -> None:
    """In float32 their squares overflow, or lose all that they are, at both ends."""
    numbers = numbers_of(exponent)
    wanted = float(numbers.double().square().sum())
    assert squared_norm([numbers]) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, -1])
def test_a_norm_is_not_finite_if_any_number_is_not(value: float, place: int) -> None:
    numbers = numbers_of(0)
    numbers[place] = value
    assert math.isnan(squares_together([squares_of(numbers, None)]))


@pytest.mark.parametrize("scale", [None, 1.0])
def test_squares_of_parts_come_together_as_those_of_the_whole(scale: float | None) -> None:
    numbers = numbers_of(10).round()
    sums = numbers if scale is None else numbers.to(torch.int64)
    cuts = [slice(0, PIECE), slice(PIECE, None)]
    parts = [squares_of(sums[cut], scale) for cut in cuts]
    whole = squares_together([squares_of(sums, scale)])
    assert squares_together(parts) == squares_together(parts[::-1]) == whole
    plain = squared_norm if scale is None else exact_squared_norm
    assert plain([numbers[cut] for cut in cuts]) == whole


def frozen_build() -> nn.Module:
    layer = nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 4, bias=False), nn.BatchNorm1d(4).eval())
    layer[0].requires_grad_(False)
    layer[2].requires_grad_(False)
    return layer


def test_frozen_parameters_stay_outside_the_vector() -> None:
    stage = StageModel(manifest_of(), linear_spec(frozen_build), 0)
    assert stage.length == 160
    names = stage.tensors()
    assert {"layers.0.0.weight", "layers.0.1.weight", "layers.0.2.running_mean"} <= names.keys()
    frozen = {name: t.clone() for name, t in names.items() if name != "layers.0.1.weight"}
    x = torch.ones(3, 4)
    stage.backward(stage.forward_loss(x, x)[1], None)
    stage.accumulate()
    before = stage.weights.clone()
    stage.apply(stage.accumulators, UPDATE)
    assert not torch.equal(stage.weights, before)
    for name, tensor in frozen.items():
        assert torch.equal(stage.tensors()[name], tensor)


def test_a_stage_without_trainable_parameters_passes_gradients_on() -> None:
    def build() -> nn.Module:
        return nn.Linear(4, 4).requires_grad_(False)

    one = linear_spec(build)
    spec = ModelSpec(one.input, one.target, one.layers * 3, one.loss)
    manifest = manifest_of(stages={"count": 3})
    first, middle, last = (StageModel(manifest, spec, i) for i in range(3))
    x, g0 = first.forward(torch.ones(3, 4))
    y, g1 = middle.forward(x)
    _, g2 = last.forward_loss(y, torch.ones(3, 4))
    gradient = middle.backward(g1, last.backward(g2, None))
    assert gradient is not None
    assert float(gradient.abs().max()) > 0
    assert first.backward(g0, gradient) is None
    assert first.gradient_finite()
    first.accumulate()
    assert first.squared_norm(first.accumulators) == (0.0, True)
    first.apply(first.accumulators, UPDATE)


def test_weights_that_are_not_float32_are_refused() -> None:
    def build() -> nn.Module:
        return nn.Linear(4, 4).double()

    with pytest.raises(ConfigError, match=r"torch\.float64 in layers\.0\.weight"):
        StageModel(manifest_of(), linear_spec(build), 0)


def test_an_output_of_another_shape_than_its_spec_is_refused() -> None:
    stage = StageModel(manifest_of(), linear_spec(lambda: nn.Linear(4, 5)), 0)
    with pytest.raises(ConfigError, match=r"\(5,\) a sample from layer 0"):
        stage.forward(torch.ones(1, 4))


def test_tensors_survive_a_file(tmp_path: Path) -> None:
    stages = stages_of(manifest_of(stages={"count": 2}))
    before = all_tensors(stages)
    for index, stage in enumerate(stages):
        safetensors.torch.save_file(stage.tensors(), tmp_path / f"{index}.safetensors")
    count(stages, [0])
    for stage in stages:
        stage.apply(stage.accumulators, UPDATE)
    assert weights_sha256(all_tensors(stages)) != weights_sha256(before)
    for index, stage in enumerate(stages):
        stage.load_tensors(safetensors.torch.load_file(tmp_path / f"{index}.safetensors"))
    assert weights_sha256(all_tensors(stages)) == weights_sha256(before)


def test_tensors_that_do_not_fit_are_refused_whole() -> None:
    stage = stages_of(manifest_of())[0]
    good = {name: t + 1 for name, t in stage.tensors().items()}
    before = weights_sha256(stage.tensors())
    name = max(good)
    for bad, why in (
        ({k: v for k, v in good.items() if k != name}, "is missing"),
        (good | {"x": torch.ones(1)}, "not known"),
        (good | {name: good[name][:1]}, "is torch.float32"),
        (good | {name: good[name].double()}, "is torch.float64"),
    ):
        with pytest.raises(BadMessage, match=why):
            stage.load_tensors(bad)
    assert weights_sha256(stage.tensors()) == before


def test_the_hash_depends_on_name_dtype_shape_and_bits() -> None:
    one = torch.tensor([1.0, 2.0])
    variants = [
        {"a": one},
        {"b": one},
        {"a": one.view(1, 2)},
        {"a": one.view(torch.int32)},
        {"a": one.nextafter(torch.tensor(9.0))},
        {"a": one, "b": one},
        {},
    ]
    assert len({weights_sha256(variant) for variant in variants}) == len(variants)
    both = {"a": one, "b": one * 2}
    assert weights_sha256(both) == weights_sha256(dict(reversed(both.items())))
