"""Text from a trained byte-level model, one byte at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from swarm.model.stage import StageModel


def generate(
    stages: Sequence[StageModel],
    prompt: bytes,
    *,
    count: int,
    sequence: int,
    seed: int = 0,
    temperature: float = 0.8,
    stop: Callable[[], bool] = lambda: False,
) -> bytes:
    """``count`` bytes that follow ``prompt``, drawn from the model's own distribution.

    ``stages`` are all stages in order; ``sequence`` is the longest context in bytes. Fewer bytes
    if ``stop``, asked before each of them, says so.

    Raises:
        ValueError: the prompt is empty.
    """
    if not prompt:
        raise ValueError("the prompt must have at least one byte")
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    for _ in range(count):
        if stop():
            break
        x = torch.tensor(list(text[-sequence:]), dtype=torch.uint8).reshape(1, -1)
        x = _padded(x, sequence)
        for stage in stages:
            x, _ = stage.forward(x)
        last = min(len(text), sequence) - 1
        logits = x[0, last, :256].float() / temperature
        text.append(int(torch.multinomial(torch.softmax(logits, 0), 1, generator=generator)))
    return bytes(text[len(prompt) :])


def _padded(tokens: torch.Tensor, sequence: int) -> torch.Tensor:
    """To the full length, on the right: a causal model does not see it from the left."""
    return torch.nn.functional.pad(tokens, (0, sequence - tokens.shape[1]))
