"""Many simulations, on all cores, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_all(
    title: str,
    tasks: Sequence[Task],
    measure: Callable[[Task], Result],
    *,
    workers: int,
    console: Console,
) -> list[Result]:
    """``measure`` of each task, in their order. It is a function of a module: processes call it."""
    found: dict[int, Result] = {}
    with _bar(console) as bar:
        line = bar.add_task(title, total=len(tasks))
        if workers == 1:
            for n, task in enumerate(tasks):
                found[n] = measure(task)
                bar.advance(line)
        else:
            with ProcessPoolExecutor(workers) as pool:
                futures = {pool.submit(measure, task): n for n, task in enumerate(tasks)}
                try:
                    for future in as_completed(futures):
                        found[futures[future]] = future.result()
                        bar.advance(line)
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
    return [found[n] for n in range(len(tasks))]


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
