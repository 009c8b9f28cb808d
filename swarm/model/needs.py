"""What each stage of a model takes of the machine that serves it."""

from __future__ import annotations

import torch
from torch import nn

from swarm.core.rebalancing import Need
from swarm.manifest import Manifest
from swarm.model.registry import build_layer, stage_layers
from swarm.model.spec import ModelSpec

FEW = 1 << 24
"""Numbers of a whole model that are drawn in less time than torch takes to do without them."""

_LEAST_COST = 1e-9
"""A stage that costs nothing at all still has to be somewhere."""


def stage_needs(manifest: Manifest, spec: ModelSpec) -> tuple[Need, ...]:
    """Cost (in the unit of the layers' ``cost``) and memory of one replica, for each stage.

    Memory counts the vectors that a replica holds and the stage inputs of all its contexts, not
    the activations inside the graphs that it keeps, which depend on the model's code.

    Raises:
        ConfigError: the model cannot be cut as the manifest says.
    """
    needs = []
    for stage, layers in enumerate(stage_layers(manifest, spec)):
        sizes = [_values(manifest, spec, index) for index in layers]
        trained, frozen = (sum(column) for column in zip(*sizes, strict=True))
        inputs = spec.input if stage == 0 else spec.layers[layers[0] - 1].output
        held = manifest.limits.contexts + manifest.limits.queue
        needs.append(
            Need(
                cost=max(_LEAST_COST, sum(spec.layers[index].cost for index in layers)),
                memory_bytes=trained * bytes_per_value(manifest)
                + 4 * frozen
                + held * inputs.nbytes(manifest.batch.microbatch),
            )
        )
    return tuple(needs)


def bytes_per_value(manifest: Manifest) -> int:
    """Bytes of a replica for each trainable number.

    Weight, its gradient, the optimizer's state; and three sums (accumulator, the sum of the round
    under way, the last decided one), which are twice as wide in reproducible mode. With delayed
    updates also the older weights, and the accumulator of the step ahead.
    """
    delay = manifest.step.delay
    state = 2 if manifest.optimizer.kind == "adamw" else int(manifest.optimizer.momentum > 0)
    sums = (3 + delay) * (8 if manifest.reproducible.enabled else 4)
    return 4 * (2 + state + delay) + sums


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


def _values(manifest: Manifest, spec: ModelSpec, index: int) -> tuple[int, int]:
    """How many trained and how many frozen numbers a layer has of its own."""
    module = _built(manifest, spec, index)
    tied = {tie.name for tie in spec.layers[index].ties}
    trained = frozen = 0
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name not in tied:
            trained += parameter.numel()
        elif not parameter.requires_grad:
            frozen += parameter.numel()
    return trained, frozen
