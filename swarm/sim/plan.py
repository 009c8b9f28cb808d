"""What a run would do on given machines: its manifest as a scenario, played by the simulator.

So the prediction comes from the same decisions as the run itself: who gets which microbatch, how
many are in flight, when a step ends. What is predicted is as good as the speeds that are given.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from swarm.codecs import get_codec
from swarm.errors import ConfigError
from swarm.manifest import Manifest
from swarm.manifest_text import shown
from swarm.model.memory import StageMemory, mib
from swarm.model.needs import bytes_per_value, stage_memories
from swarm.model.registry import stage_layers
from swarm.model.spec import ModelSpec
from swarm.sim.engine import simulate
from swarm.sim.scenario import Scenario

MEGABYTE = 1e6
GIB = 1 << 30
STEPS = 8
"""That are played; the first two find the window and are left out."""
SETTLE = 2
MOST_STAGES = 64
PROBE = 1 << 16
"""Floats by which the size of encoded ones is found."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one way to cut and feed the model. Bytes are a peer's in one step, at most."""

    manifest: Manifest
    layers: tuple[range, ...]
    memories: tuple[StageMemory, ...]
    step_s: float
    sent_bytes: float

    @property
    def samples_per_s(self) -> float:
        batch = self.manifest.batch
        return batch.microbatch * batch.microbatches / self.step_s


