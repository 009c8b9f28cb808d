"""AdamW and SGD with the same bits on unequal hosts.

Each is a fixed sequence of single elementwise additions, multiplications, divisions and square
roots, which IEEE 754 rounds exactly one way, over fixed pieces of flat float32 vectors. No
operation with a hidden multiply-add (``alpha=``, ``addcmul``, fused kernels): some processors
round those once, some twice. Scalars come in the ``Update``.

On the CPU they are numpy's: its square root is the processor's, while torch's comes from a vector
library that is off by one bit in a sixth of all values; and its calls cost less. Elsewhere they are
torch's, whose functions have the same names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from swarm.core.update import Update
from swarm.manifest_sections import Optimizer as OptimizerSection

PIECE = 1 << 17
"""Floats stepped at a time: what is in use fits the cache, and scratch space stays small."""


class Optimizer(Protocol):
    """Steps a piece of a flat vector of weights, given the gradient of that piece."""

    vectors: dict[str, Tensor]
    """State by its usual name in torch, float32, each as long as the weights."""

    def step(self, weights: Tensor, gradient: Tensor, piece: slice, update: Update) -> None:
        """Change ``weights[piece]`` in place. ``gradient`` holds that piece only; it is spoilt."""
        ...


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter), as in ``torch.optim.AdamW``."""

    def __init__(self, section: OptimizerSection, weights: Tensor) -> None:
        self._section = section
        self._scratch = weights.new_empty(min(PIECE, weights.numel()))
        names = ("exp_avg", "exp_avg_sq")
        self.vectors = {name: torch.zeros_like(weights) for name in names}

    @np.errstate(all="ignore")
    def step(self, weights: Tensor, gradient: Tensor, piece: slice, update: Update) -> None:
        section, (beta1, beta2) = self._section, self._section.betas
        m, v = self.vectors["exp_avg"][piece], self.vectors["exp_avg_sq"][piece]
        tmp = self._scratch[: gradient.numel()]
        do, (w, g, m, v, tmp) = _arithmetic(weights[piece], gradient, m, v, tmp)
        do.multiply(g, g, out=tmp)
        do.multiply(v, beta2, out=v)
        do.multiply(tmp, 1.0 - beta2, out=tmp)
        do.add(v, tmp, out=v)
        do.multiply(m, beta1, out=m)
        do.multiply(g, 1.0 - beta1, out=g)
        do.add(m, g, out=m)
        do.sqrt(v, out=tmp)
        do.divide(tmp, _divisor(math.sqrt(update.bias2), tmp), out=tmp)
        do.add(tmp, section.eps, out=tmp)
        do.divide(m, tmp, out=tmp)
        if section.weight_decay:
            do.multiply(w, 1.0 - update.lr * section.weight_decay, out=w)
        do.multiply(tmp, update.lr / update.bias1, out=tmp)
        do.subtract(w, tmp, out=w)


class Sgd:
    """Gradient descent with L2 decay and momentum, as in ``torch.optim.SGD``."""

    def __init__(self, section: OptimizerSection, weights: Tensor) -> None:
        self._section = section
        self._scratch = weights.new_empty(min(PIECE, weights.numel()))
        names = ("momentum_buffer",) if section.momentum else ()
        self.vectors = {name: torch.zeros_like(weights) for name in names}

    @np.errstate(all="ignore")
    def step(self, weights: Tensor, gradient: Tensor, piece: slice, update: Update) -> None:
        tmp = self._scratch[: gradient.numel()]
        buffers = [buffer[piece] for buffer in self.vectors.values()]
        do, (w, g, tmp, *buffers) = _arithmetic(weights[piece], gradient, tmp, *buffers)
        if self._section.weight_decay:
            do.multiply(w, self._section.weight_decay, out=tmp)
            do.add(g, tmp, out=g)
        for buffer in buffers:
            do.multiply(buffer, self._section.momentum, out=buffer)
            do.add(buffer, g, out=buffer)
            g = buffer
        do.multiply(g, update.lr, out=tmp)
        do.subtract(w, tmp, out=w)


def _arithmetic(*tensors: Tensor) -> tuple[Any, list[Any]]:
    """What has the operations for tensors on this device, and the tensors as it takes them."""
    if tensors[0].device.type == "cpu":
        return np, [tensor.numpy() for tensor in tensors]
    return torch, list(tensors)


def _divisor(value: float, divided: Any) -> Any:
    """``value`` as ``divided`` has to be divided by it, so that the quotient is rounded once.

    On CUDA torch inverts a number and multiplies, which rounds twice; a tensor it divides by.
    """
    return divided.new_full((), value) if isinstance(divided, Tensor) else value


def make_optimizer(section: OptimizerSection, weights: Tensor) -> Optimizer:
    """The optimizer of the manifest with fresh state for the flat float32 ``weights``."""
    return AdamW(section, weights) if section.kind == "adamw" else Sgd(section, weights)


def pieces(length: int) -> Iterator[slice]:
    """The fixed pieces of a vector, in order."""
    for start in range(0, length, PIECE):
        yield slice(start, min(length, start + PIECE))
