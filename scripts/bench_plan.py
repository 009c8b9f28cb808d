#!/usr/bin/env python3
"""What ``swarm plan`` predicts beside what local swarms do, in one run.

The speed of one processor is measured first, then three swarms are predicted and run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers.plan import measured_tflops
from scripts._bench import median, read_metrics, run_parts, swarm_local
from scripts.bench_pipeline import wait_for_steps
from swarm.manifest import Manifest
from swarm.model.registry import model_spec
from swarm.sim.plan import forecast

WARM_UP, STEPS = 2, 4
LOOPBACK_MBPS = 3200.0
"""What p2pd carries between two processes here, see bench_transports.py."""
LOOPBACK_MS = 0.2
ASKED = 0.15


@dataclass(frozen=True, slots=True)
class Case:
    """A local swarm of as many nodes as there are processors."""

    tree: dict[str, Any]
    replicas: int


SMALL = {"model.d_model": 128, "model.layers": 6, "model.sequence": 128, "batch.microbatch": 8}
LARGE = {"model.d_model": 256, "model.layers": 8, "model.sequence": 128, "batch.microbatch": 8}
CASES = {
    "2 stages x 1, d_model 256": Case({**LARGE, "stages.count": 2}, 1),
    "1 stage x 2, d_model 256": Case({**LARGE, "stages.count": 1}, 2),
    "2 stages x 1, d_model 128, 32 microbatches": Case(
        {**SMALL, "stages.count": 2, "batch.microbatches": 32}, 1
    ),
}


def measure(name: str) -> dict[str, Any]:
    case = CASES[name]
    manifest = Manifest.from_tree({"name": "plan"}).changed(
        {
            "batch.microbatches": 16,
            "run.steps": WARM_UP + STEPS,
            "run.eval_every": 0,
            "start.replicas": case.replicas,
            **case.tree,
        }
    )
    spec = model_spec(manifest)
    tflops = measured_tflops(manifest, spec)
    machines = manifest.stages.count * case.replicas
    peers = {
        "peers": [
            {
                "count": machines,
                "tflops": tflops,
                "up_mbps": LOOPBACK_MBPS,
                "down_mbps": LOOPBACK_MBPS,
            }
        ],
        "latency": {"default_ms": LOOPBACK_MS},
    }
    told = forecast(manifest, spec, peers).step_s
    with swarm_local(manifest.to_toml(), "--replicas", str(case.replicas)) as (process, out):
        wait_for_steps(process, out, WARM_UP + STEPS)
        found = median([step["seconds"] for step in read_metrics(out)[WARM_UP:]])
    error = told / found - 1
    print(
        f"{name}: {tflops:.4f} TFLOP/s a processor; a step predicted {told:.2f} s, measured "
        f"{found:.2f} s, error {error:+.1%}",
        flush=True,
    )
    return {"tflops": tflops, "predicted_s": told, "measured_s": found, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    run_parts(CASES, measure, {}, options.json)


if __name__ == "__main__":
    main()
