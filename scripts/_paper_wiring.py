"""Table 3: rules of wiring, in a swarm of unequal peers across ten regions, with churn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console

from scripts._paper_flow import best_flow, shares, transitions
from scripts._paper_layers import LAYERS, Layer, compute_s
from scripts._paper_regions import (
    Churn,
    latencies,
    one_way_s,
    peers,
    place_of,
    present,
    with_churn,
)
from scripts._paper_view import Table, draw, spread
from scripts._paper_work import run_all
from swarm.sim.engine import simulate
from swarm.sim.wirings import Share
from swarm.sim.world import Machine, Outcome, Rebalancing, WiringRule, World
from swarm.types import PeerId, Replica

PEERS, STAGES = 18, 3
LAYER: Layer = LAYERS[-1]
MICROBATCHES = 256
STEPS = 6
"""To be measured, after a first one in which nobody is known yet."""
SLACK, SLACK_OF_CHURN = 1.35, 8.0
"""So much longer than it would take if nobody ever waited, and so much more for churn: what the
dead held is done again. Who is slower does fewer steps in that time."""
CHURN = (0.0, 0.1, 0.2)

RULES = {
    WiringRule.OURS: "ours",
    WiringRule.PAPER: "paper's (algorithm 1)",
    WiringRule.UNIFORM: "uniform random",
    WiringRule.LEAST_LOADED: "least loaded, old news",
    WiringRule.STATIC: "best fixed shares",
}

STRETCH = 1.5
"""A step with churn takes about so much longer: in that time the given share dies."""


@dataclass(frozen=True, slots=True)
class Task:
    rule: WiringRule
    share: float
    seed: int
    microbatches: int
    steps: int


@dataclass(frozen=True, slots=True)
class Measured:
    """``bound``: samples per second that the stages can do, by those who are there."""

    samples_per_s: float
    step_s: float
    resent: float
    bound: float


def rate(machine: Machine, stage: int) -> float:
    """Microbatches per second that ``machine`` can do at ``stage``: by compute, or by its link."""
    transfers = (stage > 0) + (stage < STAGES - 1)
    link_s = transfers * LAYER.boundary_bytes / machine.up_bytes_per_s
    return 1 / max(compute_s(LAYER, machine.tflops), link_s)


def slowest(machines: Sequence[Machine]) -> float:
    """Microbatches per second of the slowest stage."""
    return min(sum(rate(m, s) for m in machines if m.stage == s) for s in range(STAGES))


def bound(machines: Sequence[Machine], from_s: float, until_s: float) -> float:
    """``slowest``, on average over time, of those that are there."""
    changes = {t for m in machines for t in (m.arrives_s, m.leaves_s) if from_s < t < until_s}
    times = [from_s, *sorted(changes), until_s]
    done = sum((b - a) * slowest(present(machines, a)) for a, b in pairwise(times))
    return done / (until_s - from_s)


def world_of(task: Task) -> World:
    """The same peers, and the same deaths, for all rules of one seed and share."""
    rng = random.Random(f"wiring {task.seed}")
    first = peers(PEERS, STAGES, rng)
    step_s = task.microbatches / slowest(first)
    duration_s = (task.steps + 1) * step_s * (SLACK + SLACK_OF_CHURN * task.share)
    machines = with_churn(first, Churn(task.share, step_s * STRETCH), duration_s, rng)
    return World(
        stages=(LAYER.work(),) * STAGES,
        machines=tuple(machines),
        duration_s=duration_s,
        seed=task.seed,
        microbatches=task.microbatches,
        latency=latencies(),
        rebalancing=Rebalancing.NONE,
        wiring=task.rule,
        trainer_region="Virginia",
    )


def fixed_shares(machines: Sequence[Machine]) -> Share:
    """The min-cost flow among those that are there at the start; later ones take their places."""
    first = {m.peer: m for m in present(machines, 0.0)}
    stages = [
        {m.peer: rate(m, stage) for m in first.values() if m.stage == stage}
        for stage in range(STAGES)
    ]

    def seconds(a: PeerId, b: PeerId) -> float:
        """There and back."""
        one, other = first[a], first[b]
        link = min(one.up_bytes_per_s, other.down_bytes_per_s)
        return 2 * (one_way_s(one.region, other.region) + LAYER.boundary_bytes / link)

    flow = best_flow(stages, seconds)
    parts, onward = shares(stages, flow), transitions(flow)

    def share(stage: int, before: Replica | None, candidate: Replica) -> float:
        ways = onward.get(place_of(before.peer)) if before is not None and stage else None
        return (ways or parts[stage]).get(place_of(candidate.peer), 0.0)

    return share


def measure(task: Task) -> Measured:
    world = world_of(task)
    fixed = fixed_shares(world.machines) if task.rule is WiringRule.STATIC else None
    return measured(simulate(world, share=fixed))


def measured(outcome: Outcome) -> Measured:
    """Of all steps but the first; of all the time if there are no others."""
    world, steps = outcome.world, outcome.steps
    begin_s, end_s = (steps[0], steps[-1]) if len(steps) > 1 else (0.0, world.duration_s)
    done = len(steps) - 1 if len(steps) > 1 else len(steps)
    return Measured(
        samples_per_s=done * world.microbatches * world.microbatch / (end_s - begin_s),
        step_s=(end_s - begin_s) / max(1, done),
        resent=outcome.resent / max(1, len(steps)),
        bound=bound(world.machines, begin_s, end_s) * world.microbatch,
    )


def wiring(
    *, seeds: int, quick: bool, workers: int, console: Console, pictures: Path | None
) -> list[Table]:
    steps = 4 if quick else STEPS
    tasks = [
        Task(rule, share, seed, MICROBATCHES, steps)
        for share in CHURN
        for rule in RULES
        for seed in range(seeds)
    ]
    found = run_all("wiring", tasks, measure, workers=workers, console=console)
    cells: dict[tuple[WiringRule, float], list[Measured]] = {}
    for task, result in zip(tasks, found, strict=True):
        cells.setdefault((task.rule, task.share), []).append(result)
    table = _table(cells)
    table.notes = _notes(seeds)
    if pictures is not None:
        table.pictures.append(_picture(pictures, table))
    return [table]


def _table(cells: dict[tuple[WiringRule, float], list[Measured]]) -> Table:
    table = Table(
        f"3. Wiring: {PEERS} peers in 10 regions, {STAGES} stages",
        ("churn per step, rule", "samples/s", "of what stages can do", "s per step", "sent again"),
    )
    for share in CHURN:
        for rule, name in RULES.items():
            runs = cells[rule, share]
            of_bound = [100 * r.samples_per_s / r.bound for r in runs]
            table.rows.append(
                (
                    f"{share:.0%}  {name}",
                    spread([r.samples_per_s for r in runs], 2),
                    spread(of_bound, 1, " %"),
                    spread([r.step_s for r in runs], 0),
                    spread([r.resent for r in runs], 1),
                )
            )
            row = table.figures.setdefault(f"{share:.0%}", {})
            row[rule.value] = {
                "samples_per_s": _mean_and_spread([r.samples_per_s for r in runs]),
                "percent_of_bound": _mean_and_spread(of_bound),
                "step_s": _mean_and_spread([r.step_s for r in runs]),
                "resent_per_step": _mean_and_spread([r.resent for r in runs]),
            }
        table.rows.append(("",) * len(table.columns))
    return table


def _mean_and_spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else 0.0}


def _notes(seeds: int) -> list[str]:
    return [
        f"Mean and standard deviation of {seeds} seeds; per seed the same peers and deaths for all "
        "rules. Steps of "
        f"{MICROBATCHES} microbatches, the first left out; averaging is left out.",
        "8 to 32 TFLOP/s and 50 to 500 Mb/s a peer; a dead one is replaced at once, at the same "
        "stage, by one of another speed and region. Exactly once for all rules: what the "
        "dead held is done again.",
        "What stages can do: the slowest stage's rate if none of its peers ever waits. The spread "
        "of samples/s is that between swarms.",
        "Least loaded: fewest microbatches outstanding, as known up to 5 s ago. Best fixed shares: "
        "a min-cost flow for the peers at the start; who comes takes the share of who has died.",
    ]


def _picture(folder: Path, table: Table) -> Path:
    churn = [100 * share for share in CHURN]
    curves = {
        name: (
            churn,
            [table.figures[f"{s:.0%}"][rule.value]["percent_of_bound"]["mean"] for s in CHURN],
        )
        for rule, name in RULES.items()
    }
    path = folder / "wiring.png"
    panels = {"what stages can do = 100": curves}
    draw(path, "Wiring", panels, x="peers that die per step, %", y="% of throughput", top=105)
    return path
