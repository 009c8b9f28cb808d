#!/usr/bin/env python3
"""The swarm on a slow network: throughput as a share of what its processors and links allow.

Every peer has an uplink and a downlink of 100 Mb/s, 50 ms from everybody, made by proxies between
the announced and the real addresses (scripts/_slow_proxy.py). Three limits: the same swarm without
proxies, in the same run (compute); bytes per microbatch over a link (bandwidth); and of these the
smaller, with the latency that a synchronous step of S stages cannot hide: the first microbatch's
way there and back, prepare, vote, decide and its answer, 2 S + 4 times the way between two peers.
With delayed updates the next step hides that too.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts._bench import Progress, median, whole, write_json
from scripts._slow_swarm import FarSwarm, far_swarm

BITS_PER_S, DELAY_S = 100e6, 0.05
SEQUENCE = 128
WIDE = "scripts._wide_model:wide"
STAGES = 2
WARM_UP = 4
"""Steps at the start of a swarm that are not counted: the window is found, speeds are measured."""

MANIFEST = """
name = "slow"
[model]
{model}
sequence = {sequence}
[stages]
count = {stages}
[batch]
microbatch = {microbatch}
microbatches = {microbatches}
[step]
delay = {delay}
[optimizer]
lr = 0.001
warmup_steps = 20
[run]
steps = 100000
eval_every = 0
checkpoint_every = 0
[rebalancing]
enabled = false
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A swarm of two stages of one replica each.

    All boundaries are of 1 MiB. ``layers``: blocks of a GPT; none: the layers compute next to
    nothing, so that two cores suffice for nodes, daemons and proxies.
    """

    what: str
    layers: int
    d_model: int = 256
    transport: str = "p2pd"
    microbatches: int = 64
    delay: int = 0

    @property
    def name(self) -> str:
        more = [self.transport] if self.transport != "p2pd" else []
        more += [f"{self.microbatches} microbatches"] if self.microbatches != 64 else []
        more += ["delayed"] if self.delay else []
        return ", ".join([self.what, *more])

    @property
    def microbatch(self) -> int:
        return 2048 // self.d_model

    @property
    def manifest(self) -> str:
        return MANIFEST.format(
            model=self._model,
            sequence=SEQUENCE,
            stages=STAGES,
            microbatch=self.microbatch,
            microbatches=self.microbatches,
            delay=self.delay,
        )

    @property
    def _model(self) -> str:
        if self.layers:
            return f"d_model = {self.d_model}\nlayers = {self.layers}\nheads = 4"
        return f'kind = "{WIDE}"\nargs = {{ width = {self.d_model}, sequence = {SEQUENCE} }}'

    @property
    def boundary_bytes(self) -> int:
        """Of one microbatch, forward: the activation, and the targets that travel with it."""
        return self.microbatch * SEQUENCE * (4 * self.d_model + 1)

    @property
    def bandwidth_s(self) -> float:
        """Of a step: the busier direction's bytes through the link, back to back."""
        return self.microbatches * self.boundary_bytes * 8 / BITS_PER_S

    @property
    def latency_s(self) -> float:
        """Of a step: what no window can hide."""
        return 0.0 if self.delay else (2 * STAGES + 4) * DELAY_S


COMPUTE = ("compute-bound", 8)
BANDWIDTH = ("bandwidth-bound", 0)
CASES = (
    Case(*COMPUTE),
    Case(*BANDWIDTH),
    Case(*BANDWIDTH, delay=1),
    Case(*COMPUTE, transport="pylibp2p"),
    Case(*BANDWIDTH, transport="pylibp2p"),
)


def run(case: Case, steps: int, *, far: bool) -> dict[str, Any]:
    """A step's time over the steady steps, and what went through the proxies, if any.

    Raises:
        RuntimeError: a process ended, or two peers found a way around the proxies.
    """
    name = f"{case.name}, {'slow network' if far else 'loopback'}"
    link = (BITS_PER_S, DELAY_S) if far else None
    with far_swarm(
        case.manifest, Progress(name), case.transport, link, () if case.layers else (WIDE,)
    ) as swarm:
        swarm.open(STAGES, 1)
        swarm.wait_for_steps(max(0, WARM_UP - len(swarm.metrics.steps)) or 1)
        first = len(swarm.metrics.steps)
        before = swarm.network.carried.copy() if swarm.network else {}
        swarm.wait_for_steps(steps)
        done = swarm.metrics.steps[first - 1 : first + steps]
        found = {
            "step_s": (done[-1].ended - done[0].ended) / steps,
            "close_s": median([step.figures["phases"]["close_s"] for step in done[1:]]),
            "resent": sum(step.figures["resent"] for step in done[1:]),
            "window": [step.figures["phases"].get("window") for step in swarm.metrics.steps],
            "sent_bytes": sum(step.figures["phases"]["sent_bytes"] for step in done[1:]) / steps,
        }
        return {**found, **network(swarm, before, steps)} if far else found


