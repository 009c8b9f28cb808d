#!/usr/bin/env python3
"""Does training with lossy codecs end where training with fp32 ends?

The same run once for each codec of the wire (activations and gradients between stages) and of
averaging: a byte-level GPT on the standard library's sources, in 3 stages of 2 replicas, played in
one process with what the swarm runs: its stages, its codecs at every boundary, and in averaging
the sums and the error feedback of real rounds (bit for bit, see tests/unit/test_averaging.py).
Seed, data and first weights are equal, so that fp32 and a codec differ by what the codec loses.
How far runs come apart by rounding alone is shown by "fp32, 1 replica": it adds the same numbers
in another order. "fp32, delayed" is what delayed updates (step.delay = 1) do to the curve.

Prints the final losses (mean of the last 20 steps, and on held-out data) and their difference to
fp32. A single seed is one path: where training is near an instability, any rounding may send it to
either side for good, so that several seeds say more; losses are then means over the seeds. Half a
minute for 300 steps of one variant on one core, so five minutes a seed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from peers.plots import GREY, dress
from scripts._bench import Progress, whole, write_json
from scripts._replicas_in_one import ReplicasInOne
from swarm.manifest import Manifest
from swarm.reference import Averaging, Reference

FP32 = "fp32"
REPLICAS = 2
LAST = 20
"""The final loss is the mean over so many steps."""
WITHIN_PER_CENT = 0.5
SMOOTHED = 10
"""Steps of a point of the plot."""

VARIANTS: Mapping[str, tuple[str, str, int]] = {
    FP32: ("fp32", "fp32", REPLICAS),
    "fp32, 1 replica": ("fp32", "fp32", 1),
    "bf16 wire": ("bf16", "fp32", REPLICAS),
    "int8 wire": ("int8", "fp32", REPLICAS),
    "bf16 averaging": ("fp32", "bf16", REPLICAS),
    "int8 averaging": ("fp32", "int8", REPLICAS),
    "int8 both": ("int8", "int8", REPLICAS),
    "fp32, delayed": ("fp32", "fp32", REPLICAS),
    "fp32, delayed after 100": ("fp32", "fp32", REPLICAS),
}
"""Codec of the wire, codec of averaging, replicas of a stage."""

COLOURS = (
    "#1f5fa8",
    GREY,
    "#2a8a5c",
    "#d9541e",
    "#7ab648",
    "#8e44ad",
    "#b8860b",
    "#444444",
    "#c03a6b",
)
DELAYED = {"fp32, delayed": 0, "fp32, delayed after 100": 100}
"""So many steps are done without delay first."""


def manifest_of(
    wire: str, averaging: str, steps: int, seed: int, delay_after: int | None
) -> Manifest:
    """``delay_after`` None: without delayed updates."""
    delay = {"delay": 0} if delay_after is None else {"delay": 1, "delay_after": delay_after}
    return Manifest.from_tree(
        {
            "name": "convergence",
            "seed": seed,
            "model": {"d_model": 64, "layers": 4, "heads": 4, "sequence": 64},
            "stages": {"count": 3},
            "step": delay,
            "batch": {"microbatch": 8, "microbatches": 4},
            "optimizer": {
                "lr": 3e-3,
                "warmup_steps": min(20, steps - 1),
                "total_steps": steps,
                "weight_decay": 0.01,
            },
            "wire": {"activations": wire, "gradients": wire, "averaging": averaging},
            "run": {"steps": steps, "eval_every": steps, "eval_microbatches": 32},
        }
    )


def train(name: str, steps: int, seed: int, tell: Callable[[int, float], None]) -> dict[str, Any]:
    """One variant: its losses, step by step, and what they come to."""
    wire, averaging, replicas = VARIANTS[name]
    summing: Averaging | None = ReplicasInOne(replicas, averaging) if replicas > 1 else None
    manifest = manifest_of(wire, averaging, steps, seed, DELAYED.get(name))
    run = Reference(manifest, averaging=summing)
    losses, held_out, began = [], None, time.perf_counter()
    for step in range(steps):
        result = run.step(time.perf_counter)
        assert result is not None
        losses.append(result.loss)
        held_out = result.eval_loss
        tell(step, result.loss)
    return {
        "seed": seed,
        "wire": wire,
        "averaging": averaging,
        "replicas": replicas,
        "loss": statistics.fmean(losses[-LAST:]),
        "eval_loss": held_out,
        "losses": losses,
        "seconds": time.perf_counter() - began,
    }


def over_seeds(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same variant with several seeds: means of its losses, and each run."""
    return {
        "loss": statistics.fmean(run["loss"] for run in runs),
        "eval_loss": statistics.fmean(run["eval_loss"] for run in runs),
        "losses": [
            statistics.fmean(step) for step in zip(*(r["losses"] for r in runs), strict=True)
        ],
        "by_seed": list(runs),
    }


