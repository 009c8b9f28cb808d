#!/usr/bin/env python3
"""The swarm's pipeline beside one process and beside PyTorch's own static pipeline.

All on one machine in one run, interleaved, one torch thread a process; each figure is printed as a
multiple of one process. The work: a byte-level GPT of d_model 256, 4 heads, 8 blocks, sequence
128, microbatch 8, 16 microbatches a step, with AdamW. Where the time goes comes from receipts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts._bench import median, run_swarm, write_json
from scripts._torch_pipeline import PipelineConfig
from scripts._torch_pipeline import run as torch_pipeline
from scripts._torch_pipeline import single as one_process

WARM_UP = 2
"""Steps at the start of a swarm that are not counted."""

MANIFEST = """
name = "bench"
[model]
d_model = {d_model}
layers = {layers}
heads = {heads}
sequence = {sequence}
[stages]
count = {stages}
[batch]
microbatch = {microbatch}
microbatches = {microbatches}
[optimizer]
lr = 0.001
warmup_steps = 20
[run]
steps = {steps}
eval_every = 0
"""


def swarm(config: PipelineConfig, stages: int, replicas: int, steps: int) -> dict[str, Any]:
    """Samples a second over the steady steps, and where their time went."""
    text = MANIFEST.format(
        d_model=config.d_model,
        layers=config.layers,
        heads=config.heads,
        sequence=config.sequence,
        microbatch=config.microbatch,
        microbatches=config.microbatches,
        stages=stages,
        steps=steps + WARM_UP,
    )
    steady = run_swarm(text, "--replicas", str(replicas))[WARM_UP:]
    seconds = [step["seconds"] for step in steady]
    phases: dict[str, float] = {}
    for step in steady:
        for name, value in step["phases"].items():
            phases[name] = phases.get(name, 0.0) + value
    processes = stages * replicas
    total = sum(seconds)
    return {
        "samples_per_s": config.samples / median(seconds),
        "share": {
            # Of all node processes' time; what is left is waiting for something to do.
            "compute": phases["compute_s"] / (total * processes),
            "encode": phases["encode_s"] / (total * processes),
            "transfer": phases["link_s"] / (total * processes),
            "step end": phases["close_s"] / total,
        },
        "bytes_per_microbatch": phases["sent_bytes"] / (len(steady) * config.microbatches),
    }


def measure(config: PipelineConfig, runs: int, steps: int) -> dict[str, Any]:
    """All systems in turn, ``runs`` times."""
    found: dict[str, list[float]] = {}
    details: dict[str, dict[str, Any]] = {}
    for turn in range(runs):
        print(f"round {turn + 1} of {runs}", file=sys.stderr)
        found.setdefault("one process", []).append(one_process(config, steps=steps))
        for stages, replicas in ((2, 1), (2, 2)):
            name = f"swarm, {stages} stages x {replicas}"
            details[name] = swarm(config, stages, replicas, steps)
            found.setdefault(name, []).append(details[name]["samples_per_s"])
        found.setdefault("PyTorch Schedule1F1B, 2 stages", []).append(
            torch_pipeline(config, steps=steps)
        )
    base = median(found["one process"])
    return {
        name: {
            "samples_per_s": median(rates),
            "multiple": median(
                [rate / one for rate, one in zip(rates, found["one process"], strict=True)]
            ),
            "all": rates,
            **{k: v for k, v in details.get(name, {}).items() if k != "samples_per_s"},
        }
        for name, rates in found.items()
    } | {"base_samples_per_s": base}


def show(result: dict[str, Any]) -> None:
    print(f"{'':34}{'samples/s':>10}{'multiple':>10}")
    for name, row in result.items():
        if isinstance(row, dict):
            print(f"{name:34}{row['samples_per_s']:10.1f}{row['multiple']:10.2f}")
    for name, row in result.items():
        if isinstance(row, dict) and "share" in row:
            share = row["share"]
            waiting = 1 - share["compute"] - share["encode"]
            print(
                f"\n{name}: of the nodes' time {share['compute']:.1%} compute, "
                f"{share['encode']:.2%} encode, {waiting:.1%} waiting; transfers run beside it "
                f"({share['transfer']:.1%}); the end of the step takes {share['step end']:.1%} of "
                f"the step; {row['bytes_per_microbatch'] / 1e6:.2f} MB sent on per microbatch"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="rounds; medians are over these")
    parser.add_argument("--steps", type=int, default=5, help="steady steps of each measurement")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    result = measure(PipelineConfig(), options.runs, options.steps)
    show(result)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
