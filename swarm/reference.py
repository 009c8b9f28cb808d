"""The same run in one process, with the same arithmetic: the oracle of the tests.

Every stage model in turn, the wire's codecs at each boundary, each microbatch's gradient computed
by itself and added in the order of ``m``. What replicas of a stage do to a sum is left to an
``Averaging``; without one a stage has one replica.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from swarm.codecs import get_codec, roundtrip
from swarm.core.update import global_norm, make_update
from swarm.data import load_batches
from swarm.manifest import Manifest
from swarm.model.digest import weights_sha256
from swarm.model.registry import model_spec
from swarm.model.stage import StageModel


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step. ``loss`` is the batch's mean before the update; ``norm`` unclipped."""

    step: int
    loss: float
    samples: int
    seconds: float
    """Of this step, evaluation left out."""
    lr: float
    norm: float
    skipped: bool
    eval_loss: float | None = None
    """Mean over the held-out microbatches, after the update; None: not evaluated."""


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceRun:
    """What a run ends with: its stages, the SHA-256 of all weights, and of the data."""

    stages: list[StageModel]
    sha256: str
    data_sha256: str
    results: list[StepResult]


class Averaging(Protocol):
    """How ``replicas`` replicas of each stage sum their gradients. Microbatch ``m`` counts at
    replica ``m % replicas``.
    """

    replicas: int

    def sum(self, stage: int, gradients: Sequence[Tensor]) -> Tensor:
        """What all replicas of ``stage`` hold after the round.

        ``gradients``: each replica's, flat, of one length and dtype; they stay as they are.
        The sum may be overwritten by the next call for this stage.
        """
        ...

    def decided(self, *, applied: bool) -> None:
        """The step of the last sums was applied, or skipped."""
        ...


