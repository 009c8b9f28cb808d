#!/usr/bin/env python3
"""One process that trains the whole model on one device, with the swarm's own stage code.

Prints one JSON object: samples a second, the highest memory use, and whether a step of the
optimizer gives the bits that it gives on the CPU. A process of its own, so that what it leaves in
the device's memory is gone when it ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.device import choose_device
from swarm.core.update import Update
from swarm.manifest import Manifest
from swarm.model.device import CPU, Device
from swarm.model.registry import model_spec
from swarm.model.stage import StageModel

WARM_UP = 2
UPDATE = Update(lr=1e-3, scale=0.5, bias1=0.1, bias2=0.05, skip=False)


def train(manifest: Manifest, device: Device, steps: int) -> dict[str, Any]:
    stage = StageModel(manifest, model_spec(manifest), 0, device=device)
    batch, times = manifest.batch, []
    for t in range(WARM_UP + steps):
        began = time.perf_counter()
        for m in range(batch.microbatches):
            count(stage, device, tokens(manifest, t * batch.microbatches + m))
        stage.apply(stage.accumulators, UPDATE)
        stage.clear_accumulators()
        device.read([stage.weights[:1]])  # the step is over when the device says so
        times.append(time.perf_counter() - began)
    steady = statistics.median(times[WARM_UP:])
    return {"samples_per_s": batch.microbatch * batch.microbatches / steady}


def count(stage: StageModel, device: Device, text: Tensor) -> None:
    """One microbatch: what a replica does with one, and one readback."""
    inputs = device.to_device(text[:, :-1].contiguous()).wait()
    targets = device.to_device(text[:, 1:].contiguous()).wait()
    graph = stage.forward_to_loss(inputs, targets)
    stage.backward(graph, None)
    probe = stage.gradient_probe()
    assert probe is not None
    if not stage.gradient_fits(device.read([probe, graph.output])[0]):
        raise RuntimeError("a gradient is not finite")
    stage.accumulate()


def tokens(manifest: Manifest, number: int) -> Tensor:
    """Random bytes cost what text costs: uint8 (microbatch, sequence + 1)."""
    generator = torch.Generator().manual_seed(number)
    shape = (manifest.batch.microbatch, manifest.model.sequence + 1)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


def same_bits(device: Device) -> bool:
    """Whether three optimizer steps leave the CPU's bits, from sums that are on the host."""
    manifest = Manifest.from_tree({"model": {"d_model": 64, "layers": 2, "heads": 2}})
    spec = model_spec(manifest)
    stages = [StageModel(manifest, spec, 0, device=one) for one in (CPU, device)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        total = torch.randn(stages[0].length, generator=generator)
        for stage in stages:
            room = stage.device.room(total).copy_(total)
            stage.apply(room, UPDATE)
            stage.device.read([stage.weights[:1]])
    ours, theirs = (stage.state().values() for stage in stages)
    return all(torch.equal(a, b.cpu()) for a, b in zip(ours, theirs, strict=True))


def peak_bytes(device: Device) -> int:
    """That torch has held for tensors at once on a GPU; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device.torch_device) if device.copies else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = choose_device(options.device)
    found = train(Manifest.load(options.manifest), device, options.steps)
    found |= {"allocated_bytes": peak_bytes(device), "same_bits": same_bits(device)}
    sys.stdout.write(json.dumps(found | {"device": device.words}) + "\n")


if __name__ == "__main__":
    main()
