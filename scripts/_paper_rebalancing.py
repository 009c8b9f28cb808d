"""Table 2: the throughput that rebalancing keeps up while machines are preempted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from scripts._paper_layers import LAYERS, MEGABIT
from scripts._paper_view import Curve, Table, draw, percent
from scripts._paper_work import run_all
from swarm.sim.fluid import simulate_fluid
from swarm.sim.population import replay
from swarm.sim.traces import Trace, read_trace
from swarm.sim.world import Machine, Outcome, Rebalancing, Sample, StageWork, World

HOUR_S = 3600.0
HOURS = 32
"""How long the paper's log is; of longer traces the beginning is played."""
STAGES = 4
T4_TFLOPS = 15.0
LINK = 200 * MEGABIT
STAGE_PARAMETERS = 12 * 4096**2
"""Of blocks that share their weights."""
STATE_BYTES = 12 * STAGE_PARAMETERS
"""Weights and two moments, 32 bits each."""
MICROBATCHES = 1024
"""A step: some nine for each peer, as in the paper's large run."""

PAPER = {
    "none": (0.827, 0.990, 0.454),
    "300 s": (0.958, 0.994, 0.889),
    "60 s": (0.976, 0.998, 0.917),
}
"""Overall, first hour, last hour."""

ON, OFF, AGAIN = 12, 1 / (5 * HOUR_S), 1 / (0.5 * HOUR_S)
"""Of a made-up trace: machines, how often one is preempted, how soon another comes in its place
(per second)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """``by_lot``: newcomers go anywhere; else to the stage that the rule names."""

    name: str
    rule: Rebalancing
    period_s: float = 60.0
    by_lot: bool = False


POLICIES = (
    Policy("none, newcomers by lot", Rebalancing.NONE, by_lot=True),
    Policy("none, newcomers choose", Rebalancing.NONE),
    Policy("paper's rule, 300 s", Rebalancing.PAPER, 300.0),
    Policy("paper's rule, 60 s", Rebalancing.PAPER, 60.0),
    Policy("ours, 300 s", Rebalancing.OURS, 300.0),
    Policy("ours, 60 s", Rebalancing.OURS, 60.0),
)
BESIDE = {
    "none, newcomers by lot": "none",
    "paper's rule, 300 s": "300 s",
    "paper's rule, 60 s": "60 s",
}
"""Which of the paper's rows a policy is beside."""


@dataclass(frozen=True, slots=True)
class Task:
    """``killed``: who is preempted has no time to hand over what it counted in the step."""

    trace: Trace
    policy: Policy
    peers: int
    hours: float
    seed: int
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """Shares of the optimum, moves, and (seconds, share) for the picture."""

    overall: float
    first_hour: float
    last_hour: float
    moves: int
    curve: Curve


Results = dict[tuple[str, str, bool], list[Kept]]
"""By trace, policy, and whether who is preempted is killed; one for each seed."""


def world_of(task: Task) -> World:
    rng = random.Random(f"{task.trace.name} {task.seed}")
    duration_s = min(task.trace.end_s, task.hours * HOUR_S)
    layer = LAYERS[-1]
    stage = StageWork(
        forward_tflop=layer.forward_tflop,
        backward_tflop=layer.backward_tflop,
        output_bytes=layer.boundary_bytes,
        gradient_bytes=layer.boundary_bytes,
        state_bytes=STATE_BYTES,
    )
    machines = [
        Machine(
            peer=f"peer-{n:05d}",
            tflops=T4_TFLOPS,
            up_bytes_per_s=LINK,
            down_bytes_per_s=LINK,
            arrives_s=span.arrives_s,
            leaves_s=span.leaves_s,
            drains=not task.killed,
            stage=rng.randrange(STAGES) if task.policy.by_lot and span.arrives_s else None,
        )
        for n, span in enumerate(replay(task.trace, task.peers, rng, until_s=duration_s))
    ]
    return World(
        stages=(stage,) * STAGES,
        machines=tuple(machines),
        duration_s=duration_s,
        seed=task.seed,
        microbatches=MICROBATCHES,
        rebalancing=task.policy.rule,
        rebalance_s=task.policy.period_s,
    )


def measure(task: Task) -> Kept:
    return kept(simulate_fluid(world_of(task)))


def kept(outcome: Outcome) -> Kept:
    samples = outcome.samples
    end = samples[-1].at_s
    return Kept(
        overall=share(samples),
        first_hour=share([s for s in samples if s.at_s <= HOUR_S]),
        last_hour=share([s for s in samples if s.at_s > end - HOUR_S]),
        moves=len(outcome.moves),
        curve=curve_of(samples),
    )


def curve_of(samples: Sequence[Sample], together: int = 10) -> Curve:
    """Hours, and the share over ``together`` samples each; where nobody was there, nothing."""
    groups = [samples[i : i + together] for i in range(0, len(samples), together)]
    drawn = [group for group in groups if any(s.optimum for s in group)]
    return [group[-1].at_s / HOUR_S for group in drawn], [share(group) for group in drawn]