def compare(runs: dict[str, dict[str, Any]]) -> None:
    """Add to each variant, and each of its seeds, the differences to fp32.

    In per cent of the loss; less than 0 is better.
    """
    base = runs[FP32]
    for run in runs.values():
        pairs = [(run, base), *zip(run["by_seed"], base["by_seed"], strict=True)]
        for key in ("loss", "eval_loss"):
            for one, zero in pairs:
                one[f"{key}_off_per_cent"] = 100 * (one[key] / zero[key] - 1)


def show(runs: dict[str, dict[str, Any]], steps: int) -> None:
    seeds = len(runs[FP32]["by_seed"])
    print(f"{steps} steps, {seeds} seed{'s' * (seeds > 1)}: losses, and per cent more than fp32")
    print(f"{'':24}{'last 20 steps':>14}{'held out':>32}")
    for name, run in runs.items():
        cells = (f"{run[key]:10.4f} {difference(run, key):21}" for key in ("loss", "eval_loss"))
        print((f"{name:24}" + "".join(cells)).rstrip())
    outside = [
        name
        for name, run in runs.items()
        if name not in DELAYED
        and max(abs(run["loss_off_per_cent"]), abs(run["eval_loss_off_per_cent"])) > WITHIN_PER_CENT
    ]
    verdict = "not " + ", ".join(outside) if outside else "all"
    print(f"Codecs within {WITHIN_PER_CENT} % of fp32 in both losses: {verdict}")


def difference(run: dict[str, Any], key: str) -> str:
    """To fp32, in per cent, and from which to which seed it reaches."""
    key = f"{key}_off_per_cent"
    each = [one[key] for one in run["by_seed"]]
    reach = f" ({min(each):+.2f}..{max(each):+.2f})" if len(each) > 1 else ""
    return f"{run[key]:+.2f}%{reach}"


def plot(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Loss above, difference to fp32 below; both as means of ten steps. PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    figure.suptitle("Lossy codecs and delayed updates beside fp32", fontsize=15, fontweight="bold")
    base = smooth(runs[FP32]["losses"])
    steps = [SMOOTHED * (n + 0.5) for n in range(len(base))]
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        points = smooth(run["losses"])
        off = [100 * (point / zero - 1) for point, zero in zip(points, base, strict=True)]
        above.plot(steps, points, color=colour, linewidth=1.4, label=name)
        below.plot(steps, off, color=colour, linewidth=1.2)
    for sign in (1, -1):
        below.axhline(sign * WITHIN_PER_CENT, color=GREY, linewidth=1, linestyle="--")
    dress(above, "training loss", empty=False)
    dress(below, "difference to fp32 (%)", empty=False)
    above.legend(frameon=False, loc="upper right")
    below.set_xlabel("step")
    figure.savefig(path, format="png")


def smooth(losses: Sequence[float]) -> list[float]:
    """Means of ten steps each; what is left over at the end is left out."""
    starts = range(0, len(losses) - SMOOTHED + 1, SMOOTHED)
    return [statistics.fmean(losses[start : start + SMOOTHED]) for start in starts]


def step_count(text: str) -> int:
    """For argparse."""
    if not (text.isdecimal() and LAST <= int(text) <= 100_000):
        raise argparse.ArgumentTypeError(f"{text}: allowed are whole numbers from {LAST} to 100000")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=step_count, default=300)
    parser.add_argument("--seeds", type=whole, default=1, help="runs of each variant: 0, 1, ...")
    parser.add_argument(
        "--only", choices=list(VARIANTS), nargs="+", default=list(VARIANTS), help="beside fp32"
    )
    parser.add_argument("--quick", action="store_true", help="40 steps")
    parser.add_argument("--json", type=Path, help="also write all losses to this file")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the loss curves")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = 40 if options.quick else options.steps
    names = [name for name in VARIANTS if name == FP32 or name in options.only]
    progress = Progress("convergence")
    found: dict[str, list[dict[str, Any]]] = {}
    todo = [(name, seed) for seed in range(options.seeds) for name in names]
    for number, (name, seed) in enumerate(todo, 1):
        head = f"{name}, seed {seed} ({number} of {len(todo)})"

        def tell(step: int, loss: float, head: str = head) -> None:
            progress(f"{head}, step {step + 1} of {steps}: {loss:.3f}")

        found.setdefault(name, []).append(train(name, steps, seed, tell))
    progress.clear()
    runs = {name: over_seeds(of_seeds) for name, of_seeds in found.items()}
    compare(runs)
    show(runs, steps)
    write_json(options.json, {"steps": steps, "runs": runs})
    if options.plot is not None:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
