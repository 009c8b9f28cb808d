"""What is simulated, resolved to numbers, and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from swarm.types import PeerId


class Rebalancing(StrEnum):
    """Who decides on moves: ``swarm.core.rebalancing``, the paper's algorithm 2, or nobody."""

    OURS = "ours"
    PAPER = "paper"
    NONE = "none"


class WiringRule(StrEnum):
    """How a replica is chosen for each hop. All but OURS are there to compare with."""

    OURS = "ours"
    PAPER = "paper"
    UNIFORM = "uniform"
    LEAST_LOADED = "least-loaded"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class StageWork:
    """One stage. Work is in TFLOP for one *microbatch*, sizes in bytes.

    ``output_bytes``: the activation that goes on to the next stage; ``gradient_bytes``: what goes
    back to the previous one; ``vector_bytes``: the gradient that replicas sum; ``state_bytes``:
    what a joiner downloads; ``memory_bytes``: what a replica needs.
    """

    forward_tflop: float
    backward_tflop: float
    output_bytes: int
    gradient_bytes: int
    vector_bytes: int = 0
    state_bytes: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """One peer. ``tflops``: what it computes per second. Rates in bytes per second.

    It is there from ``arrives_s`` until ``leaves_s``; it goes as by SIGKILL unless ``drains``.
    ``stage``: where it begins; None: it chooses by the rule that a newcomer chooses with.
    """

    peer: PeerId
    tflops: float
    memory_bytes: int | None = None
    up_bytes_per_s: float = inf
    down_bytes_per_s: float = inf
    region: str = "here"
    arrives_s: float = 0.0
    leaves_s: float = inf
    drains: bool = False
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class Latency:
    """One-way delay in seconds between regions; ``default_s`` where the table says nothing."""

    default_s: float = 0.0
    between: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def one_way_s(self, a: str, b: str) -> float:
        return self.between.get((a, b), self.between.get((b, a), self.default_s))


@dataclass(frozen=True, slots=True)
class World:
    """A scenario as numbers: the same in microbatch mode and in fluid mode.

    ``microbatches`` of ``microbatch`` samples make a step. ``announce_s``: how old a record of the
    directory is, at most. ``relayed``: every activation goes through the trainer (as in the
    published prototype), whose link is ``trainer_bytes_per_s`` each way, in ``trainer_region``.
    ``window``: microbatches in flight at most; 0: as the real trainer sizes it. ``silence_s``:
    after that a peer that is gone is found out. ``queue``, ``contexts``: forwards that may wait at
    a replica, and microbatches whose backward it may await. ``attempt_s``: floor of an attempt's
    time limit; 0: 10 s, or what a microbatch takes through all stages when nothing waits, if that
    is more.
    """

    stages: tuple[StageWork, ...]
    machines: tuple[Machine, ...]
    duration_s: float
    seed: int = 0
    microbatches: int = 256
    microbatch: int = 1
    latency: Latency = Latency()
    rebalancing: Rebalancing = Rebalancing.OURS
    rebalance_s: float = 60.0
    gain: float = 0.05
    wiring: WiringRule = WiringRule.OURS
    announce_s: float = 5.0
    silence_s: float = 5.0
    window: int = 0
    relayed: bool = False
    trainer_region: str = "here"
    trainer_bytes_per_s: float = inf
    sample_every_s: float = 60.0
    name: str = "simulated"
    queue: int = 16
    contexts: int = 64
    attempt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The swarm over one stretch of ``sample_every_s`` that ends at ``at_s``.

    ``throughput`` and ``optimum`` in samples per second: what was done, and what the best
    assignment of the peers that were there would have done.
    """

    at_s: float
    throughput: float
    optimum: float
    peers: tuple[int, ...]
    """Replicas of each stage that serve, at the end of the stretch."""
    resent: int = 0
    """Microbatches that were sent again in it."""


def share_of_optimum(samples: Iterable[Sample]) -> float | None:
    """Work done by what the best assignment would have done; None if that is nothing."""
    samples = list(samples)
    best = sum(s.optimum for s in samples)
    return sum(s.throughput for s in samples) / best if best else None


@dataclass(frozen=True, slots=True)
class Moved:
    """A peer went from one stage to another. ``done_s``: when it served there; inf: never."""

    at_s: float
    peer: PeerId
    source: int
    target: int
    reason: str
    done_s: float = inf


@dataclass(slots=True)
class Outcome:
    """What came of a simulated run. Bytes by peer; times in virtual seconds."""

    world: World
    mode: str
    samples: list[Sample] = field(default_factory=list)
    moves: list[Moved] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """When each step ended (microbatch mode)."""
    done: float = 0.0
    """Samples that were trained on, counted once."""
    resent: int = 0
    sent_bytes: dict[PeerId, float] = field(default_factory=dict)
    received_bytes: dict[PeerId, float] = field(default_factory=dict)
    events: int = 0
    """What the clock of the microbatch mode went through."""
    decisions: list[str] = field(default_factory=list)
    """What was decided, a line each, if asked for."""

    @property
    def share_of_optimum(self) -> float:
        """Over the whole run; 1 if there was nothing to do."""
        share = share_of_optimum(self.samples)
        return 1.0 if share is None else share