def share(samples: Sequence[Sample]) -> float:
    """Of what the best assignment would have done; 1 where nothing could be done."""
    best = sum(s.optimum for s in samples)
    return sum(s.throughput for s in samples) / best if best else 1.0


def made_up(seed: int, hours: float = HOURS) -> Trace:
    """Preemptions for want of a trace: ``ON`` machines, each on and off for exponential times."""
    rng = random.Random(seed)
    alive, now = ON, 0.0
    rows = [(now, alive)]
    while now < hours * HOUR_S:
        off, again = alive * OFF, (ON - alive) * AGAIN
        now += rng.expovariate(off + again)
        alive += -1 if rng.random() < off / (off + again) else 1
        rows.append((now, alive))
    times, counts = zip(*rows, strict=True)
    return Trace("made up", times, counts, hours * HOUR_S)


def traces_in(folder: Path | None) -> list[Trace]:
    """Those of ``folder``, T4 first; a made-up one if it is not there."""
    if folder is None or not folder.is_dir():
        return [made_up(0)]
    paths = [p for p in sorted(folder.iterdir()) if p.suffix in (".csv", ".json")]
    found = [read_trace(path) for path in paths]
    return sorted(found, key=lambda t: "g4dn" not in t.name) or [made_up(0)]


def rebalancing(
    folder: Path | None,
    *,
    peers: int,
    seeds: int,
    hours: float,
    workers: int,
    console: Console,
    pictures: Path | None,
) -> list[Table]:
    traces = traces_in(folder)
    tasks = [
        Task(trace, policy, peers, hours, seed, killed)
        for trace in traces
        for killed in ((False, True) if trace is traces[0] else (False,))
        for policy in POLICIES
        for seed in range(seeds)
    ]
    found = run_all("rebalancing", tasks, measure, workers=workers, console=console)
    results: Results = {}
    for task, result in zip(tasks, found, strict=True):
        key = (task.trace.name, task.policy.name, task.killed)
        results.setdefault(key, []).append(result)
    table = Table(
        "2. Rebalancing: share of the best assignment's throughput",
        ("who moves", "overall", "first hour", "last hour", "moves", "if killed", "the paper's"),
        notes=_notes(peers, seeds),
    )
    for number, trace in enumerate(traces):
        _add_rows(table, trace, results, hours)
        if pictures is not None:
            table.pictures.append(_picture(pictures, number, trace, results))
    return [table]


def _add_rows(table: Table, trace: Trace, results: Results, hours: float) -> None:
    played = min(trace.end_s / HOUR_S, hours)
    first = not table.rows
    name = trace.name if len(trace.name) <= 36 else f"{trace.name[:35]}…"
    table.rows.append((f"{name}, {played:.0f} h", *[""] * 6))
    figures: dict[str, Any] = {"hours": played}
    for policy in POLICIES:
        runs = results[trace.name, policy.name, False]
        killed = results.get((trace.name, policy.name, True))
        row: dict[str, Any] = {
            "overall": fmean(r.overall for r in runs),
            "first_hour": fmean(r.first_hour for r in runs),
            "last_hour": fmean(r.last_hour for r in runs),
            "moves": fmean(r.moves for r in runs),
            "overall_if_killed": fmean(r.overall for r in killed) if killed else None,
        }
        quoted = PAPER.get(BESIDE.get(policy.name, "")) if first else None
        cells = [percent(row[k]) for k in ("overall", "first_hour", "last_hour")]
        cells.append(f"{row['moves']:.0f}")
        cells.append(percent(row["overall_if_killed"]) if killed else "")
        cells.append(" / ".join(f"{100 * part:.1f}" for part in quoted) if quoted else "")
        table.rows.append((f"  {policy.name}", *cells))
        figures[policy.name] = {**row, "paper": quoted}
    table.rows.append(("",) * len(table.columns))
    table.figures[trace.name] = figures


def _notes(peers: int, seeds: int) -> list[str]:
    return [
        f"Mean of {seeds} seeds (who is preempted, who comes). The trace scaled to {peers} peers "
        "at its peak.",
        f"{STAGES} stages of 16 shared blocks; T4 peers of {T4_TFLOPS:.0f} TFLOP/s; each move "
        f"costs the download of {STATE_BYTES / 1e9:.1f} GB at 200 Mb/s.",
        "Newcomers go to the stage that their rule names, but for the first row.",
        "As in the paper, who is preempted hands over what it did in the step; if killed: what it "
        "did is lost, and done again.",
        "The paper's figures, overall / first hour / last hour in %, are for a 32 h log of its "
        "own.",
    ]


def _picture(folder: Path, number: int, trace: Trace, results: Results) -> Path:
    shown = ("none, newcomers by lot", "paper's rule, 60 s", "ours, 60 s")
    curves = {name: results[trace.name, name, False][0].curve for name in shown}
    path = folder / f"rebalancing-{number + 1}.png"
    y = "share of the best assignment"
    draw(path, "Rebalancing (seed 0)", {trace.name: curves}, x="hours", y=y, top=1.05)
    return path
