"""A model whose boundary is large and whose layers compute next to nothing: for slow networks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from swarm.model.spec import LayerSpec, ModelSpec, TensorSpec

BYTES = 256


class Look(nn.Module):
    """Tokens, uint8 (B, T), to float32 (B, T, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(BYTES, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens.long())


class Guess(nn.Module):
    """float32 (B, T, width) to logits (B, BYTES)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.logits = nn.Linear(width, BYTES)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x.mean(1))


def first_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Of the first target of each sample."""
    return F.cross_entropy(logits, targets[:, 0].long(), reduction="sum")


def wide(width: int, sequence: int) -> ModelSpec:
    """Two layers, ``sequence`` x ``width`` floats a sample between them."""
    tokens = TensorSpec((sequence,), "uint8")
    layers = (
        LayerSpec("look", lambda: Look(width), TensorSpec((sequence, width)), 1.0),
        LayerSpec("guess", lambda: Guess(width), TensorSpec((BYTES,)), 1.0),
    )
    return ModelSpec(tokens, tokens, layers, first_loss)
