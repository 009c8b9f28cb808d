"""What the parts of the churn benchmark share: the run, what is asked for, what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts._bench import median

MICROBATCHES, MICROBATCH = 16, 4

MANIFEST = """
name = "churn"
{model}
[stages]
count = {stages}
[batch]
microbatch = {microbatch}
microbatches = {microbatches}
[optimizer]
kind = "adamw"
lr = 0.002
warmup_steps = 20
weight_decay = 0.01
[start]
replicas = 2
[run]
steps = 1000000
eval_every = 0
checkpoint_every = {checkpoint_every}
[periods]
patience_s = {patience_s}
"""


def manifest(
    stages: int,
    *,
    checkpoint_every: int = 0,
    model: str = "",
    batch: tuple[int, int] = (MICROBATCH, MICROBATCHES),
    patience_s: float = 60,
) -> str:
    """TOML; without ``model`` the default GPT of 1.3 million parameters."""
    return MANIFEST.format(
        stages=stages,
        checkpoint_every=checkpoint_every,
        model=model,
        microbatch=batch[0],
        microbatches=batch[1],
        patience_s=patience_s,
    )


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: how often the things that are quick are done; ``patience_s``: see recovery."""

    seconds: float
    period: float
    rounds: int
    patience_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Part:
    """What was measured. ``rows``: label, figure, what it is relative to."""

    title: str
    rows: list[tuple[str, str, str]]
    figures: dict[str, Any]


def spread(values: Sequence[float], unit: str = "s", digits: int = 1) -> str:
    """Median and worst, as text."""
    if not values:
        return "-"
    return f"{median(values):.{digits}f} (worst {max(values):.{digits}f}) {unit}"
