"""Small worlds for the tests of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from swarm.sim.world import Machine, Rebalancing, StageWork, World

ACTIVATION, GRADIENT = 1000, 700
"""Bytes over a boundary: one way, and back."""


def stages(count: int, **changes: Any) -> tuple[StageWork, ...]:
    """Each takes 1 TFLOP forward and 2 backward."""
    given: dict[str, Any] = {
        "forward_tflop": 1.0,
        "backward_tflop": 2.0,
        "output_bytes": ACTIVATION,
        "gradient_bytes": GRADIENT,
    }
    return (StageWork(**(given | changes)),) * count


def machines(
    per_stage: Sequence[int], *, tflops: float = 10.0, leaves_s: dict[str, float] | None = None
) -> tuple[Machine, ...]:
    """``per_stage[s]`` machines named ``s.0``, ``s.1`` ...; ``leaves_s``: who dies, and when."""
    ends = leaves_s or {}
    return tuple(
        Machine(f"{s}.{i}", tflops, stage=s, leaves_s=ends.get(f"{s}.{i}", inf))
        for s, count in enumerate(per_stage)
        for i in range(count)
    )


def world(**changes: Any) -> World:
    """Three stages of one machine each, and nobody moves, if nothing else is said."""
    given: dict[str, Any] = {
        "stages": stages(3),
        "machines": machines([1, 1, 1]),
        "duration_s": 60.0,
        "microbatches": 16,
        "rebalancing": Rebalancing.NONE,
        "sample_every_s": 10.0,
    }
    return World(**(given | changes))
