#!/usr/bin/env python3
"""What one would use instead: PyTorch's own static pipeline, measured on the swarm's model.

``run`` trains the built-in GPT, cut into stages of equal cost, with Schedule1F1B over gloo on
loopback: one process a stage, one torch thread each. ``single`` trains it in one process with one
thread. Both take an AdamW step after each batch; processes are fresh ones, so the caller's threads
and settings do not matter.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from swarm.manifest import Manifest
from swarm.model.registry import build_layer, model_spec, stage_layers

WARM_UP_STEPS = 2
AT_LEAST_STEPS = 3


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """The work. ``microbatch`` is in samples, ``microbatches`` make one optimizer step."""

    d_model: int = 256
    heads: int = 4
    layers: int = 8
    sequence: int = 128
    vocabulary: int = 256
    microbatch: int = 8
    microbatches: int = 16
    stages: int = 2
    lr: float = 1e-3
    seed: int = 0

    @property
    def samples(self) -> int:
        """Samples in one step."""
        return self.microbatch * self.microbatches

    def manifest(self, stages: int) -> Manifest:
        model = {
            name: getattr(self, name)
            for name in ("d_model", "heads", "layers", "sequence", "vocabulary")
        }
        return Manifest.from_tree({"seed": self.seed, "model": model, "stages": {"count": stages}})


@dataclass(frozen=True, slots=True)
class Length:
    """How long to measure: ``steps``, or as many as fill about ``seconds``."""

    seconds: float = 20.0
    steps: int | None = None

    def to_steps(self, step_s: float) -> int:
        if self.steps is not None:
            return self.steps
        return max(AT_LEAST_STEPS, math.ceil(self.seconds / step_s))


def run(config: PipelineConfig, seconds: float = 20.0, steps: int | None = None) -> float:
    """Samples per second of the static pipeline with ``config.stages`` processes."""
    return _measure(config, Length(seconds, steps), config.stages)


def single(config: PipelineConfig, seconds: float = 20.0, steps: int | None = None) -> float:
    """Samples per second of one process with one thread."""
    return _measure(config, Length(seconds, steps), 1)


def _measure(config: PipelineConfig, length: Length, processes: int) -> float:
    with tempfile.TemporaryDirectory(prefix="torch-pipeline-") as folder:
        worker = _pipeline_worker if processes > 1 else _single_worker
        mp.spawn(worker, (config, length, folder), nprocs=processes)
        return json.loads((Path(folder) / "samples_per_s").read_text())


def _single_worker(rank: int, config: PipelineConfig, length: Length, folder: str) -> None:
    torch.set_num_threads(1)
    model, loss = _stage(config, 1, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    batches = _batches(config)

    def step() -> None:
        inputs, targets = next(batches)
        microbatches = zip(
            inputs.split(config.microbatch), targets.split(config.microbatch), strict=True
        )
        for x, y in microbatches:
            (loss(model(x), y) / config.microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()

    _write_result(folder, config, *_timed(step, length))


def _pipeline_worker(rank: int, config: PipelineConfig, length: Length, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=config.stages
    )
    module, loss = _stage(config, config.stages, rank)
    stage = PipelineStage(module, rank, config.stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=config.lr)
    batches = _batches(config)

    def step() -> None:
        inputs, targets = next(batches)
        if rank == 0:
            schedule.step(inputs)
        elif rank == config.stages - 1:
            schedule.step(target=targets, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    result = _timed(step, length, dist.barrier, _agree)
    if rank == 0:
        _write_result(folder, config, *result)
    dist.destroy_process_group()


def _stage(
    config: PipelineConfig, stages: int, stage: int
) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """The layers of one stage, and the mean loss per token of a microbatch."""
    manifest = config.manifest(stages)
    spec = model_spec(manifest)
    layers = (build_layer(manifest, spec, i) for i in stage_layers(manifest, spec)[stage])
    terms = spec.loss_terms
    return nn.Sequential(*layers), lambda y, t: spec.loss(y, t) / (len(y) * terms)


def _batches(config: PipelineConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches, uint8 (samples, sequence): random bytes cost what text costs."""
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        shape = (config.samples, config.sequence + 1)
        tokens = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _timed(
    step: Callable[[], None],
    length: Length,
    barrier: Callable[[], object] = lambda: None,
    agree: Callable[[int], int] = lambda steps: steps,
) -> tuple[int, float]:
    """Steps and seconds, after warming up; the last warm-up step tells how many steps to take."""
    for _ in range(WARM_UP_STEPS):
        began = time.perf_counter()
        step()
    steps = agree(length.to_steps(time.perf_counter() - began))
    barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    barrier()
    return steps, time.perf_counter() - began


def _agree(steps: int) -> int:
    """The first process's number, in all of them."""
    number = torch.tensor(steps)
    dist.broadcast(number, 0)
    return int(number)


def _write_result(folder: str, config: PipelineConfig, steps: int, seconds: float) -> None:
    (Path(folder) / "samples_per_s").write_text(json.dumps(steps * config.samples / seconds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure PyTorch's static pipeline (Schedule1F1B over gloo) and one process."
    )
    for field in fields(PipelineConfig):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), default=field.default)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure each")
    parser.add_argument("--steps", type=int, help="measure this many steps instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = vars(parser.parse_args())
    as_json, seconds, steps = (options.pop(key) for key in ("json", "seconds", "steps"))
    config = PipelineConfig(**options)

    alone = single(config, seconds, steps)
    piped = run(config, seconds, steps)
    if as_json:
        result = {"single_samples_per_s": alone, "pipeline_samples_per_s": piped}
        print(json.dumps(result | {"multiple": piped / alone}))
        return
    print(f"one process, 1 thread         {alone:8.2f} samples/s   1.00")
    name = f"Schedule1F1B, {config.stages} processes"
    print(f"{name:<28}  {piped:8.2f} samples/s   {piped / alone:.2f}")


if __name__ == "__main__":
    main()
