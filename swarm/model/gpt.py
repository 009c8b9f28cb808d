"""A GPT as a list of layers: embedding, pre-LN blocks, head. Tokens are bytes."""

from __future__ import annotations

import functools
import math

from torch import Tensor, nn
from torch.nn import functional as F

from swarm.manifest_sections import Model
from swarm.model.spec import LayerSpec, ModelSpec, TensorSpec, Tie

_INIT_STD = 0.02


class Embedding(nn.Module):
    """Tokens, uint8 (B, T), to float32 (B, T, d_model): token plus learned position."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.d_model)
        self.positions = nn.Embedding(model.sequence, model.d_model)
        nn.init.normal_(self.tokens.weight, std=_INIT_STD)
        nn.init.normal_(self.positions.weight, std=_INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens.long()) + self.positions.weight[: tokens.shape[1]]


class Attention(nn.Module):
    """Causal self-attention, float32 (B, T, d_model) to the same."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads = model.heads
        self.qkv = _linear(model.d_model, 3 * model.d_model, _INIT_STD)
        self.out = _linear(model.d_model, model.d_model, _residual_std(model))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and MLP, each after a layer norm and added to the residual stream."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        hidden = model.mlp_ratio * model.d_model
        self.norm1 = nn.LayerNorm(model.d_model)
        self.attention = Attention(model)
        self.norm2 = nn.LayerNorm(model.d_model)
        self.up = _linear(model.d_model, hidden, _INIT_STD)
        self.down = _linear(hidden, model.d_model, _residual_std(model))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Head(nn.Module):
    """Final layer norm and logits: float32 (B, T, d_model) to (B, T, vocabulary)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.d_model)
        self.logits = nn.Linear(model.d_model, model.vocabulary, bias=False)
        nn.init.normal_(self.logits.weight, std=_INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def gpt(model: Model) -> ModelSpec:
    """The GPT that ``model`` describes; costs are FLOPs a sample, forward and backward."""
    hidden = TensorSpec((model.sequence, model.d_model))
    logits = TensorSpec((model.sequence, model.vocabulary))
    tokens = TensorSpec((model.sequence,), "uint8")
    width, length = model.d_model, model.sequence
    # A multiply-add counts two; the backward pass costs twice the forward pass.
    block = 6 * length * (width * width * (4 + 2 * model.mlp_ratio) + length * width)
    head = 6 * length * width * model.vocabulary
    embedding = 6 * length * width
    ties = (Tie("logits.weight", 0, "tokens.weight"),) if model.tied else ()
    blocks = tuple(
        LayerSpec(f"block{i}", functools.partial(Block, model), hidden, block)
        for i in range(model.layers)
    )
    return ModelSpec(
        input=tokens,
        target=tokens,
        layers=(
            LayerSpec("embedding", functools.partial(Embedding, model), hidden, embedding),
            *blocks,
            LayerSpec("head", functools.partial(Head, model), logits, head, ties),
        ),
        loss=next_token_loss,
        loss_terms=length,
    )


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy of float32 (B, T, V) against uint8 (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.long().flatten(), reduction="sum")


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear


def _residual_std(model: Model) -> float:
    """What feeds the residual stream starts smaller, so that its variance stays near 1."""
    return _INIT_STD / math.sqrt(2 * model.layers)