def read_peers(path: str | Path) -> dict[str, Any]:
    """The tables ``[[peers]]`` and ``[latency]`` of a TOML file, as in a scenario.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError("--peers", str(path), f"a readable TOML file ({why})") from None
    for name in tree:
        if name not in ("peers", "latency"):
            raise ConfigError(name, shown(tree[name]), "[[peers]] and [latency] alone")
    if not isinstance(tree.get("peers"), list):
        raise ConfigError("peers", shown(tree.get("peers")), "a [[peers]] table for each kind")
    Scenario.from_tree(tree)
    return tree


def more_peers(peers: Mapping[str, Any]) -> dict[str, Any]:
    """The same with one more of the first kind."""
    first, *others = peers["peers"]
    return {**peers, "peers": [{**first, "count": first.get("count", 16) + 1}, *others]}


def count_of(peers: Mapping[str, Any]) -> int:
    return sum(group.get("count", 16) for group in peers["peers"])


def forecast(manifest: Manifest, spec: ModelSpec, peers: Mapping[str, Any]) -> Forecast:
    """The run of ``manifest`` on ``peers`` (see ``read_peers``), played for some steps.

    The layers' costs are taken as FLOPs a sample, a third of them forward.

    Raises:
        ConfigError: the model cannot be cut so, or there are fewer peers than stages, or no stage
            fits where it would have to.
    """
    ranges = stage_layers(manifest, spec)
    memories = stage_memories(manifest, spec)
    if count_of(peers) < len(ranges):
        allowed = f"at most {count_of(peers)}, as many as there are peers"
        raise ConfigError("stages.count", len(ranges), allowed)
    _check_memory(memories, peers)
    stages = [_stage(manifest, spec, *pair) for pair in zip(ranges, memories, strict=True)]
    batch = manifest.batch
    tree = {
        **peers,
        "mode": "microbatch",
        "stage": stages,
        "step": {"microbatches": batch.microbatches, "microbatch": batch.microbatch},
        "rebalancing": {"rule": "none"},
        "wiring": {"window": manifest.limits.window},
    }
    duration_s = 10.0 * batch.microbatches * batch.microbatch * _slowest_s(stages, peers)
    for _ in range(6):
        outcome = simulate(Scenario.from_tree({**tree, "duration_s": duration_s}).world())
        if len(outcome.steps) > SETTLE + 1:
            break
        duration_s *= 4
    else:
        raise ConfigError("peers", count_of(peers), "machines that finish some steps")
    ends = outcome.steps[: STEPS + 1]
    seconds = [after - before for before, after in pairwise(ends[SETTLE:])]
    sent = max(outcome.sent_bytes.values(), default=0.0) / len(outcome.steps)
    return Forecast(manifest, tuple(ranges), memories, median(seconds), sent)


def _check_memory(memories: Sequence[StageMemory], peers: Mapping[str, Any]) -> None:
    """Raises ConfigError if there is no machine for each stage: the largest to the largest."""
    rooms: list[float] = []
    for group in peers["peers"]:
        room = group.get("memory_gib", 0.0) * GIB
        rooms += [room or inf] * group.get("count", 16)
    rooms.sort(reverse=True)
    for memory, room in zip(sorted(memories, key=lambda one: -one.least), rooms, strict=False):
        if memory.least > room:
            allowed = f"machines with more memory: a stage takes at least {mib(memory.least)}"
            raise ConfigError("peers", f"memory_gib = {room / GIB:g}", allowed)


def _slowest_s(stages: Sequence[Mapping[str, float]], peers: Mapping[str, Any]) -> float:
    """Of one sample through the dearest stage at the slowest peer, and over its link."""
    work = max(stage["forward_tflop"] + stage["backward_tflop"] for stage in stages)
    carried = max(stage["output_mb"] + stage["gradient_mb"] for stage in stages)
    speed = min(group.get("tflops", 15.0) for group in peers["peers"])
    link = min(
        group.get(way, 200.0) for group in peers["peers"] for way in ("up_mbps", "down_mbps")
    )
    return work / speed + 8 * carried / link


def _stage(
    manifest: Manifest, spec: ModelSpec, layers: range, memory: StageMemory
) -> dict[str, float]:
    """A stage as a scenario has it, for one sample."""
    work = max(3e-9, sum(spec.layers[index].cost for index in layers) / 1e12)
    numbers = memory.vectors / bytes_per_value(manifest)
    last = layers.stop == len(spec.layers)
    output = 0 if last else spec.layers[layers.stop - 1].output.nbytes(1)
    given = 0 if layers.start == 0 else spec.layers[layers.start - 1].output.nbytes(1)
    wire = manifest.wire
    return {
        "forward_tflop": work / 3,
        "backward_tflop": 2 * work / 3,
        "output_mb": output * share_of_fp32(wire.activations) / MEGABYTE,
        "gradient_mb": given * share_of_fp32(wire.gradients) / MEGABYTE,
        "vector_mb": 4 * numbers * share_of_fp32(wire.averaging) / MEGABYTE,
        "state_mb": 4 * numbers * 3 / MEGABYTE,
        "memory_gib": memory.least / GIB,
    }


def share_of_fp32(codec: str) -> float:
    """Encoded bytes over those of fp32."""
    return get_codec(codec).nbytes(PROBE) / (4 * PROBE)


def best_cut(
    manifest: Manifest, spec: ModelSpec, peers: Mapping[str, Any]
) -> tuple[list[Forecast], Forecast]:
    """Forecasts for each number of stages that can be, and the best of them; then with the best
    size of a microbatch, the samples of a step being the same.

    Raises:
        ConfigError: none can be.
    """
    most = min(len(spec.layers), count_of(peers), MOST_STAGES)
    found: list[Forecast] = []
    error: ConfigError | None = None
    for count in range(1, most + 1):
        try:
            changed = manifest.changed({"stages.count": count, "stages.cuts": []})
            found.append(forecast(changed, spec, peers))
        except ConfigError as problem:
            error = problem
    if not found:
        raise error or ConfigError("peers", count_of(peers), "at least one peer")
    best = max(found, key=lambda one: one.samples_per_s)
    for size in microbatch_sizes(best.manifest):
        try:
            other = forecast(best.manifest.changed(size), spec, peers)
        except ConfigError:
            continue  # it does not fit
        best = max(best, other, key=lambda one: one.samples_per_s)
    return found, best


def microbatch_sizes(manifest: Manifest) -> list[dict[str, object]]:
    """A quarter, half, twice and four times as large, of the same samples in a step, and with
    four a stage at least: beyond that a machine's speed would be another."""
    size = manifest.batch.microbatch
    samples, least = size * manifest.batch.microbatches, 4 * manifest.stages.count
    sizes = {size // 4, size // 2, 2 * size, 4 * size} - {0}
    return [
        {"batch.microbatch": other, "batch.microbatches": samples // other}
        for other in sorted(sizes)
        if samples % other == 0 and samples // other >= least
    ]