def run_reference(
    manifest: Manifest,
    *,
    steps: int,
    clock: Callable[[], float],
    allow: Collection[str] = (),
    on_step: Callable[[StepResult], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> ReferenceRun:
    """Train ``steps`` steps in this process. ``clock`` gives seconds, from any origin.

    ``stop`` is asked before each microbatch; once it says yes, the step under way is given up.

    Raises:
        ConfigError, DataError: the model or the data of the manifest cannot be had here.
    """
    with reproducible_threads(manifest):
        run = Reference(manifest, allow)
        results = []
        for _ in range(steps):
            result = run.step(clock, stop)
            if result is None:
                break
            results.append(result)
            if on_step:
                on_step(result)
        tensors = {name: t for stage in run.stages for name, t in stage.tensors().items()}
        return ReferenceRun(run.stages, weights_sha256(tensors), run.data_sha256, results)


class Reference:
    """The state of a run in one process; ``step`` takes it one step further."""

    def __init__(
        self,
        manifest: Manifest,
        allow: Collection[str] = (),
        averaging: Averaging | None = None,
    ) -> None:
        spec = model_spec(manifest, allow)
        self._manifest = manifest
        self._batches, self.data_sha256 = load_batches(
            manifest.data.source,
            expected_sha256=manifest.data.sha256,
            holdout=manifest.data.holdout,
            sequence=manifest.model.sequence,
            microbatch=manifest.batch.microbatch,
            seed=manifest.seed,
            allow=allow,
        )
        self._activations = get_codec(manifest.wire.activations)
        self._gradients = get_codec(manifest.wire.gradients)
        self.stages = [StageModel(manifest, spec, i) for i in range(manifest.stages.count)]
        self._averaging = averaging
        count = averaging.replicas if averaging else 1
        # The first replica's accumulators are the stage's own.
        self._held = [
            [stage.accumulators, *(torch.zeros_like(stage.accumulators) for _ in range(count - 1))]
            for stage in self.stages
        ]
        """Accumulators by stage and replica."""
        self._t = 0
        self._applied = 0

    def step(
        self, clock: Callable[[], float], stop: Callable[[], bool] = lambda: False
    ) -> StepResult | None:
        """All microbatches of the next step, and the update; None if it was stopped."""
        began = clock()
        manifest, t = self._manifest, self._t
        batch = manifest.batch
        parts, finite = [], True
        for m in range(batch.microbatches):
            if stop():
                return None
            self._use_accumulators(m)
            part, all_finite = self._microbatch(*self._batches.train(t, m))
            parts.append(part)
            finite = finite and all_finite
        totals = [self._total(index) for index in range(len(self.stages))]
        norms = [s.squared_norm(total) for s, total in zip(self.stages, totals, strict=True)]
        squared = [value for value, _ in norms]
        finite = finite and all(stage_finite for _, stage_finite in norms)
        update = make_update(manifest.optimizer, t, self._applied, squared, finite)
        for stage, total, held in zip(self.stages, totals, self._held, strict=True):
            stage.apply(None if update.skip else total, update)
            for accumulators in held:
                accumulators.zero_()
        if self._averaging:
            self._averaging.decided(applied=not update.skip)
        self._t += 1
        self._applied += not update.skip
        seconds = clock() - began
        every = manifest.run.eval_every
        return StepResult(
            step=t,
            loss=summed_loss(parts),
            samples=batch.microbatches * batch.microbatch,
            seconds=seconds,
            lr=update.lr,
            norm=global_norm(squared),
            skipped=update.skip,
            eval_loss=self.evaluate() if every and self._is_due(every) else None,
        )

    def _use_accumulators(self, m: int) -> None:
        """Those of the replica where ``m`` counts."""
        for stage, held in zip(self.stages, self._held, strict=True):
            stage.swap_accumulators(held[m % len(held)])

    def _total(self, stage: int) -> Tensor:
        held = self._held[stage]
        return held[0] if self._averaging is None else self._averaging.sum(stage, held)

    def _is_due(self, every: int) -> bool:
        return self._t % every == 0 or self._t == self._manifest.run.steps

    def evaluate(self) -> float:
        """Mean loss over the manifest's number of held-out microbatches."""
        count = self._manifest.run.eval_microbatches
        parts = []
        for index in range(count):
            inputs, targets = map(torch.from_numpy, self._batches.evaluation(index))
            for stage in self.stages[:-1]:  # the newest weights, with delayed updates too
                inputs = roundtrip(self._activations, stage.forward(inputs)[0])
            parts.append(self.stages[-1].forward_loss(inputs, targets)[0])
        # A part is a share of a whole step's mean loss.
        return summed_loss(parts) * self._manifest.batch.microbatches / count

    def _microbatch(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[float, bool]:
        """Forward and backward through all stages: part of the loss, whether all is finite.

        A stage whose gradient is not finite counts nothing.
        """
        x, graphs = torch.from_numpy(inputs), []
        older = self._manifest.step.delays(self._t)
        for stage in self.stages[:-1]:
            x, graph = stage.forward(x, older=older)
            graphs.append(graph)
            x = roundtrip(self._activations, x)
        loss, graph = self.stages[-1].forward_loss(x, torch.from_numpy(targets), older=older)
        graphs.append(graph)
        gradient: Tensor | None = None
        finite = True
        for stage, graph in zip(reversed(self.stages), reversed(graphs), strict=True):
            gradient = stage.backward(graph, gradient)
            if stage.gradient_finite():
                stage.accumulate()
            else:
                finite = False
            if gradient is not None:
                gradient = roundtrip(self._gradients, gradient)
        return loss, finite


def summed_loss(parts: list[float]) -> float:
    """The mean loss of a step from its microbatches' parts: their sum. NaN if any is not finite."""
    return math.fsum(parts) if all(map(math.isfinite, parts)) else math.nan


@contextlib.contextmanager
def reproducible_threads(manifest: Manifest) -> Iterator[None]:
    """In reproducible mode, give torch the manifest's number of threads for a while."""
    before = torch.get_num_threads()
    if manifest.reproducible.enabled:
        torch.set_num_threads(manifest.reproducible.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
