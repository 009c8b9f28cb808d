"""What each stage of a model takes of the machine that serves it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarm.codecs import get_codec
from swarm.core.rebalancing import Need
from swarm.manifest import Manifest
from swarm.model.activations import saved_bytes
from swarm.model.memory import StageMemory
from swarm.model.registry import build_layer, stage_layers
from swarm.model.spec import ModelSpec, TensorSpec

logger = logging.getLogger("swarm.model")

FEW = 1 << 24
"""Numbers of a whole model that are drawn in less time than torch takes to do without them."""

_LEAST_COST = 1e-9
"""A stage that costs nothing at all still has to be somewhere."""


def stage_needs(manifest: Manifest, spec: ModelSpec) -> tuple[Need, ...]:
    """Cost (in the unit of the layers' ``cost``) and least memory of one replica, by stage.

    Raises:
        ConfigError: the model cannot be cut as the manifest says.
    """
    return needs_of(manifest, spec, stage_memories(manifest, spec))


def needs_of(
    manifest: Manifest, spec: ModelSpec, memories: Sequence[StageMemory]
) -> tuple[Need, ...]:
    """``stage_needs``, where ``stage_memories`` are known."""
    needs = []
    for layers, memory in zip(stage_layers(manifest, spec), memories, strict=True):
        cost = max(_LEAST_COST, sum(spec.layers[index].cost for index in layers))
        needs.append(Need(cost=cost, memory_bytes=memory.least))
    return tuple(needs)


def stage_memories(manifest: Manifest, spec: ModelSpec) -> tuple[StageMemory, ...]:
    """What one replica of each stage takes.

    Raises:
        ConfigError: the model cannot be cut as the manifest says.
    """
    ranges = stage_layers(manifest, spec)
    looks = [_look_at(manifest, spec, index) for index in range(len(spec.layers))]
    return tuple(
        _stage_memory(manifest, spec, looks[layers.start : layers.stop], layers, stage)
        for stage, layers in enumerate(ranges)
    )


def _stage_memory(
    manifest: Manifest, spec: ModelSpec, looks: Sequence[_Layer], layers: range, stage: int
) -> StageMemory:
    limits, batch = manifest.limits, manifest.batch
    # No more are under way than a step has; with delayed updates, than two have.
    flying = batch.microbatches * (1 + manifest.step.delay)
    if limits.window:
        flying = min(flying, limits.window)
    last = stage == manifest.stages.count - 1
    waiting = min(limits.queue, flying)
    contexts = 0 if last else min(limits.contexts, flying)
    inputs = _inputs(spec, layers[0]).nbytes(batch.microbatch)
    return StageMemory(
        vectors=sum(look.trained for look in looks) * bytes_per_value(manifest)
        + 4 * sum(look.frozen for look in looks),
        inputs=min(flying, waiting + contexts) * inputs,
        graphs=min(limits.graphs, contexts),
        saved=sum(look.saved for look in looks),
        layer_inputs=sum(_inputs(spec, index).nbytes(batch.microbatch) for index in layers),
        largest=max(look.saved for look in looks),
    )


def _inputs(spec: ModelSpec, layer: int) -> TensorSpec:
    return spec.input if layer == 0 else spec.layers[layer - 1].output


def bytes_per_value(manifest: Manifest) -> int:
    """Bytes of a replica for each trainable number.

    Weight, its gradient, the optimizer's state; and three sums (accumulator, the sum of the round
    under way, the last decided one), which are twice as wide in reproducible mode. With delayed
    updates also the older weights, and the accumulator of the step ahead. Averaging with a lossy
    codec remembers what it has lost, and what it is losing.
    """
    delay = manifest.step.delay
    state = 2 if manifest.optimizer.kind == "adamw" else int(manifest.optimizer.momentum > 0)
    sums = (3 + delay) * (8 if manifest.reproducible.enabled else 4)
    lossy = 0 if get_codec(manifest.wire.averaging).lossless else 2
    return 4 * (2 + state + delay + lossy) + sums


def _built(manifest: Manifest, spec: ModelSpec, index: int) -> nn.Module:
    """The layer, without its numbers if they are many and torch allows that.

    Not if they are few: torch's first tensor without numbers costs a second of imports.
    """
    if 0 < manifest.model.parameters <= FEW:
        return build_layer(manifest, spec, index)
    try:
        with torch.device("meta"):
            return spec.layers[index].build()
    except (RuntimeError, TypeError, ValueError, AttributeError):
        # The user's code may need real tensors.
        return build_layer(manifest, spec, index)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Trained and frozen numbers of its own, and the bytes that one microbatch's graph saves."""

    trained: int
    frozen: int
    saved: int


def _look_at(manifest: Manifest, spec: ModelSpec, index: int) -> _Layer:
    module = _built(manifest, spec, index)
    tied = {tie.name for tie in spec.layers[index].ties}
    trained = frozen = 0
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name not in tied:
            trained += parameter.numel()
        elif not parameter.requires_grad:
            frozen += parameter.numel()
    return _Layer(trained, frozen, _saved(manifest, spec, index, module))


def _saved(manifest: Manifest, spec: ModelSpec, index: int, module: nn.Module) -> int:
    last = index == len(spec.layers) - 1

    def loss(outputs: Tensor) -> Tensor:
        shape, dtype = spec.target.batch_shape(len(outputs)), spec.target.torch_dtype
        return spec.loss(outputs, torch.zeros(shape, dtype=dtype, device=outputs.device))

    try:
        inputs = _inputs(spec, index)
        return saved_bytes(module, inputs, manifest.batch.microbatch, loss if last else None)
    except Exception as error:
        # The user's code may raise anything on inputs of zeros; training will tell if it is broken.
        logger.error(
            "memory: layer %s cannot be tried (%s); its activations are not counted",
            spec.layers[index].name,
            error,
        )
        logger.debug("where it came from", exc_info=error)
        return 0