def network(swarm: FarSwarm, before: dict[tuple[str, str], int], steps: int) -> dict[str, Any]:
    """What the proxies carried in a step."""
    assert swarm.network is not None
    if around := swarm.network.bypasses():
        raise RuntimeError(f"not through a proxy: {'; '.join(around)}")
    trip_s, bits_per_s = swarm.network.measure()
    carried = {
        f"{one} to {other}": (nbytes - before.get((one, other), 0)) / steps
        for (one, other), nbytes in sorted(swarm.network.carried.items())
        if "measure" not in (one, other)
    }
    return {"carried_bytes": carried, "trip_s": trip_s, "bits_per_s": bits_per_s}


def shares(case: Case, near: dict[str, Any], far: dict[str, Any]) -> dict[str, float]:
    """Throughputs in microbatches a second, and the slow swarm's as shares of its limits."""
    limit_s = max(near["step_s"], case.bandwidth_s)
    return {
        "compute": case.microbatches / near["step_s"],
        "bandwidth": case.microbatches / case.bandwidth_s,
        "measured": case.microbatches / far["step_s"],
        "share": limit_s / far["step_s"],
        "share_with_latency": (limit_s + case.latency_s) / far["step_s"],
    }


def measure(cases: list[Case], runs: int, steps: int) -> dict[str, Any]:
    """All cases in turn, ``runs`` times; each beside the same swarm without proxies."""
    found: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    for _ in range(runs):
        for case in cases:
            near, far = run(case, steps, far=False), run(case, steps, far=True)
            found[case.name].append({**shares(case, near, far), "near": near, "far": far})
    keys = ("compute", "bandwidth", "measured", "share", "share_with_latency")
    return {
        name: {**{key: median([one[key] for one in rounds]) for key in keys}, "rounds": rounds}
        for name, rounds in found.items()
    }


def show(figures: dict[str, Any]) -> None:
    print(f"{'microbatches a second':38}{'compute':>9}{'bandwidth':>10}{'measured':>9}", end="")
    print(f"{'of min()':>10}{'and latency':>12}")
    for name, row in figures.items():
        print(
            f"{name:38}{row['compute']:9.2f}{row['bandwidth']:10.2f}{row['measured']:9.2f}"
            f"{row['share']:10.1%}{row['share_with_latency']:12.1%}"
        )
    for name, row in figures.items():
        far = row["rounds"][-1]["far"]
        carried = sum(far["carried_bytes"].values())
        print(
            f"\n{name}: the window after each step: {far['window']}; "
            f"{far['close_s']:.2f} s from the last count to the applied step; "
            f"{far['resent']} microbatches sent again. The proxies carried {carried / 1e6:.1f} MB "
            f"a step, {carried / far['sent_bytes'] - 1:.1%} more than the receipts say; "
            f"one of them measured: {far['trip_s'] * 1e3:.0f} ms there and back, "
            f"{far['bits_per_s'] / 1e6:.0f} Mb/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=whole, default=5, help="rounds; medians are over these")
    parser.add_argument("--steps", type=whole, default=3, help="steady steps of each measurement")
    parser.add_argument("--quick", action="store_true", help="p2pd alone, one round")
    parser.add_argument(
        "--microbatches", type=whole, default=64, help="of a step; the more, the less is latency"
    )
    parser.add_argument("--case", action="append", help="only cases with this in their name")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    cases = [c for c in CASES if c.transport == "p2pd" or not options.quick]
    cases = [replace(c, microbatches=options.microbatches) for c in cases]
    if options.case:
        cases = [c for c in cases if any(word in c.name for word in options.case)]
    try:
        figures = measure(cases, 1 if options.quick else options.runs, options.steps)
    except RuntimeError as error:
        sys.exit(f"failed: {error}")
    show(figures)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
