#!/usr/bin/env python3
"""SWARM's tables, simulated, beside the figures that its paper reports.

1: utilisation of peers against latency. 2: rebalancing while machines are preempted. 3: rules of
wiring in a swarm across ten regions, with churn. Virtual time; the decisions are those of
``swarm/core``, as in production.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from scripts._bench import ROOT, write_json
from scripts._paper_rebalancing import HOURS, rebalancing
from scripts._paper_utilisation import TFLOPS, utilisation
from scripts._paper_view import Table, show
from scripts._paper_wiring import wiring
from swarm.errors import SwarmError

TRACES = ROOT.parent / "shared" / "data" / "traces"
PEERS = 120
PLAIN_WIDTH = 120
"""Of what goes to a file or a pipe."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", type=int, choices=(1, 2, 3), help="a table; repeatable"
    )
    parser.add_argument("--quick", action="store_true", help="fewer seeds and shorter runs")
    parser.add_argument(
        "--traces", type=Path, help=f"a folder of preemption traces [{TRACES}, if it is there]"
    )
    parser.add_argument(
        "--peers", type=number(4, 20_000, int), default=PEERS, help=f"of table 2 [{PEERS}]"
    )
    parser.add_argument(
        "--tflops",
        type=number(0.1, 10_000, float),
        default=TFLOPS,
        help=f"what a peer of table 1 sustains [{TFLOPS:g}]",
    )
    parser.add_argument(
        "--seeds", type=number(1, 1000, int), help="of tables 2 and 3 [10 and 5; quick: 2]"
    )
    parser.add_argument(
        "--workers", type=number(1, 256, int), default=os.cpu_count() or 1, help="processes"
    )
    parser.add_argument("--pictures", type=Path, help="a folder for PNGs; made if missing")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    flags = parser.parse_args(arguments)
    if flags.traces is not None and not flags.traces.is_dir():
        parser.error(
            f"--traces {flags.traces}: not a folder; give one with CSV or JSON traces, or leave it "
            "out for a made-up one"
        )
    return flags


def number(least: float, most: float, kind: type) -> Callable[[str], Any]:
    allowed = f"allowed are {'whole ' if kind is int else ''}numbers from {least:g} to {most:g}"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: {allowed}") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: {allowed}")
        return value

    return read


def tables_of(which: int, flags: argparse.Namespace, console: Console) -> list[Table]:
    common: dict[str, Any] = {
        "workers": flags.workers,
        "console": console,
        "pictures": flags.pictures,
    }
    if which == 1:
        return utilisation(tflops=flags.tflops, quick=flags.quick, **common)
    if which == 2:
        return rebalancing(
            flags.traces or TRACES,
            peers=flags.peers,
            seeds=flags.seeds or (2 if flags.quick else 10),
            hours=4 if flags.quick else HOURS,
            **common,
        )
    return wiring(seeds=flags.seeds or (2 if flags.quick else 5), quick=flags.quick, **common)


def main() -> None:
    flags = parse()
    if flags.pictures is not None:
        flags.pictures.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    figures: dict[str, Any] = {"command": " ".join(sys.argv)}
    began = time.monotonic()
    try:
        for which in sorted(set(flags.only or (1, 2, 3))):
            tables = tables_of(which, flags, console)
            for table in tables:
                show(table, console)
            figures[str(which)] = [{"title": t.title, **t.figures} for t in tables]
    except KeyboardInterrupt:
        console.print("stopped")
        sys.exit(130)
    except SwarmError as error:
        console.print(f"error: {error}", markup=False)
        sys.exit(1)
    finally:
        figures["seconds"] = time.monotonic() - began
        write_json(flags.json, figures)
    console.print(f"\n{figures['seconds']:.0f} s in all", highlight=False)


if __name__ == "__main__":
    main()
