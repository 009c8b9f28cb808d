"""An outcome in figures: what the table shows, and the document that ``--json`` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from swarm.sim.world import Outcome, Sample, share_of_optimum

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class StageFigures:
    """``mean``, ``least``, ``most`` replicas that served; moves that came and went."""

    mean: float
    least: int
    most: int
    came: int
    went: int


def between(samples: Iterable[Sample], start_s: float, end_s: float) -> list[Sample]:
    """Those whose stretch ends after ``start_s``, and not after ``end_s``."""
    return [s for s in samples if start_s < s.at_s <= end_s + 1e-9]


def stage_figures(outcome: Outcome) -> list[StageFigures]:
    found = []
    for stage in range(len(outcome.world.stages)):
        counts = [s.peers[stage] for s in outcome.samples] or [0]
        came = sum(move.target == stage for move in outcome.moves)
        went = sum(move.source == stage for move in outcome.moves)
        found.append(StageFigures(fmean(counts), min(counts), max(counts), came, went))
    return found


def middle(values: Mapping[str, float]) -> float:
    """The median, 0 of nothing."""
    return median(values.values()) if values else 0.0


def as_tree(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain dicts, lists and finite numbers (null for infinity)."""
    world, samples = outcome.world, outcome.samples
    end_s = samples[-1].at_s if samples else 0.0
    return {
        "name": world.name,
        "mode": outcome.mode,
        "seed": world.seed,
        "duration_s": world.duration_s,
        "stages": len(world.stages),
        "machines": len(world.machines),
        "rebalancing": {
            "rule": world.rebalancing.value,
            "period_s": world.rebalance_s,
            "gain": world.gain,
        },
        "samples_done": outcome.done,
        "samples_per_s": outcome.done / world.duration_s,
        "share_of_optimum": {
            "overall": share_of_optimum(samples),
            "first_hour": share_of_optimum(between(samples, 0, HOUR_S)),
            "last_hour": share_of_optimum(between(samples, end_s - HOUR_S, end_s)),
        },
        "step_ends_s": outcome.steps,
        "resent": outcome.resent,
        "timeline": [
            {
                "at_s": s.at_s,
                "samples_per_s": s.throughput,
                "optimum": s.optimum,
                "peers": list(s.peers),
                "resent": s.resent,
            }
            for s in samples
        ],
        "moves": [
            {
                "at_s": move.at_s,
                "peer": move.peer,
                "from": move.source,
                "to": move.target,
                "reason": move.reason,
                "done_s": _finite(move.done_s),
            }
            for move in outcome.moves
        ],
        "bytes": {
            "sent": dict(sorted(outcome.sent_bytes.items())),
            "received": dict(sorted(outcome.received_bytes.items())),
        },
    }


def to_json(outcome: Outcome) -> str:
    """One JSON document; the same for the same outcome, byte for byte."""
    return json.dumps(as_tree(outcome), sort_keys=True, indent=1, allow_nan=False) + "\n"


def points(samples: Sequence[Sample]) -> tuple[list[float], list[float], list[float]]:
    """Hours, throughput and optimum, each stretch at its end."""
    return (
        [s.at_s / HOUR_S for s in samples],
        [s.throughput for s in samples],
        [s.optimum for s in samples],
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
