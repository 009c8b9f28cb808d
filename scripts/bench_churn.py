#!/usr/bin/env python3
"""What it costs that peers come, leave and die: a run of real processes on loopback.

Wall-clock seconds on this machine, each beside what it is relative to; all share its cores, and a
node that starts takes CPU time from the others. Parts (``--only`` picks): kills, visits (joins and
drains), takeover, recovery, resume, download.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts._bench import run_parts, whole
from scripts._churn import Options, Part
from scripts._churn_joins import download, visits
from scripts._churn_kills import kills
from scripts._churn_leaders import recovery, resume, takeover

PARTS: dict[str, Callable[[Options], Part]] = {
    "kills": kills,
    "visits": visits,
    "takeover": takeover,
    "recovery": recovery,
    "resume": resume,
    "download": download,
}


def show(part: Part) -> None:
    print(f"\n{part.title}")
    for label, figure, relative in part.rows:
        print(f"  {label:32}{figure:>24}  {relative}".rstrip(), flush=True)


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: allowed are numbers above 0, up to a million")
    return value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeatable")
    parser.add_argument(
        "--quick", action="store_true", help="40 s of kills, one round, 20 s of patience"
    )
    parser.add_argument(
        "--seconds", type=positive, help="how long nodes are killed [120; quick: 40]"
    )
    parser.add_argument("--period", type=positive, default=10.0, help="seconds between kills")
    parser.add_argument("--rounds", type=whole, help="joins, takeovers, downloads [3; quick: 1]")
    parser.add_argument("--seed", type=int, default=0, help="whom to kill, and when to drain")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> None:
    flags = parse()
    options = Options(
        seconds=flags.seconds or (40.0 if flags.quick else 120.0),
        period=flags.period,
        rounds=flags.rounds or (1 if flags.quick else 3),
        patience_s=20.0 if flags.quick else 60.0,
        seed=flags.seed,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    figures: dict[str, Any] = {"command": " ".join(sys.argv)}
    print(f"command: {figures['command']}")

    def run(name: str) -> dict[str, Any]:
        part = PARTS[name](options)
        show(part)
        return part.figures

    run_parts(flags.only or PARTS, run, figures, flags.json)


if __name__ == "__main__":
    main()
