"""Table 1: how much of their time peers compute, by the latency between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from scripts._paper_layers import (
    LATENCIES_MS,
    LAYERS,
    MEGABIT,
    PAPER_UTILISATION,
    PEER_TO_PEER,
    RELAYED,
    Layer,
    compute_s,
    link_s,
    utilisation_limit,
)
from scripts._paper_view import Table, draw, percent
from scripts._paper_work import run_all
from swarm.sim.engine import simulate
from swarm.sim.world import Latency, Machine, Outcome, Rebalancing, World

LINK = 500 * MEGABIT
STAGES = 4
AIM = 0.95
"""Of what bandwidth and compute allow."""

TFLOPS = 20.0
"""What a V100 sustains here. 82.1 % of the time at 500 Mb/s, as the paper has for a GPT-3 layer in
fp16, is possible only below some 22 TFLOP/s."""

MICROBATCHES = {"base": 4096, "xxlarge": 1024, "GPT-3": 1024, "Ours": 1024}
"""A step, one sequence each: at most the paper's global batch. The larger a microbatch is, the
fewer of them make the end of a step short beside the rest."""
STEPS = 2
"""Measured after a first one, in which estimates and window settle."""
RELAYED_IN_FLIGHT = 1
"""Microbatches in flight for each stage. The prototype's trainers make one synchronous call after
the other, and the paper's figures fall with latency as they do with one in flight: the time for a
microbatch is a constant and one latency."""
RELAYED_MICROBATCHES = 64


@dataclass(frozen=True, slots=True)
class Task:
    layer: Layer
    latency_ms: float
    relayed: bool
    tflops: float
    microbatches: int


def world_of(task: Task) -> World:
    """A pipeline of one peer per stage.

    The latency that the paper names may be that of one way or of both. Ours gets the one that is
    worse for it (one way), the relayed pipeline the other.
    """
    one_way_s = task.latency_ms / 1e3 / (2 if task.relayed else 1)
    machines = tuple(
        Machine(
            peer=f"peer-{stage}",
            tflops=task.tflops,
            up_bytes_per_s=LINK,
            down_bytes_per_s=LINK,
            stage=stage,
        )
        for stage in range(STAGES)
    )
    return World(
        stages=(task.layer.work(relayed=task.relayed),) * STAGES,
        machines=machines,
        duration_s=duration_s(task),
        microbatches=task.microbatches,
        latency=Latency(one_way_s),
        rebalancing=Rebalancing.NONE,
        relayed=task.relayed,
        window=RELAYED_IN_FLIGHT * STAGES if task.relayed else 0,
    )


def duration_s(task: Task) -> float:
    """Long enough for one step and ``STEPS`` more, were everything as slow as one by one."""
    work = compute_s(task.layer, task.tflops)
    if task.relayed:
        one = work + 5 * task.layer.boundary_bytes / LINK + 2 * task.latency_ms / 1e3
        return (STEPS + 1.5) * task.microbatches * one
    one = max(work, link_s(task.layer, LINK, PEER_TO_PEER))
    return (STEPS + 1.5) * (task.microbatches * one + 20 * task.latency_ms / 1e3)


def measure(task: Task) -> float:
    """Utilisation, 0 to 1."""
    per_s = steady_throughput(simulate(world_of(task)))
    return per_s * compute_s(task.layer, task.tflops)


def steady_throughput(outcome: Outcome) -> float:
    """Microbatches per second over the steps after the first, ends of steps included.

    Raises:
        ValueError: there are not two steps.
    """
    steps = outcome.steps
    if len(steps) < 2:
        raise ValueError(f"{len(steps)} steps were done, at least 2 are needed to measure")
    return (len(steps) - 1) * outcome.world.microbatches / (steps[-1] - steps[0])


def utilisation(
    *, tflops: float, quick: bool, workers: int, console: Console, pictures: Path | None
) -> list[Table]:
    tasks = [
        Task(layer, ms, relayed, tflops, microbatches_of(layer, relayed, quick))
        for layer in LAYERS
        for ms in LATENCIES_MS
        for relayed in (False, True)
    ]
    found = run_all("utilisation", tasks, measure, workers=workers, console=console)
    by_cell = {
        (task.layer.name, task.latency_ms, task.relayed): share
        for task, share in zip(tasks, found, strict=True)
    }
    table = Table(
        "1. Utilisation at 500 Mb/s by latency",
        ("stage", *(f"{ms} ms" for ms in LATENCIES_MS), "limit"),
    )
    for layer in LAYERS:
        ours = [by_cell[layer.name, ms, False] for ms in LATENCIES_MS]
        relayed = [by_cell[layer.name, ms, True] for ms in LATENCIES_MS]
        _add_rows(table, layer, ours, relayed, tflops)
    table.notes = _notes(table, tflops)
    if pictures is not None:
        table.pictures.append(_picture(pictures, table))
    return [table]


def microbatches_of(layer: Layer, relayed: bool, quick: bool) -> int:
    if relayed:
        return RELAYED_MICROBATCHES
    return MICROBATCHES[layer.name] // (4 if quick else 1)


def _add_rows(
    table: Table, layer: Layer, ours: Sequence[float], relayed: Sequence[float], tflops: float
) -> None:
    limit = utilisation_limit(layer, tflops, LINK)
    relayed_limit = utilisation_limit(layer, tflops, LINK, RELAYED)
    paper = PAPER_UTILISATION[layer.name]
    of_limit = [share / limit for share in ours]
    table.rows += [
        (f"{layer.name}: ours", *map(percent, ours), percent(limit)),
        ("  share of the limit", *(_against_aim(share) for share in of_limit), ""),
        ("  relayed by the trainer", *map(percent, relayed), percent(relayed_limit)),
        ("  the paper's figures", *map(percent, paper), ""),
        ("",) * len(table.columns),
    ]
    table.figures[layer.name] = {
        "latency_ms": list(LATENCIES_MS),
        "ours": list(ours),
        "limit": limit,
        "share_of_limit": of_limit,
        "relayed": list(relayed),
        "relayed_limit": relayed_limit,
        "paper": list(paper),
    }


def _against_aim(share: float) -> str:
    return percent(share) if share >= AIM else f"[red]{percent(share)}[/red]"


def _notes(table: Table, tflops: float) -> list[str]:
    least = min(min(row["share_of_limit"]) for row in table.figures.values())
    return [
        f"{STAGES} stages, one peer each, {tflops:g} TFLOP/s sustained; the backward pass "
        "recomputes the forward; fp16 between stages, 8 bits for Ours.",
        "Limit: what compute and a full-duplex link of 500 Mb/s allow a middle stage, with all "
        "latency hidden.",
        "Ours: a step of 4096 (base) or 1024 microbatches, its end included; the trainer's own "
        "window; latency one way. Relayed: one microbatch in flight per stage; latency both ways.",
        f"Least share of the limit: {percent(least)} (aim: {percent(AIM)}).",
    ]


def _picture(folder: Path, table: Table) -> Path:
    panels = {
        name: {
            "ours": (row["latency_ms"], row["ours"]),
            "relayed": (row["latency_ms"], row["relayed"]),
            "the paper's*": (row["latency_ms"], row["paper"]),
            "limit*": (row["latency_ms"], [row["limit"]] * len(row["latency_ms"])),
        }
        for name, row in table.figures.items()
    }
    path = folder / "utilisation.png"
    draw(path, "Utilisation at 500 Mb/s", panels, x="latency, ms", y="share of time", top=1.05)
    return path
