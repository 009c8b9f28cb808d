"""The worlds of ``bench_simulator.py``, and how one is played and measured."""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from scripts._paper_layers import LAYERS, MEGABIT
from swarm.sim.engine import simulate
from swarm.sim.fluid import simulate_fluid
from swarm.sim.population import renewal, steady
from swarm.sim.world import Machine, Outcome, StageWork, World

STAGES = 8
TFLOPS, SPREAD = 15.0, 0.3
LINK = 200 * MEGABIT
LIFETIME_S = 6 * 3600.0
"""In fluid mode peers come and go; this is how long one stays, on average."""
STATE_BYTES = 12 * 12 * 4096**2
MICROBATCHES = {"microbatch": 4096, "fluid": 65_536}
"""A step. Where peers die every second, one of 4,096 would be over before a death is found out."""


def world(mode: str, peers: int, seconds: float) -> World:
    """Peers of 15 TFLOP/s, more or less, and stages of 16 blocks, as in the paper's large run."""
    rng = random.Random(peers)
    layer = LAYERS[-1]
    stage = StageWork(
        forward_tflop=layer.forward_tflop,
        backward_tflop=2 * layer.forward_tflop,
        output_bytes=layer.boundary_bytes,
        gradient_bytes=layer.boundary_bytes,
        state_bytes=STATE_BYTES,
    )
    steady_swarm = mode == "microbatch"
    spans = (
        steady(peers)
        if steady_swarm
        else renewal(peers, rng, until_s=seconds, lifetime_s=LIFETIME_S)
    )
    machines = tuple(
        Machine(
            peer=f"peer-{n:06d}",
            tflops=TFLOPS * rng.uniform(1 - SPREAD, 1 + SPREAD),
            up_bytes_per_s=LINK,
            down_bytes_per_s=LINK,
            arrives_s=span.arrives_s,
            leaves_s=span.leaves_s,
            stage=n % STAGES if steady_swarm else None,
        )
        for n, span in enumerate(spans)
    )
    return World(
        stages=(stage,) * STAGES,
        machines=machines,
        duration_s=seconds,
        microbatches=MICROBATCHES[mode],
    )


WORLDS: dict[str, Callable[[World], Outcome]] = {
    "microbatch": simulate,
    "fluid": simulate_fluid,
}


def play(mode: str, peers: int, seconds: float) -> dict[str, Any]:
    """Seconds by the clock and of CPU time, events, and the peak memory of this process (MB)."""
    made = world(mode, peers, seconds)
    began, cpu_began = time.perf_counter(), time.process_time()
    outcome = WORLDS[mode](made)
    took, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    events = outcome.events
    return {
        "mode": mode,
        "peers": peers,
        "virtual_s": seconds,
        "seconds": took,
        "cpu_s": cpu_s,
        "events": events,
        "events_per_s": events / took,
        "samples": outcome.done,
        "steps": len(outcome.steps),
        "moves": len(outcome.moves),
        "share_of_optimum": outcome.share_of_optimum,
        "peak_mb": peak_mb(),
    }


def peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


if __name__ == "__main__":
    print(json.dumps(play(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
