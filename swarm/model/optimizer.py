"""AdamW and SGD with the same bits on unequal hosts.

Each is a fixed sequence of single elementwise additions, multiplications, divisions and square
roots, which IEEE 754 rounds exactly one way, over fixed pieces of flat float32 vectors. No
operation with a hidden multiply-add (``alpha=``, ``addcmul``, fused kernels): some processors
round those once, some twice. Scalars come in the ``Update``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from swarm.core.update import Update
from swarm.manifest_sections import Optimizer as OptimizerSection

PIECE = 1 << 16
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

    def step(self, weights: Tensor, gradient: Tensor, piece: slice, update: Update) -> None:
        beta1, beta2 = self._section.betas
        w = weights[piece]
        m, v = self.vectors["exp_avg"][piece], self.vectors["exp_avg_sq"][piece]
        tmp = self._scratch[: w.numel()]
        torch.mul(gradient, gradient, out=tmp)
        v.mul_(beta2).add_(tmp.mul_(1.0 - beta2))
        m.mul_(beta1).add_(gradient.mul_(1.0 - beta1))
        torch.sqrt(v, out=tmp)
        tmp.div_(math.sqrt(update.bias2)).add_(self._section.eps)
        torch.div(m, tmp, out=tmp)
        w.mul_(1.0 - update.lr * self._section.weight_decay)
        w.sub_(tmp.mul_(update.lr / update.bias1))


class Sgd:
    """Gradient descent with L2 decay and momentum, as in ``torch.optim.SGD``."""

    def __init__(self, section: OptimizerSection, weights: Tensor) -> None:
        self._section = section
        self._scratch = weights.new_empty(min(PIECE, weights.numel()))
        names = ("momentum_buffer",) if section.momentum else ()
        self.vectors = {name: torch.zeros_like(weights) for name in names}

    def step(self, weights: Tensor, gradient: Tensor, piece: slice, update: Update) -> None:
        w = weights[piece]
        tmp = self._scratch[: w.numel()]
        if self._section.weight_decay:
            torch.mul(w, self._section.weight_decay, out=tmp)
            gradient.add_(tmp)
        for buffer in self.vectors.values():
            gradient = buffer[piece].mul_(self._section.momentum).add_(gradient)
        torch.mul(gradient, update.lr, out=tmp)
        w.sub_(tmp)


def make_optimizer(section: OptimizerSection, weights: Tensor) -> Optimizer:
    """The optimizer of the manifest with fresh state for the flat float32 ``weights``."""
    return AdamW(section, weights) if section.kind == "adamw" else Sgd(section, weights)


def state_names(section: OptimizerSection) -> tuple[str, ...]:
    """The names of a stage's vectors, see ``StageModel.state``, without building one."""
    return ("weights", *make_optimizer(section, torch.empty(0)).vectors)


def pieces(length: int) -> Iterator[slice]:
    """The fixed pieces of a vector, in order."""
    for start in range(0, length, PIECE):
        yield slice(start, min(length, start + PIECE))
