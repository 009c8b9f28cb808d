"""A model that is no text: an MLP on scikit-learn's bundled digits, named by import path."""

from __future__ import annotations

import functools

import numpy as np
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from swarm.model.spec import LayerSpec, ModelSpec, TensorSpec

PIXELS, CLASSES = 64, 10


def mlp(hidden: int = 32, frozen: bool = False) -> ModelSpec:
    """Three linear layers; with ``frozen`` the first is not trained."""

    def first() -> nn.Module:
        layer = nn.Sequential(nn.Linear(PIXELS, hidden), nn.ReLU())
        return layer.requires_grad_(not frozen)

    def middle() -> nn.Module:
        return nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU())

    wide = TensorSpec((hidden,))
    return ModelSpec(
        input=TensorSpec((PIXELS,)),
        target=TensorSpec((), "int64"),
        layers=(
            LayerSpec("first", first, wide, PIXELS * hidden),
            LayerSpec("middle", middle, wide, hidden * hidden),
            LayerSpec(
                "classes",
                functools.partial(nn.Linear, hidden, CLASSES),
                TensorSpec((CLASSES,)),
                hidden * CLASSES,
            ),
        ),
        loss=class_loss,
    )


def class_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Summed cross-entropy of float32 (B, 10) against int64 (B,)."""
    return F.cross_entropy(logits, classes.long(), reduction="sum")


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Inputs float32 (1797, 64) in 0..1, targets int64 (1797,)."""
    bunch = load_digits()
    return (bunch.data / 16).astype(np.float32), bunch.target.astype(np.int64)


def not_a_model() -> int:
    return 3


def broken() -> ModelSpec:
    raise RuntimeError("two\nlines")


FEATURES, GROUPS = 4, 4


def tiny() -> ModelSpec:
    """Two layers, 40 and 36 values: enough for several pieces of 16, and cheap."""
    return ModelSpec(
        input=TensorSpec((FEATURES,)),
        target=TensorSpec((), "int64"),
        layers=(
            LayerSpec("first", _tiny_first, TensorSpec((8,)), 32),
            LayerSpec("groups", functools.partial(nn.Linear, 8, GROUPS), TensorSpec((GROUPS,)), 32),
        ),
        loss=class_loss,
    )


def _tiny_first() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU())


def points() -> tuple[np.ndarray, np.ndarray]:
    """Inputs float32 (64, 4) in 0..1, targets int64 (64,): which of the four is the largest."""
    inputs = np.random.default_rng(0).random((64, FEATURES)).astype(np.float32)
    return inputs, inputs.argmax(axis=1).astype(np.int64)
