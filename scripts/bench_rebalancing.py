#!/usr/bin/env python3
"""How a swarm recovers by itself when a stage loses most of its replicas: real processes.

Three stages, seven nodes (3, 2, 2). Two of the three are killed; a node of another stage moves
there. Then a swarm of five nodes is started with the best assignment there is. What nodes compute
is mostly waited for (``_slowed.py``), so that eight processes on two cores do not slow each other
down.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.filesize import decimal

from scripts._bench import whole, write_json
from scripts._moves import DEAD, FULL, HIT, Options, best_assignment, best_from_the_start, one_move

ASKED = 0.90


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--period", type=positive, default=30.0, help="seconds between a node's looks [30]"
    )
    parser.add_argument(
        "--seconds", type=positive, default=0.9, help="a microbatch takes, in all stages [0.9]"
    )
    parser.add_argument("--steps", type=whole, default=6, help="measured each time [6]")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def positive(text: str) -> float:
    value = float(text)
    if not 0.01 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: allowed are numbers from 0.01 to 3600")
    return value


def rows(found: dict[str, Any], options: Options) -> list[tuple[str, str, str]]:
    """Label, figure, and what it is relative to."""

    def speed(name: str) -> str:
        return "-" if found[name] is None else f"{found[name]:.2f} samples/s"

    dead = f"{DEAD} of stage {HIT} are dead"
    if found["killed"] is None:
        dead += "; no whole step fell into that time"
    return [
        ("before the kill", speed("before"), f"replicas {FULL}"),
        ("after it, before the move", speed("killed"), dead),
        ("after the move", speed("after"), f"replicas {tuple(found['counts'])}"),
        ("the best assignment", speed("best"), f"replicas {found['best_counts']}"),
        ("after the move / best", f"{found['recovered']:.3f}", f"asked: at least {ASKED:.2f}"),
        ("kill to grant", f"{found['granted_s']:.1f} s", f"a period is {options.period_s:g} s"),
        ("kill to serving", f"{found['serving_s']:.1f} s", found["reason"]),
        ("state that was copied", decimal(found["state_bytes"]), "weights and AdamW's moments"),
        ("largest relative difference", f"{found['loss_apart']:.1e}", "loss of one process"),
    ]


def main() -> None:
    flags = parse()
    options = Options(flags.period, flags.seconds, flags.steps)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"command: {' '.join(sys.argv)}")
    try:
        found = one_move(options)
        best = best_assignment(sum(FULL) - DEAD)
        found |= {"best_counts": best, "best": best_from_the_start(options, best)}
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    found["command"] = " ".join(sys.argv)
    found["recovered"] = found["after"] / found["best"]
    for label, figure, relative in rows(found, options):
        print(f"  {label:30}{figure:>18}  {relative}".rstrip())
    write_json(flags.json, found)
    sys.exit(found["recovered"] < ASKED)


if __name__ == "__main__":
    main()
