"""What ``swarm simulate`` does: reads a scenario, plays it, and shows what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from peers.running import INTERRUPTED
from peers.starting import console, user_errors
from swarm.errors import ConfigError
from swarm.sim.report import (
    HOUR_S,
    between,
    middle,
    share_of_optimum,
    stage_figures,
    to_json,
)
from swarm.sim.scenario import Scenario
from swarm.sim.world import Outcome, World

Simulator = Callable[[World, Callable[[float], None]], Outcome]


def run_simulate_command(
    path: Path | None,
    changes: Mapping[str, object],
    *,
    out: Path | None,
    json_file: Path | None,
) -> None:
    """Play the scenario at ``path`` (None: all defaults) with ``changes`` by dotted path.

    Plots go into the directory ``out``, the outcome as JSON into ``json_file``. Exits with 2 for
    what the user can mend, 130 when interrupted.
    """
    with user_errors():
        scenario = Scenario.load(path, changes) if path else Scenario.from_tree({}, changes)
        world = scenario.world()
        _check_writable(out, json_file)
    try:
        began = time.perf_counter()
        outcome = _play(scenario.mode, world)
        took_s = time.perf_counter() - began
        _show(outcome, took_s)
        _write(outcome, out, json_file)
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        raise SystemExit(INTERRUPTED) from None


def simulator(mode: str) -> Simulator:
    """The simulator that plays ``mode``."""
    if mode == "fluid":
        from swarm.sim.fluid import simulate_fluid

        return lambda world, progress: simulate_fluid(world, progress=progress)
    from swarm.sim.engine import simulate

    return lambda world, progress: simulate(world, progress=progress)


def _play(mode: str, world: World) -> Outcome:
    columns = (TextColumn(f"simulating {mode}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def progress(share: float) -> None:
            bar.update(task, completed=share)

        return simulator(mode)(world, progress)


def _check_writable(out: Path | None, json_file: Path | None) -> None:
    """Found out now, not after a simulation of an hour."""
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                "--out", str(out), f"a directory that can be made ({reason})"
            ) from None
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError("--json", str(json_file), "a file in a directory that exists")


# -- what is shown -----------------------------------------------------------------------------


def _show(outcome: Outcome, took_s: float) -> None:
    console.print(stage_table(outcome))
    for line in summary(outcome):
        console.print(line, soft_wrap=True)
    console.print(f"simulated in {took_s:.1f} s", style="dim")


def stage_table(outcome: Outcome) -> Table:
    """One line for each stage: its work, who served it, and who moved."""
    table = Table(title=f"{outcome.world.name} ({outcome.mode})", title_justify="left")
    table.add_column("stage", justify="right")
    table.add_column("TFLOP/microbatch", justify="right")
    table.add_column("replicas, mean", justify="right")
    table.add_column("least", justify="right")
    table.add_column("most", justify="right")
    table.add_column("came", justify="right")
    table.add_column("went", justify="right")
    for stage, figures in enumerate(stage_figures(outcome)):
        work = outcome.world.stages[stage]
        table.add_row(
            str(stage),
            f"{work.forward_tflop + work.backward_tflop:.3g}",
            f"{figures.mean:.1f}",
            str(figures.least),
            str(figures.most),
            str(figures.came),
            str(figures.went),
        )
    return table


def summary(outcome: Outcome) -> list[str]:
    """The outcome in words, without colours: throughput, shares, moves, bytes."""
    world, samples = outcome.world, outcome.samples
    hours = world.duration_s / HOUR_S
    lines = [
        f"{outcome.done:,.0f} samples in {hours:.3g} h of virtual time, "
        f"{outcome.done / world.duration_s:.4g} per second: "
        f"{_percent(share_of_optimum(samples))} of the best assignment"
    ]
    if samples and samples[-1].at_s >= 2 * HOUR_S:
        end_s = samples[-1].at_s
        first = share_of_optimum(between(samples, 0, HOUR_S))
        last = share_of_optimum(between(samples, end_s - HOUR_S, end_s))
        lines.append(f"first hour {_percent(first)}, last hour {_percent(last)}")
    moves = len(outcome.moves)
    lines.append(
        f"{moves:,} {'move' if moves == 1 else 'moves'}, {outcome.resent:,} microbatches sent "
        f"again; each peer sent {_gigabytes(middle(outcome.sent_bytes))} and received "
        f"{_gigabytes(middle(outcome.received_bytes))} (median of {len(outcome.sent_bytes):,})"
    )
    return lines


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


# -- what is written ---------------------------------------------------------------------------


def _write(outcome: Outcome, out: Path | None, json_file: Path | None) -> None:
    try:
        if json_file is not None:
            json_file.write_text(to_json(outcome), encoding="utf-8")
        if out is not None:
            from peers.simulation_plots import plot_simulation

            for path in plot_simulation(outcome, out):
                console.print(f"plot: {path}", soft_wrap=True, markup=False)
    except OSError as error:
        reason = error.strerror or str(error)
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"error: the outcome cannot be written: {reason}", markup=False
        )
        raise SystemExit(1) from None
