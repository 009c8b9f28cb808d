#!/usr/bin/env python3
"""The two transports, p2pd and py-libp2p, pure and mixed, beside raw asyncio TCP, on loopback.

Each end is a process of its own, fresh in every round, and the kinds take turns; figures are
medians over the rounds. A call sends bytes and gets the same back. MB/s are payload bytes both
ways (so 2 MiB for a call of 1 MiB) by the time of the call, one call at a time; CPU seconds, of
both ends and their p2pd, are by GB of the same bytes. Raw TCP secures nothing and is asyncio's own
streams. Parts (``--only`` picks): calls, ends (start and memory), directory (two nodes).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from scripts._bench import Progress, median, run_parts, whole
from scripts._transports_pair import EndProcess, pair

Pair = tuple[str, str]
Figures = dict[str, float]

RAW: Pair = ("tcp", "tcp")
SAME: tuple[Pair, ...] = (RAW, ("p2pd", "p2pd"), ("pylibp2p", "pylibp2p"))
MIXED: tuple[Pair, ...] = (("p2pd", "pylibp2p"), ("pylibp2p", "p2pd"))
NAMES = {"tcp": "asyncio TCP", "p2pd": "p2pd", "pylibp2p": "py-libp2p"}
MIN_WIDTH = 96
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """How often: rounds, and calls and operations of each kind in a round."""

    runs: int
    small: int
    medium: int
    large: int
    records: int


USUAL = Options(runs=5, small=500, medium=100, large=12, records=50)
QUICK = Options(runs=1, small=100, medium=20, large=3, records=10)


def name_of(ends: Pair) -> str:
    caller, callee = (NAMES[kind] for kind in ends)
    return caller if caller == callee else f"{caller} -> {callee}"


def in_turn(
    what: str, pairs: Sequence[Pair], runs: int, measure: Callable[[Pair], Figures]
) -> dict[str, dict[str, Any]]:
    """``measure`` of each of ``pairs`` in turn, ``runs`` times: medians, and all that was found.

    What is compared with raw TCP is so within one round, in figures that end in ``_of_raw``.
    """
    found: dict[Pair, list[Figures]] = {ends: [] for ends in pairs}
    progress = Progress(what)
    for turn in range(runs):
        for ends in pairs:
            progress(f"round {turn + 1} of {runs}, {name_of(ends)}")
            figures = measure(ends)
            if RAW in pairs:
                raw = figures if ends == RAW else found[RAW][turn]
                rates = [key for key in figures if key.endswith("_mb_s")]
                figures |= {f"{key}_of_raw": figures[key] / raw[key] for key in rates}
            found[ends].append(figures)
    progress.clear()
    return {
        name_of(ends): {
            **{key: median([figures[key] for figures in rounds]) for key in rounds[0]},
            "rounds": rounds,
        }
        for ends, rounds in found.items()
    }


def calls(options: Options) -> dict[str, Any]:
    """Latency, throughput and processor time."""

    def measure(ends: Pair) -> Figures:
        with pair(*ends) as (caller, callee):
            caller.ask("connect", address=callee.address)
            caller.ask("calls", bytes=KIB, count=20)  # opens the stream
            took = sorted(caller.ask("calls", bytes=KIB, count=options.small)["seconds"])
            return {
                "small_ms": 1e3 * median(took),
                "small_p95_ms": 1e3 * took[int(0.95 * len(took))],
                **bulk(caller, callee, "medium", MIB, options.medium),
                **bulk(caller, callee, "large", 16 * MIB, options.large),
            }

    found = in_turn("calls", SAME + MIXED, options.runs, measure)
    table = grid(
        "Echo calls, one at a time; bytes both ways count (in brackets: share of asyncio TCP)",
        ("1 KiB, ms", "p95", "1 MiB, MB/s", "CPU s/GB", "16 MiB, MB/s", "CPU s/GB"),
    )
    for name, row in found.items():
        cells = [f"{row['small_ms']:.2f}", f"{row['small_p95_ms']:.2f}"]
        for size in ("medium", "large"):
            cells.append(f"{row[f'{size}_mb_s']:.0f} ({row[f'{size}_mb_s_of_raw']:.2f})")
            cells.append(f"{row[f'{size}_cpu_s_gb']:.2f}")
        table.add_row(name, *cells)
    show(table)
    return found


def bulk(caller: EndProcess, callee: EndProcess, size: str, nbytes: int, count: int) -> Figures:
    caller.ask("calls", bytes=nbytes, count=1)
    before = caller.cpu_s() + callee.cpu_s()
    took = caller.ask("calls", bytes=nbytes, count=count)["seconds"]
    spent = caller.cpu_s() + callee.cpu_s() - before
    compared = 1  # that is called once more, for a look at what comes back
    return {
        f"{size}_mb_s": 2 * nbytes / median(took) / 1e6,
        f"{size}_cpu_s_gb": spent / (2 * nbytes * (count + compared) / 1e9),
    }


def ends(options: Options) -> dict[str, Any]:
    """Start-up time and memory, of the callee; it starts alone."""

    def measure(ends: Pair) -> Figures:
        with pair(*ends, one_by_one=True) as (caller, callee):
            caller.ask("connect", address=callee.address)
            caller.ask("calls", bytes=KIB, count=20)
            idle = callee.rss_mb()
            for end in (caller, callee):
                end.forget_peak()
            caller.ask("calls", bytes=16 * MIB, count=options.large)
            peak = callee.peak_mb()
        return {
            "start_s": callee.start_s,
            "import_s": callee.import_s,
            "serving_s": callee.serving_s,
            **{f"idle_{what}_mb": mb for what, mb in idle.items()},
            **{f"peak_{what}_mb": mb for what, mb in peak.items()},
        }

    found = in_turn("ends", SAME, options.runs, measure)
    table = grid(
        "One end: its start, and its resident memory (process + p2pd), much of it from imports",
        ("start, s", "imports, s", "process to serving, s", "idle, MB", "peak, MB"),
    )
    for name, row in found.items():
        cells = [f"{row[key]:.2f}" for key in ("start_s", "import_s", "serving_s")]
        for when in ("idle", "peak"):
            daemon = row[f"{when}_p2pd_mb"]
            more = f" + {daemon:.0f}" if daemon else ""
            cells.append(f"{row[f'{when}_process_mb']:.0f}{more}")
        table.add_row(name, *cells)
    show(table)
    return found


def directory(options: Options) -> dict[str, Any]:
    """A record of 200 bytes, signed and stored, and looked up, in a directory of two nodes."""

    def measure(ends: Pair) -> Figures:
        with pair(*ends) as (caller, callee):
            callee.ask("enter", join=[])
            caller.ask("enter", join=[callee.address])
            figures = {}
            for what in ("store", "get"):
                caller.ask(what, count=3)
                took = caller.ask(what, count=options.records)["seconds"]
                figures[f"{what}_ms"] = 1e3 * median(took)
            return figures

    found = in_turn("directory", SAME[1:] + MIXED, options.runs, measure)
    table = grid("Directory of two nodes: operations of the caller", ("store, ms", "get, ms"))
    for name, row in found.items():
        table.add_row(name, f"{row['store_ms']:.1f}", f"{row['get_ms']:.1f}")
    show(table)
    return found


def grid(title: str, columns: Sequence[str]) -> Table:
    table = Table("", title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right")
    for column in table.columns:
        column.no_wrap = True
    return table


def show(table: Table) -> None:
    width = max(Console().width, MIN_WIDTH)
    Console(width=width).print(table)


PARTS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "calls": calls,
    "ends": ends,
    "directory": directory,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeatable")
    parser.add_argument("--runs", type=whole, help="rounds [5; quick: 1]")
    parser.add_argument("--quick", action="store_true", help="one round of few calls")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> None:
    flags = parse()
    usual = QUICK if flags.quick else USUAL
    options = Options(
        flags.runs or usual.runs, usual.small, usual.medium, usual.large, usual.records
    )
    figures: dict[str, Any] = {"command": " ".join(sys.argv)}
    run_parts(flags.only or PARTS, lambda name: PARTS[name](options), figures, flags.json)


if __name__ == "__main__":
    main()
