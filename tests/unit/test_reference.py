"""The run in one process: equal to plain torch, bit for bit in reproducible mode, and it learns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from swarm.data import load_batches
from swarm.errors import ConfigError, DataError
from swarm.manifest import Manifest, default_manifest
from swarm.model.digest import weights_sha256
from swarm.model.registry import build_layer, model_spec
from swarm.model.stage import StageModel
from swarm.reference import Reference, StepResult, run_reference

TINY = {"d_model": 16, "layers": 2, "heads": 2, "sequence": 16}
BATCH = {"microbatch": 2, "microbatches": 3}
MODEL, DATA = "tests.digits_model:mlp", "tests.digits_model:digits"


@pytest.fixture(autouse=True)
def _own_models_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(500)))
    return f"text:{path}"


def manifest_of(source: str, **tables: object) -> Manifest:
    return Manifest.from_tree(
        {
            "model": TINY,
            "batch": BATCH,
            "stages": {"count": 3},
            "data": {"source": source, "holdout": 0.1},
            "optimizer": {"lr": 0.01, "warmup_steps": 5, "total_steps": 30, "weight_decay": 0.1},
            **tables,
        }
    )


def run(manifest: Manifest, steps: int, allow: tuple[str, ...] = ()) -> list[StepResult]:
    ticks = itertools.count()
    return run_reference(manifest, steps=steps, clock=lambda: next(ticks), allow=allow).results


def plain_torch_losses(manifest: Manifest, steps: int) -> list[float]:
    """The same training, written as anyone would in plain torch on the whole batch."""
    spec, section = model_spec(manifest), manifest.optimizer
    model = nn.Sequential(*(build_layer(manifest, spec, i) for i in range(len(spec.layers))))
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=section.betas, eps=section.eps, weight_decay=section.weight_decay
    )
    warmup, total, low = section.warmup_steps, section.total_steps, section.min_lr_ratio
    batches, _ = load_batches(
        manifest.data.source,
        expected_sha256="",
        holdout=manifest.data.holdout,
        sequence=manifest.model.sequence,
        microbatch=manifest.batch.microbatch,
        seed=manifest.seed,
    )
    losses = []
    for t in range(steps):
        drawn = [batches.train(t, m) for m in range(manifest.batch.microbatches)]
        x, y = (torch.cat([torch.from_numpy(a) for a in side]) for side in zip(*drawn, strict=True))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.long().flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), section.clip)
        cosine = (1 + math.cos(math.pi * (t - warmup) / (total - warmup))) / 2
        factor = (t + 1) / warmup if t < warmup else low + (1 - low) * cosine
        optimizer.param_groups[0]["lr"] = section.lr * factor
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("stages", [1, 3])
def test_the_losses_are_those_of_plain_torch(source: str, stages: int) -> None:
    manifest = manifest_of(source, stages={"count": stages})
    losses = [result.loss for result in run(manifest, 20)]
    assert losses == pytest.approx(plain_torch_losses(manifest, 20), rel=1e-5)
    assert losses[-1] < losses[0] - 1


def test_results_say_what_happened(source: str) -> None:
    manifest = manifest_of(source, run={"eval_every": 2, "eval_microbatches": 3})
    seen: list[StepResult] = []
    ticks = itertools.count()
    ended = run_reference(manifest, steps=4, clock=lambda: next(ticks), on_step=seen.append)
    assert seen == ended.results
    assert [result.step for result in seen] == [0, 1, 2, 3]
    assert {result.samples for result in seen} == {6}
    assert {result.seconds for result in seen} == {1}
    assert [result.lr for result in seen] == pytest.approx([0.002, 0.004, 0.006, 0.008])
    assert [result.eval_loss is None for result in seen] == [True, False, True, False]
    assert not any(result.skipped for result in seen)
    assert all(result.norm > 0 for result in seen)
    tensors = {name: t for stage in ended.stages for name, t in stage.tensors().items()}
    assert ended.sha256 == weights_sha256(tensors)


def test_evaluation_is_the_mean_over_held_out_microbatches(source: str) -> None:
    manifest = manifest_of(source, run={"eval_every": 1, "eval_microbatches": 5})
    reference = Reference(manifest)
    # A fresh model is close to the uniform one, on any data and however often it is averaged.
    assert reference.evaluate() == pytest.approx(math.log(256), abs=0.2)
    before = weights_sha256(reference.stages[0].tensors())
    assert reference.evaluate() == reference.evaluate()
    assert weights_sha256(reference.stages[0].tensors()) == before


def test_the_data_order_is_the_same_at_every_run_and_hangs_on_the_seed(source: str) -> None:
    one, again = (run(manifest_of(source), 3) for _ in range(2))
    other = run(manifest_of(source, seed=1), 3)
    assert [r.loss for r in one] == [r.loss for r in again]
    assert [r.loss for r in one] != [r.loss for r in other]


def test_lossy_wires_change_the_run_a_little(source: str) -> None:
    exact = run(manifest_of(source), 5)
    for codec in ("bf16", "int8"):
        lossy = run(manifest_of(source, wire={"activations": codec, "gradients": codec}), 5)
        assert [r.loss for r in lossy] != [r.loss for r in exact]
        assert [r.loss for r in lossy] == pytest.approx([r.loss for r in exact], rel=0.02)


def reproducible(source: str) -> Manifest:
    return manifest_of(source, reproducible={"enabled": True})


def test_reproducible_runs_give_the_same_bits(source: str) -> None:
    threads = torch.get_num_threads()
    hashes = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        hashes.add(run_reference(reproducible(source), steps=5, clock=lambda: 0.0).sha256)
    assert len(hashes) == 1
    assert torch.get_num_threads() == threads


def test_reproducible_mode_takes_its_threads_from_the_manifest(source: str) -> None:
    manifest = manifest_of(source, reproducible={"enabled": True, "threads": 3})
    seen: list[int] = []
    run_reference(
        manifest, steps=1, clock=lambda: 0.0, on_step=lambda _: seen.append(torch.get_num_threads())
    )
    assert seen == [3]


def test_reproducible_and_usual_mode_agree(source: str) -> None:
    fixed, usual = run(reproducible(source), 10), run(manifest_of(source), 10)
    assert [r.loss for r in fixed] == pytest.approx([r.loss for r in usual], rel=1e-5)


def spoil(stage: StageModel, ms: set[int]) -> None:
    """Make the gradients that ``stage`` finds for calls number ``ms`` not finite."""
    backward, calls = stage.backward, itertools.count()

    def spoilt(graph, grad_output):  # type: ignore[no-untyped-def]
        result = backward(graph, grad_output)
        if next(calls) in ms:
            stage._gradients[0] = torch.full_like(stage._gradients[0], math.nan)  # type: ignore[arg-type]
        return result

    stage.backward = spoilt  # type: ignore[method-assign]


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(source: str) -> None:
    reference = Reference(manifest_of(source))
    spoil(reference.stages[1], {4})  # microbatch 1 of step 1
    weights = []
    results = []
    for _ in range(3):
        results.append(reference.step(lambda: 0.0))
        weights.append([stage.weights.clone() for stage in reference.stages])
    assert [result.skipped for result in results] == [False, True, False]
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights[1], weights[2], strict=True))
    assert all(math.isfinite(result.loss) for result in results)


class Adding:
    """Two replicas whose gradients are added; remembers what it was told."""

    replicas = 2

    def __init__(self) -> None:
        self.unlike = 0
        self.applied: list[bool] = []

    def sum(self, stage: int, gradients: Sequence[Tensor]) -> Tensor:
        first, second = gradients
        self.unlike += bool(first.any()) and bool(second.any()) and not torch.equal(first, second)
        return first + second

    def decided(self, *, applied: bool) -> None:
        self.applied.append(applied)


def test_replicas_that_add_their_shares_train_as_one_does(source: str) -> None:
    manifest, adding = manifest_of(source), Adding()
    reference = Reference(manifest, averaging=adding)
    results = [reference.step(lambda: 0.0) for _ in range(10)]
    assert [r.loss for r in results if r] == pytest.approx(
        [r.loss for r in run(manifest, 10)], rel=1e-5
    )
    assert adding.unlike == 10 * 3, "in each step and stage, both count microbatches of their own"
    assert adding.applied == [True] * 10


def test_an_averaging_is_told_of_a_skipped_step(source: str) -> None:
    reference = Reference(manifest_of(source), averaging=(adding := Adding()))
    spoil(reference.stages[1], {4})
    skipped = [result.skipped for _ in range(3) if (result := reference.step(lambda: 0.0))]
    assert skipped == [False, True, False]
    assert adding.applied == [True, False, True]


def digits_manifest(**args: object) -> Manifest:
    return Manifest.from_tree(
        {
            "model": {"kind": MODEL, "args": args},
            "stages": {"count": 3},
            "batch": {"microbatch": 16, "microbatches": 4},
            "data": {"source": f"python:{DATA}", "holdout": 0.2},
            "optimizer": {"lr": 0.02},
            "run": {"eval_every": 40, "eval_microbatches": 20},
        }
    )


def mean_of_last(results: list[StepResult], count: int) -> float:
    return sum(result.loss for result in results[-count:]) / count


def test_a_model_that_is_no_text_learns() -> None:
    results = run(digits_manifest(hidden=32), 80, allow=(MODEL, DATA))
    assert results[0].loss == pytest.approx(math.log(10), abs=0.2)
    assert mean_of_last(results, 10) < 0.4
    assert results[-1].eval_loss is not None
    assert results[-1].eval_loss < 1.2


def test_a_frozen_stage_lets_the_others_learn() -> None:
    results = run(digits_manifest(frozen=True), 80, allow=(MODEL, DATA))
    assert mean_of_last(results, 10) < 0.7


def test_own_model_and_own_data_need_leave() -> None:
    with pytest.raises(ConfigError, match="--allow-model"):
        run(digits_manifest(), 1)
    with pytest.raises(DataError, match="--allow-model"):
        run(digits_manifest(), 1, allow=(MODEL,))


def test_another_corpus_than_the_manifest_names_is_refused(source: str) -> None:
    manifest = manifest_of(source)
    with pytest.raises(DataError):
        run(manifest.changed({"data.sha256": "0" * 64}), 1)
    good = run_reference(manifest, steps=1, clock=lambda: 0.0).data_sha256
    assert len(run(manifest.changed({"data.sha256": good}), 1)) == 1


def test_the_default_run_begins_near_the_uniform_loss_and_falls() -> None:
    manifest = default_manifest().changed({"batch.microbatches": 2, "optimizer.warmup_steps": 4})
    losses = [result.loss for result in run(manifest, 12)]
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert losses[-1] < losses[0] - 1
