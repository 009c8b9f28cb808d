"""How fast a swarm is before and after a peer has moved to where others have died."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from scripts._bench import ROOT, Progress
from scripts._churn_kills import compare
from scripts._processes import SERVES, Process, Swarm
from scripts._steps import Step, rate
from swarm.manifest import Manifest
from swarm.model.needs import stage_needs
from swarm.model.registry import model_spec

MANIFEST = """
name = "moves"
model = {{ d_model = 128, layers = 7, heads = 4, sequence = 32 }}
stages = {{ cuts = [4, 6] }}
batch = {{ microbatch = 4, microbatches = 16 }}
optimizer = {{ kind = "adamw", lr = 0.002, warmup_steps = 20 }}
run = {{ steps = 1000000, checkpoint_every = 0 }}
rebalancing = {{ enabled = {enabled}, period_s = {period_s} }}
periods = {{ announce_s = {announce_s}, record_ttl_s = {ttl_s} }}
"""
"""The first of three stages takes 3/7 of all work."""

FULL = (3, 2, 2)
"""Replicas of each stage before any has died."""
HIT, DEAD = 0, 2
"""So many of this stage are killed."""
VECTORS = 3
"""A replica's state: weights, and the two moments of AdamW."""
BYTES = 4

MOVES = re.compile(r"(\w{6}) \(stage (\d)\) moves to stage (\d)")


@dataclass(frozen=True, slots=True)
class Options:
    """``seconds``: of one microbatch, in all stages together. ``steps`` are measured each time."""

    period_s: float
    seconds: float
    steps: int


def manifest(options: Options, *, enabled: bool) -> str:
    """TOML. Announcements come and expire in the same proportion to the period as by default."""
    period_s = options.period_s
    return MANIFEST.format(
        enabled=str(enabled).lower(),
        period_s=period_s,
        announce_s=period_s / 6,
        ttl_s=2 * period_s / 3,
    )


def shares() -> list[float]:
    """Of the work of a microbatch, by stage."""
    parsed = Manifest.from_toml(manifest(Options(30, 1, 1), enabled=True))
    costs = [need.cost for need in stage_needs(parsed, model_spec(parsed, ()))]
    return [cost / sum(costs) for cost in costs]


def best_assignment(peers: int) -> tuple[int, ...]:
    """Replicas of each stage with which so many equal peers are fastest: all are tried."""
    parts = shares()
    possible = (c for c in product(range(1, peers), repeat=len(parts)) if sum(c) == peers)
    return max(possible, key=lambda c: min(n / part for n, part in zip(c, parts, strict=True)))


class Slowed(Swarm):
    """Its nodes wait most of the time: their speeds do not depend on the cores that they share."""

    def __init__(self, name: str, options: Options, *, enabled: bool) -> None:
        script = str(ROOT / "scripts" / "_slowed.py")
        program = (sys.executable, script, str(options.seconds))
        text = manifest(options, enabled=enabled)
        super().__init__(text, Progress(name), program=program)

    def assign(self, counts: Sequence[int]) -> None:
        """So many replicas of each stage serve, and all of them count."""
        self.open(len(counts), 1)
        for stage, wanted in enumerate(counts):
            for _ in range(wanted - 1):
                self.node(stage)
        self.wait(lambda: self.shared() == list(counts), f"{counts} to count")

    def shared(self) -> list[int]:
        """Replicas of each stage that have counted in the last step."""
        return list(self.metrics.steps[-1].figures["replicas"])

    def whole_steps(self, count: int, since: float) -> list[Step]:
        """The first ``count`` steps that began after ``since``."""

        def found() -> list[Step] | None:
            later = [s for s in self.metrics.steps if s.timed and s.began >= since]
            return later[:count] if len(later) >= count else None

        return self.wait(found, f"{count} steps")


@dataclass(frozen=True, slots=True)
class Moved:
    """Who moved, and when it was told to and took up work there, in seconds since the kill."""

    peer: str
    source: int
    reason: str
    granted_s: float
    serving_s: float
    state_bytes: int


def one_move(options: Options) -> dict[str, Any]:
    """Kill two of three replicas of a stage, and let one of another stage take their place."""
    with Slowed("one move", options, enabled=True) as swarm:
        swarm.assign(FULL)
        # A replica rests for two periods after its arrival.
        swarm.rest(3 * options.period_s, "the nodes to have settled")
        before = swarm.whole_steps(options.steps, swarm.metrics.steps[-1].ended)
        if swarm.leader.said("moves to stage"):
            raise RuntimeError(f"a node moved before any was killed:\n{swarm.leader.tail}")
        killed = [swarm.kill(node) for _, node in swarm.serving(HIT)[:DEAD]][-1]
        moved = wait_for_move(swarm, killed)
        serving = killed + moved.serving_s
        after = swarm.whole_steps(options.steps, serving)
        # Whoever moves takes part, where it was, in the step in which it was let go.
        hit = [
            step
            for step in swarm.metrics.steps
            if step.timed and killed <= step.began <= killed + moved.granted_s
        ]
        counts = swarm.shared()
        swarm.leave(swarm.leader)
        swarm.metrics.look()
        apart = compare(swarm, len(swarm.metrics.current))
    return {
        "before": rate(before),
        "killed": rate(hit) if hit else None,
        "after": rate(after),
        "counts": counts,
        "granted_s": moved.granted_s,
        "serving_s": moved.serving_s,
        "state_bytes": moved.state_bytes,
        "reason": moved.reason,
        "loss_apart": apart,
        "steps": [step.figures["seconds"] for step in swarm.metrics.steps],
    }


def wait_for_move(swarm: Swarm, killed: float) -> Moved:
    leader = swarm.leader
    granted = swarm.wait(lambda: leader.said("moves to stage", killed), "a move")
    line = next(text for at, text in leader.lines if at == granted and MOVES.search(text))
    found = MOVES.search(line)
    assert found is not None
    peer, source, target = found.groups()
    (node,) = [n for _, n in swarm.nodes if swarm.peer_id(n.name).endswith(peer)]
    serves = f"{peer} serves stage {target}"
    serving = swarm.wait(lambda: leader.said(serves, granted), f"{peer} to serve stage {target}")
    return Moved(
        peer,
        int(source),
        line.partition(": ")[2],
        granted - killed,
        serving - killed,
        VECTORS * BYTES * parameters(node, int(target)),
    )


def parameters(node: Process, stage: int) -> int:
    """Of its stage, by its own word."""
    words = node.line_with(f"stage {stage}: ").split()
    return int(words[words.index("parameters,") - 1].replace(",", ""))


def best_from_the_start(options: Options, counts: Sequence[int]) -> float:
    """Samples per second of a swarm that was assigned so from its start."""
    with Slowed("the best assignment", options, enabled=False) as swarm:
        swarm.assign(counts)
        swarm.wait(lambda: all(n.said(SERVES) for _, n in swarm.nodes), "all to serve")
        return rate(swarm.whole_steps(options.steps, swarm.metrics.steps[-1].ended))
