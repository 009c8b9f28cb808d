#!/usr/bin/env python3
"""The swarm's pipeline beside one process and beside PyTorch's own static pipeline.

All on one machine in one run, interleaved, one torch thread a process; each figure is printed as a
multiple of one process. The work: a byte-level GPT of d_model 256, 4 heads, 8 blocks, sequence
128, microbatch 8, 16 microbatches a step, with AdamW. Where the time goes comes from /proc.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts._bench import Progress, median, read_metrics, swarm_local, whole, write_json
from scripts._pipeline_cpu import look, shares
from scripts._torch_pipeline import PipelineConfig
from scripts._torch_pipeline import run as torch_pipeline
from scripts._torch_pipeline import single as one_process

Figures = dict[str, dict[str, Any]]
ONE = "one process"
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
[step]
delay = {delay}
[optimizer]
lr = 0.001
warmup_steps = 20
[run]
steps = {steps}
eval_every = 0
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to run the work on a swarm."""

    stages: int
    replicas: int
    microbatches: int = 16
    delay: int = 0

    @property
    def name(self) -> str:
        more = f", {self.microbatches} microbatches" if self.microbatches != 16 else ""
        more += ", delayed" if self.delay else ""
        return f"swarm, {self.stages} x {self.replicas}{more}"

    @property
    def synchronous_limit(self) -> float:
        """Of the processors' time: what a step leaves while its pipeline fills and drains.

        With delayed updates the next step fills it.
        """
        return 1.0 if self.delay else self.microbatches / (self.microbatches + self.stages - 1)


LAYOUTS = (
    Layout(2, 1),
    Layout(2, 2),
    Layout(4, 1),
    Layout(2, 1, microbatches=64),
    Layout(2, 1, delay=1),
)
PYTORCH = "PyTorch Schedule1F1B, 2 stages"


def swarm(config: PipelineConfig, layout: Layout, steps: int, one: float) -> dict[str, Any]:
    """Samples a second over the steady steps, and where the processors' time went."""
    text = MANIFEST.format(
        d_model=config.d_model,
        layers=config.layers,
        heads=config.heads,
        sequence=config.sequence,
        microbatch=config.microbatch,
        microbatches=layout.microbatches,
        stages=layout.stages,
        delay=layout.delay,
        steps=steps + WARM_UP,
    )
    flags = ("--replicas", str(layout.replicas))
    with swarm_local(text, *flags) as (process, out):
        wait_for_steps(process, out, WARM_UP)
        before = look(process.pid)
        wait_for_steps(process, out, WARM_UP + steps - 1)
        spent = look(process.pid).since(before)
        wait_for_steps(process, out, WARM_UP + steps)
        steady = read_metrics(out)[WARM_UP : WARM_UP + steps]
    rate = config.microbatch * layout.microbatches / median([s["seconds"] for s in steady])
    sent = sum(step["phases"]["sent_bytes"] for step in steady)
    return {
        "samples_per_s": rate,
        "where": shares(spent, cores=os.cpu_count() or 1, samples_per_s=rate, one_process=one),
        "step_end": sum(s["phases"]["close_s"] for s in steady) / sum(s["seconds"] for s in steady),
        "bytes_per_microbatch": sent / (steps * layout.microbatches),
        "synchronous_limit": layout.synchronous_limit,
    }


def wait_for_steps(process: Popen[bytes], out: Path, steps: int, limit_s: float = 600) -> None:
    """Until so many steps have ended. Raises RuntimeError with the log if the run fails."""
    deadline = time.monotonic() + limit_s
    while len(read_metrics(out)) < steps:
        if process.poll() is not None or time.monotonic() > deadline:
            log = (out.parent / "log").read_text(errors="replace")
            raise RuntimeError(f"swarm local did not do {steps} steps:\n{log[-2000:]}")
        time.sleep(0.05)


def a_round(
    config: PipelineConfig, layouts: Sequence[Layout], steps: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each system once: its name, and what was found."""
    one = one_process(config, steps=steps)
    yield ONE, {"samples_per_s": one}
    for layout in layouts:
        few = max(2, steps * 16 // layout.microbatches)
        yield layout.name, swarm(config, layout, few, one)
    yield PYTORCH, {"samples_per_s": torch_pipeline(config, steps=steps)}


def measure(config: PipelineConfig, layouts: Sequence[Layout], runs: int, steps: int) -> Figures:
    """All systems in turn, ``runs`` times. Ctrl-C: the rounds until then, if one is whole."""
    rounds: list[Figures] = []
    try:
        for turn in range(runs):
            progress = Progress(f"round {turn + 1} of {runs}", every_s=0)
            found: Figures = {}
            for name, row in a_round(config, layouts, steps):
                found[name] = row
                multiple = row["samples_per_s"] / found[ONE]["samples_per_s"]
                progress(f"{name}: {row['samples_per_s']:.1f} samples/s, {multiple:.2f}")
            progress.clear()
            rounds.append(found)
    except KeyboardInterrupt:
        if not rounds:
            raise
        print(f"\nstopped: medians of {len(rounds)} of {runs} rounds", file=sys.stderr)
    return {name: medians(name, rounds) for name in rounds[-1]}


def medians(name: str, rounds: Sequence[Figures]) -> dict[str, Any]:
    """Of one system over the rounds; where its time went is that of the last."""
    rates = [found[name]["samples_per_s"] for found in rounds]
    multiples = [found[name]["samples_per_s"] / found[ONE]["samples_per_s"] for found in rounds]
    return {
        **rounds[-1][name],
        "samples_per_s": median(rates),
        "multiple": median(multiples),
        "multiples": multiples,
    }


def show(figures: Figures) -> None:
    print(f"{'':34}{'samples/s':>10}{'multiple':>10}")
    for name, row in figures.items():
        print(f"{name:34}{row['samples_per_s']:10.1f}{row['multiple']:10.2f}")
    for name, row in figures.items():
        if "where" in row:
            parts = ", ".join(f"{share:.1%} {what}" for what, share in row["where"].items())
            print(
                f"\n{name}: of the processors' time {parts}. A step leaves "
                f"{1 - row['synchronous_limit']:.1%} idle by itself, its end takes "
                f"{row['step_end']:.1%}; {row['bytes_per_microbatch'] / 1e6:.2f} MB are sent on "
                "per microbatch"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=whole, default=5, help="rounds; medians are over these")
    parser.add_argument("--steps", type=whole, default=5, help="steady steps of each measurement")
    parser.add_argument("--quick", action="store_true", help="two stages alone, one round")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    layouts, runs = (LAYOUTS[:1], 1) if options.quick else (LAYOUTS, options.runs)
    try:
        figures = measure(PipelineConfig(), layouts, runs, options.steps)
    except KeyboardInterrupt:
        sys.exit(130)
    show(figures)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
