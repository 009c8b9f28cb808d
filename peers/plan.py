"""``swarm plan``: what a run would do on given machines, and how to cut it for them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from peers.starting import console, user_errors
from swarm.manifest import Manifest
from swarm.model.memory import mib
from swarm.model.registry import model_spec
from swarm.model.spec import ModelSpec, TensorSpec
from swarm.model.stage import StageModel
from swarm.sim.plan import Forecast, best_cut, count_of, forecast, more_peers, read_peers

TRIES = 5


def run_plan_command(
    manifest: Manifest, peers_file: Path, *, allow: Sequence[str], as_json: bool
) -> None:
    with user_errors():
        spec = model_spec(manifest, allow)
        peers = read_peers(peers_file)
        asked = (
            forecast(manifest, spec, peers) if manifest.stages.count <= count_of(peers) else None
        )
        with console.status("trying numbers of stages and sizes of microbatches"):
            cuts, best = best_cut(manifest, spec, peers)
            next_ = forecast(best.manifest, spec, more_peers(peers))
    if as_json:
        found = {
            "asked": None if asked is None else plain(asked),
            "cuts": [plain(cut) for cut in cuts],
            "best": plain(best),
            "one_more_peer": {"samples_per_s": next_.samples_per_s},
        }
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    console.print(table(cuts, best, asked))
    console.print(advice(best, next_), soft_wrap=True)


def plain(one: Forecast) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "stages": len(one.layers),
        "cuts": [layers.start for layers in one.layers[1:]],
        "microbatch": one.manifest.batch.microbatch,
        "microbatches": one.manifest.batch.microbatches,
        "step_s": one.step_s,
        "samples_per_s": one.samples_per_s,
        "memory_bytes": [memory.total(memory.full) for memory in one.memories],
        "least_memory_bytes": [memory.least for memory in one.memories],
        "sent_bytes_per_step": one.sent_bytes,
    }


def table(cuts: Sequence[Forecast], best: Forecast, asked: Forecast | None) -> Table:
    """A line for each way to cut, then the proposal, then what the manifest says."""
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    drawn.add_column("", no_wrap=True)
    for name in ("stages", "microbatch", "step", "samples/s", "memory", "at least", "sent a step"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for cut in cuts:
        drawn.add_row("", *cells(cut))
    drawn.add_row("proposed", *cells(best), style="bold green")
    if asked is not None:
        drawn.add_row("as it is", *cells(asked), style="bold")
    return drawn


def cells(one: Forecast) -> list[str]:
    batch = one.manifest.batch
    return [
        str(len(one.layers)),
        f"{batch.microbatches} x {batch.microbatch}",
        f"{one.step_s:.2f} s",
        f"{one.samples_per_s:,.1f}",
        mib(max(memory.total(memory.full) for memory in one.memories)),
        mib(max(memory.least for memory in one.memories)),
        f"{one.sent_bytes / 1e6:,.1f} MB",
    ]


def advice(best: Forecast, next_: Forecast) -> str:
    """The proposal as lines for the manifest, and what one more peer would bring."""
    batch, gain = best.manifest.batch, next_.samples_per_s / best.samples_per_s - 1
    cuts = ", ".join(str(layers.start) for layers in best.layers[1:])
    return (
        f"\n[stages]\ncount = {len(best.layers)}\ncuts = [{cuts}]\n[batch]\n"
        f"microbatch = {batch.microbatch}\nmicrobatches = {batch.microbatches}\n\n"
        f"One more machine of the first kind, with these stages: {gain:+.1%} samples/s. Memory is "
        "that of the largest stage, beside the process itself (400 MiB). A machine is taken to be "
        "as fast with small microbatches as with large ones: measure at the proposed size."
    )


def measured_tflops(manifest: Manifest, spec: ModelSpec) -> float:
    """What this machine's processor does, one thread, training the whole model: the speed for a
    ``[[peers]]`` table. The median of some microbatches."""
    torch.set_num_threads(1)
    whole = manifest.changed({"stages.count": 1, "stages.cuts": []})
    stage, batch = StageModel(whole, spec, 0), manifest.batch.microbatch
    inputs, targets = (_zeros(tensor, batch) for tensor in (spec.input, spec.target))
    work = sum(layer.cost for layer in spec.layers) * batch
    seconds = []
    for _ in range(TRIES + 2):
        began = time.perf_counter()
        _, graph = stage.forward_loss(inputs, targets)
        stage.backward(graph, None)
        stage.gradient_finite()
        stage.accumulate()
        seconds.append(time.perf_counter() - began)
    return work / median(seconds[2:]) / 1e12


def _zeros(tensor: TensorSpec, batch: int) -> torch.Tensor:
    return torch.zeros(tensor.batch_shape(batch), dtype=tensor.torch_dtype)


def run_measure_command(manifest: Manifest, *, allow: Sequence[str]) -> None:
    """Print the ``tflops`` of this machine for this model."""
    with user_errors():
        spec = model_spec(manifest, allow)
    console.print(f"tflops = {measured_tflops(manifest, spec):.6f}")
