"""The scalars of one optimizer step: learning rate, clip scale, bias corrections, skip.

They are computed once, by whoever decides the step, and sent along: the floating-point functions
of two hosts need not agree, so no replica computes them for itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """What of the manifest's ``[optimizer]`` is needed here."""

    @property
    def kind(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def min_lr_ratio(self) -> float: ...
    @property
    def clip(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step, but for the gradient. ``scale`` multiplies the gradient.

    ``bias1`` and ``bias2`` are Adam's ``1 - beta**n``. With ``skip`` nothing changes.
    """

    lr: float
    scale: float
    bias1: float
    bias2: float
    skip: bool


def learning_rate(optimizer: Schedule, t: int) -> float:
    """The learning rate of step ``t`` (from 0): linear warm-up, then constant or cosine.

    The first step has ``lr / warmup_steps``, the step ``warmup_steps - 1`` has ``lr``. From step
    ``total_steps`` on it is ``lr * min_lr_ratio``.
    """
    warmup, total = optimizer.warmup_steps, optimizer.total_steps
    if t < warmup:
        return optimizer.lr * (t + 1) / warmup
    if total == 0:
        return optimizer.lr
    progress = min(1.0, (t - warmup) / (total - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optimizer.lr * (optimizer.min_lr_ratio + (1.0 - optimizer.min_lr_ratio) * cosine)


def global_norm(squared_norms: Sequence[float]) -> float:
    """The gradient norm over all stages; NaN if any of their squared norms is not a number >= 0."""
    if not all(math.isfinite(value) and value >= 0 for value in squared_norms):
        return math.nan
    try:
        return math.sqrt(math.fsum(squared_norms))
    except OverflowError:
        return math.nan


def make_update(
    optimizer: Schedule, t: int, applied: int, squared_norms: Sequence[float], finite: bool
) -> Update:
    """The update of step ``t``, given the stages' ``squared_norms``.

    ``applied`` counts the steps before this one that were not skipped: bias corrections follow
    it. The step is skipped if ``finite`` is false or the global norm is not finite.
    """
    norm = global_norm(squared_norms)
    skip = not (finite and math.isfinite(norm))
    clips = optimizer.clip > 0 and not skip
    scale = min(1.0, optimizer.clip / (norm + 1e-6)) if clips else 1.0
    adam = optimizer.kind == "adamw"
    bias1, bias2 = (1.0 - beta ** (applied + 1) if adam else 1.0 for beta in optimizer.betas)
    return Update(learning_rate(optimizer, t), scale, bias1, bias2, skip)
