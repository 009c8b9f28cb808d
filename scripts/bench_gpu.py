#!/usr/bin/env python3
"""Two stages in two processes on one GPU beside one process that has it to itself.

Both compute the same work, in turn within one run; the swarm's speed is printed as a multiple of
one process. One card computes no more for being shared, so 1 is the most to be hoped for: what is
missing is what copies, network and the pipeline's ends leave idle. Also: how many stages were at
work at a time (above 1, one's forward overlaps the other's backward), and the highest memory use.
With --device cpu the same on processors, which shows only that the script works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers.device import choose_device
from peers.starting import user_errors
from scripts._bench import ROOT, Progress, median, whole, write_json
from scripts._processes import LOOPBACK, Process, Swarm
from swarm.model.device import Device

STAGES = 2
MANIFEST = """
name = "bench-gpu"
[model]
d_model = {d_model}
layers = {layers}
heads = {heads}
sequence = {sequence}
autocast = "{autocast}"
[stages]
count = {stages}
[batch]
microbatch = 8
microbatches = 16
[wire]
activations = "{wire}"
gradients = "{wire}"
[run]
steps = 1000
eval_every = 0
checkpoint_every = 0
"""
LARGE = {"d_model": 1024, "layers": 12, "heads": 16, "sequence": 512}
SMALL = {"d_model": 64, "layers": 2, "heads": 2, "sequence": 32}

Figures = dict[str, Any]


class CardSwarm(Swarm):
    """All of its nodes on ``device``."""

    def __init__(self, manifest: str, progress: Progress, device: str) -> None:
        super().__init__(manifest, progress)
        self._device = device

    def node(self, stage: int, key: str | None = None) -> Process:
        key = key or f"node-{len(self.nodes)}"
        flags = ("--identity", self.folder / f"{key}.key", "--listen", LOOPBACK)
        words = ("node", "--join", self.address, "--stage", stage, "--stay")
        process = self.start(key, *words, *flags, "--device", self._device)
        self.nodes.append((stage, process))
        return process


def one_process(text: str, device: str, steps: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        manifest = Path(folder) / "run.toml"
        manifest.write_text(text)
        words = ("scripts._gpu_single", str(manifest), "--device", device, "--steps", str(steps))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, env=environment
        )
    if done.returncode:
        raise RuntimeError(f"one process failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def two_stages(text: str, device: str, steps: int, progress: Progress) -> Figures:
    with CardSwarm(text, progress, device) as swarm:
        swarm.open(STAGES, 1)
        swarm.wait_for_steps(steps)
        steady = [step.figures for step in swarm.metrics.steps[-steps:]]
    seconds = sum(step["seconds"] for step in steady)
    phases = {
        name: sum(step["phases"][name] for step in steady) / seconds
        for name in ("compute_s", "encode_s", "link_s", "close_s")
    }
    rates = [step["samples"] / step["seconds"] for step in steady]
    return {"samples_per_s": median(rates), "at_work": phases.pop("compute_s"), **phases}


# -- memory -----------------------------------------------------------------------------------


def used_bytes(device: Device) -> Callable[[], int]:
    """Measures what is in use: of a GPU by all processes, else by ours and their children."""
    if device.copies:
        import torch

        def of_the_card() -> int:
            free, total = torch.cuda.mem_get_info(device.torch_device)
            return int(total - free)

        return of_the_card

    me = psutil.Process()

    def of_children() -> int:
        total = 0
        for process in me.children(recursive=True):
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue  # it has just ended
        return total

    return of_children


@contextmanager
def peak(used: Callable[[], int], into: Figures) -> Iterator[None]:
    """Put the most that was in use in the block, beyond what was before, ``into`` figures."""
    before, over = used(), threading.Event()
    found = [before]

    def watch() -> None:
        while not over.wait(0.1):
            found.append(used())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        into["peak_bytes"] = max(found) - before


# -- all of it --------------------------------------------------------------------------------


def measure(options: argparse.Namespace, device: Device) -> Figures:
    shape = SMALL if options.quick else LARGE
    runs, steps = (1, 2) if options.quick else (options.runs, options.steps)
    one_text, two_text = (
        MANIFEST.format(**shape, stages=n, autocast=options.autocast, wire=options.wire)
        for n in (1, STAGES)
    )
    used, progress = used_bytes(device), Progress("bench_gpu")
    ones: list[Figures] = []
    twos: list[Figures] = []
    for turn in range(runs):
        print(f"round {turn + 1} of {runs}", file=sys.stderr)
        memory: list[Figures] = [{}, {}]
        with peak(used, memory[0]):
            one = one_process(one_text, options.device, steps)
        with peak(used, memory[1]):
            two = two_stages(two_text, options.device, steps, progress)
        ones.append(one | memory[0])
        twos.append(two | memory[1])
    multiples = [b["samples_per_s"] / a["samples_per_s"] for a, b in zip(ones, twos, strict=True)]
    return {
        "device": device.words,
        "shape": shape,
        "autocast": options.autocast,
        "wire": options.wire,
        "multiple": median(multiples),
        "multiples": multiples,
        "one process": _medians(ones),
        "two stages": _medians(twos),
        "same_bits": all(one["same_bits"] for one in ones),
    }


def _medians(rows: list[Figures]) -> Figures:
    names = [name for name, value in rows[0].items() if isinstance(value, int | float)]
    return {name: median([row[name] for row in rows]) for name in names if name != "same_bits"}


def show(figures: Figures) -> None:
    print(f"{figures['device']}, autocast {figures['autocast']}, wire {figures['wire']}")
    print(f"{'':16}{'samples/s':>10}{'multiple':>10}{'peak MiB':>10}")
    for name, multiple in (("one process", 1.0), ("two stages", figures["multiple"])):
        row = figures[name]
        mib = row["peak_bytes"] / (1 << 20)
        print(f"{name:16}{row['samples_per_s']:10.1f}{multiple:10.2f}{mib:10.0f}")
    two = figures["two stages"]
    print(
        f"\ntwo stages: {two['at_work']:.2f} at work at a time; the step's end takes "
        f"{two['close_s']:.1%}; encoding {two['encode_s']:.1%} and links {two['link_s']:.1%} of "
        "the time, beside computing"
    )
    if figures["device"] != "cpu":
        same = "yes" if figures["same_bits"] else "NO"
        print(f"optimizer steps have the bits of the CPU: {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the script")
    parser.add_argument("--runs", type=whole, default=3, help="rounds; medians are over these")
    parser.add_argument("--steps", type=whole, default=5, help="steady steps of each measurement")
    parser.add_argument("--autocast", choices=("none", "bf16"), default="bf16")
    parser.add_argument("--wire", choices=("fp32", "bf16", "int8"), default="bf16")
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with user_errors():
        device = choose_device(options.device)
    try:
        figures = measure(options, device)
    except RuntimeError as error:
        sys.exit(f"failed: {error}")
    show(figures)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
