"""What a model is to the swarm: a list of layers with known boundaries and costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor between layers: ``shape`` of one sample, ``dtype`` by its torch name."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises ValueError if there is no dtype of this name."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.dtype!r} is no torch dtype")
        return dtype

    def batch_shape(self, microbatch: int) -> tuple[int, ...]:
        return (microbatch, *self.shape)

    def nbytes(self, microbatch: int) -> int:
        """Bytes of ``microbatch`` samples, not encoded."""
        return microbatch * math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tie:
    """The parameter ``name`` of a layer is the parameter ``other`` of an earlier ``layer``."""

    name: str
    layer: int
    other: str


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: a module from one tensor to one tensor.

    ``build`` makes it on the CPU in float32, drawing initial weights from torch's global random
    source, which is seeded for each layer. The module must be a pure function of input and
    parameters: no dropout, no buffer that changes. ``cost`` is in any unit, e.g. FLOPs a sample.
    """

    name: str
    build: Callable[[], nn.Module]
    output: TensorSpec
    cost: float
    ties: tuple[Tie, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that can be cut between any two of its layers.

    ``loss(outputs, targets)`` is the *sum* over all loss terms of a microbatch, a scalar;
    ``loss_terms`` is how many terms a sample has (tokens of a sequence; 1 for a class label).
    """

    input: TensorSpec
    target: TensorSpec
    layers: tuple[LayerSpec, ...]
    loss: Callable[[Tensor, Tensor], Tensor]
    loss_terms: int = 1
