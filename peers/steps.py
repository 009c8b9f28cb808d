"""What came of a step: for metrics, the view and the run's account."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

from swarm.core.step import Decision
from swarm.manifest_sections import Batch


@dataclass(frozen=True, slots=True)
class StepDone:
    """One finished step, for metrics and the view. Times in seconds."""

    step: int
    loss: float
    samples: int
    seconds: float
    lr: float
    norm: float
    skipped: bool
    resent: int
    counts: tuple[dict[str, int], ...]
    phases: dict[str, float]
    """Sums over all passes: seconds of compute, encode, link and queue, and bytes sent on;
    ``close_s`` is the part of the step after the last microbatch had counted."""
    eval_loss: float | None = None


@dataclass(slots=True)
class Heard:
    """What the trainer last heard of a replica, for the view."""

    last_work: float | None = None
    queued: int = 0
    compute_s: float | None = None
    counted: int = 0


def told_of(decision: Decision, batch: Batch) -> StepDone:
    """A step that another trainer has decided. How long it took is not known."""
    return StepDone(
        step=decision.mark.t,
        loss=decision.loss,
        samples=batch.microbatches * batch.microbatch,
        seconds=nan,
        lr=decision.update.lr,
        norm=decision.norm,
        skipped=decision.update.skip,
        resent=0,
        counts=tuple(dict(counts) for counts in decision.counts),
        phases={},
    )
