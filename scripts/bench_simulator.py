#!/usr/bin/env python3
"""How fast the simulator is, and how much memory it takes. Each figure is of a process of its own.

Parts (``--only`` picks): microbatches (1,000 peers, 8 stages, ten minutes of virtual time), fluid
(20,000 peers, 32 hours), memory (peak of 1,000, 2,000 and 4,000 peers, both modes), plan (what
100,000 peers would mean for the directory and the trainer: swarm/sim/SCALE.md).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts._bench import ROOT, run_parts

AIM_S = 60.0
"""Of CPU time: one thread, on a machine that may have other things to do."""
MEMORY = {"microbatch": (1000, 2000, 4000), "fluid": (5000, 10_000, 20_000)}
LINEAR = 1.25
"""So much more than twice may twice as many peers take, above what nobody takes."""


def in_own_process(mode: str, peers: int, seconds: float) -> dict[str, Any]:
    """The figures of one simulation. Raises RuntimeError with its log if it fails."""
    command = [sys.executable, "-m", "scripts._scale_worlds", mode, str(peers), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{mode}, {peers} peers:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def speed(mode: str, peers: int, seconds: float) -> dict[str, Any]:
    figures = in_own_process(mode, peers, seconds)
    late = "" if figures["cpu_s"] < AIM_S else f"  (aim: below {AIM_S:.0f} s)"
    events = f", {figures['events_per_s']:,.0f} events/s" if figures["events"] else ""
    print(
        f"{mode}: {peers:,} peers, {seconds / 60:,.0f} minutes of virtual time: "
        f"{figures['seconds']:.1f} s ({figures['cpu_s']:.1f} s of CPU time){events}, "
        f"{figures['peak_mb']:.0f} MB, "
        f"{figures['share_of_optimum']:.1%} of the optimum{late}",
        flush=True,
    )
    return figures


def microbatches(quick: bool) -> dict[str, Any]:
    return speed("microbatch", 1000, 60.0 if quick else 600.0)


def fluid(quick: bool) -> dict[str, Any]:
    return speed("fluid", 20_000, 3600.0 if quick else 32 * 3600.0)


def memory(quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode, swarms in MEMORY.items():
        base = in_own_process(mode, 8, 1.0)["peak_mb"]
        seconds = 30.0 if quick else 60.0
        peaks = [in_own_process(mode, peers, seconds)["peak_mb"] for peers in swarms]
        linear = is_linear([peak - base for peak in peaks])
        found[mode] = {"base_mb": base, "peers": swarms, "peak_mb": peaks, "linear": linear}
        told = ", ".join(f"{n:,}: {mb:.0f} MB" for n, mb in zip(swarms, peaks, strict=True))
        verdict = "no worse than linear" if linear else "WORSE than linear"
        print(f"{mode}: peak memory by peers: {told} (8: {base:.0f} MB): {verdict}", flush=True)
    return found


def is_linear(above: Sequence[float]) -> bool:
    """Whether each is at most some twice the one before it, for twice as many peers."""
    return all(b <= 2 * LINEAR * max(a, 1.0) for a, b in pairwise(above))


def planning(quick: bool) -> dict[str, Any]:
    # Imported here: with it come torch and the DHT, which the other parts do without.
    from scripts._scale_plan import plan, show_plan

    del quick
    figures = plan()
    show_plan(figures)
    return figures


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "microbatches": microbatches,
    "fluid": fluid,
    "memory": memory,
    "plan": planning,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeatable")
    parser.add_argument("--quick", action="store_true", help="a tenth of the virtual time or less")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> None:
    flags = parse()
    figures: dict[str, Any] = {"command": " ".join(sys.argv)}
    run_parts(flags.only or PARTS, lambda name: PARTS[name](flags.quick), figures, flags.json)


if __name__ == "__main__":
    main()
