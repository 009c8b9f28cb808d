"""The command line of the chaos harness; ``scripts/chaos.py`` starts it."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.chaos.chaos import run
from tests.chaos.rules import RULES, switched_off
from tests.chaos.schedule import Schedule, draw
from tests.chaos.shrink import Smaller, alike, shrink, whole

AT_ONCE = 16
"""Seeds that a process is given at a time."""

console = Console(highlight=False)
Found = dict[str, Any]


def prepare() -> None:
    """Each process: quiet logs, one thread."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)


def one(job: tuple[int, tuple[str, ...]]) -> Found:
    """Run a seed as it was drawn."""
    seed, rules_off = job
    with switched_off(rules_off):
        outcome = run(draw(seed))
    return {"seed": seed, "problems": list(outcome.problems), "digest": outcome.digest}


def outcomes(seeds: range, rules_off: tuple[str, ...], jobs: int) -> Generator[Found, None, None]:
    """As they come."""
    work = ((seed, rules_off) for seed in seeds)
    if jobs == 1:
        prepare()
        yield from map(one, work)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=_start, initargs=(os.getpid(),)) as pool:
        yield from pool.imap_unordered(one, work, chunksize=min(AT_ONCE, 1 + len(seeds) // jobs))


def _start(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    prepare()


def _end_with(parent: int) -> None:
    """One that computes would not notice that its parent was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def sweep(seeds: range, rules_off: tuple[str, ...], jobs: int) -> tuple[list[Found], int]:
    """Run all ``seeds``, or until Ctrl-C: what failed, and how many ran."""
    failed: list[Found] = []
    done, began = 0, time.monotonic()
    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:.1f} seeds/s, {task.fields[failed]} failed"),
        TimeRemainingColumn(),
        console=console,
    )
    with bar, closing(outcomes(seeds, rules_off, jobs)) as found:
        task = bar.add_task("", total=len(seeds), speed=0.0, failed=0)
        try:
            for outcome in found:
                done += 1
                if outcome["problems"]:
                    failed.append(outcome)
                    console.print(f"seed {outcome['seed']}: {'; '.join(outcome['problems'])[:300]}")
                speed = done / (time.monotonic() - began)
                bar.update(task, advance=1, speed=speed, failed=len(failed))
        except KeyboardInterrupt:
            console.print("stopped")
    seconds = time.monotonic() - began
    console.print(
        f"{done} seeds in {seconds:.0f} s ({done / seconds:.1f} seeds/s), {len(failed)} failed"
    )
    return failed, done


def show(schedule: Schedule, rules_off: tuple[str, ...]) -> Found:
    """Run one schedule and tell all about it."""
    with switched_off(rules_off):
        outcome = run(schedule)
    console.print(str(outcome.schedule))
    console.print("what befell:", *outcome.befell, sep="\n  ")
    console.print("what happened:", *outcome.events[-60:], sep="\n  ")
    console.print(
        f"{outcome.messages} messages, {outcome.seconds:.1f} s, digest {outcome.digest[:16]}"
    )
    console.print(*(outcome.problems or ["nothing wrong"]), sep="\n")
    return {
        "seed": schedule.seed,
        "problems": list(outcome.problems),
        "digest": outcome.digest,
    }


def shrunk(seed: int, rules_off: tuple[str, ...]) -> str:
    """The command that runs the smallest schedule found that fails like ``seed`` does."""
    with switched_off(rules_off):
        like = alike(run(whole(seed).schedule))
        small = shrink(whole(seed), lambda schedule: like(run(schedule)))
    console.print(str(small.schedule))
    return small.command(rules_off)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="how many seeds to run")] = 200,
    start: Annotated[int, typer.Option(min=0, help="the first seed")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="processes; 0: one for each core")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="run this seed alone")] = None,
    keep: Annotated[str, typer.Option(help="only these faults of --seed, e.g. 0,4, or none")] = "",
    replicas: Annotated[int | None, typer.Option(min=1, help="for --seed")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="for --seed")] = None,
    standbys: Annotated[int | None, typer.Option(min=0, max=2, help="for --seed")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="no staleness, skew, ... for --seed")] = (
        False
    ),
    rules_off: Annotated[list[str] | None, typer.Option(help="rules to switch off")] = None,
    shrinks: Annotated[int, typer.Option(min=0, help="how many failing seeds to shrink")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="write what failed here")] = None,
) -> None:
    """Run seeds of random faults, or one of them again."""
    rules = tuple(rules_off or ())
    for rule in rules:
        if rule not in RULES:
            raise typer.BadParameter(f"{rule!r}: there are {', '.join(RULES)}")
    ran = 1
    if seed is not None:
        prepare()
        kept = whole(seed).kept if not keep else _numbers(keep, len(whole(seed).kept))
        small = Smaller(seed, kept, replicas, steps, standbys, plain)
        failed = [outcome for outcome in [show(small.schedule, rules)] if outcome["problems"]]
    else:
        failed, ran = sweep(range(start, start + seeds), rules, jobs or os.cpu_count() or 1)
        prepare()
        for outcome in sorted(failed, key=lambda found: found["seed"])[:shrinks]:
            outcome["command"] = shrunk(outcome["seed"], rules)
            console.print(outcome["command"], style="bold")
    if json_file is not None:
        json_file.write_text(json.dumps({"ran": ran, "failed": failed}, indent=1))
    raise typer.Exit(1 if failed else 0)


def _numbers(keep: str, faults: int) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in keep.split(",")) if keep != "none" else ()
    except ValueError:
        numbers = (-1,)
    if not all(0 <= number < faults for number in numbers):
        raise typer.BadParameter(
            f"--keep {keep}: give numbers of faults from 0 to {faults - 1}, as 0,2, or none"
        )
    return numbers


if __name__ == "__main__":
    typer.run(main)
