"""What the live view shows: a run at one moment, as numbers and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica in one line."""

    name: str
    """A short peer id."""
    state: str
    """ready, announced, applying, joining or draining; any other word is shown in red."""
    mark_step: int
    share: float
    """Its part (0 to 1) of what these replicas of the stage have counted so far in this run."""
    mean_time_s: float | None
    """Mean compute time of a microbatch."""
    queue: int
    note: str = ""
    """What is wrong with it, in plain words; empty when all is well."""
    last_work_s_ago: float | None = None
    peer: str = ""
    """The whole peer id."""
    address: str = ""
    """Where it is reached, without what all addresses have in common."""
    samples_per_s: float | None = None
    """What it does when it never waits."""


@dataclass(frozen=True, slots=True)
class StageView:
    stage: int
    replicas: tuple[ReplicaView, ...]
    lost: tuple[str, ...] = ()
    """Names of those that have not answered for long."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment."""

    name: str
    run_id: str
    step: int
    """Steps done."""
    steps: int
    loss: float | None
    losses: Sequence[float]
    """Recent losses, oldest first."""
    samples_per_s: float
    started_s_ago: float
    phase: str
    stages: tuple[StageView, ...]
    events: Sequence[str] = ()
    """Recent events, newest last."""
    warnings: Sequence[str] = ()
    """What is wrong now."""
