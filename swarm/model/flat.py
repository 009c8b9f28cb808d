"""The trainable parameters of a stage as views into one flat vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from swarm.errors import ConfigError

ALIGN = 16
"""Floats: each parameter starts at a multiple of 64 bytes, since a matrix product's rounding may
depend on the alignment of its operands."""


class FlatParameters:
    """Where each parameter lies in a flat vector; the gaps between them stay zero."""

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], device: torch.device
    ) -> None:
        """Move ``parameters``, by name, into ``vector``, keeping their values.

        Raises:
            ConfigError: one of them is not float32.
        """
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.slices: list[slice] = []
        self.length = 0
        """Of the vector, gaps included."""
        for name, parameter in parameters:
            if parameter.dtype != torch.float32:
                raise ConfigError("model.kind", f"{parameter.dtype} in {name}", "float32 weights")
            self.slices.append(slice(self.length, self.length + parameter.numel()))
            self.length += -(-parameter.numel() // ALIGN) * ALIGN
        self.vector = torch.zeros(self.length, device=device)
        for view, parameter in zip(self.views(self.vector), self.parameters, strict=True):
            view.copy_(parameter.data)
            parameter.data = view

    def views(self, vector: Tensor) -> list[Tensor]:
        """The part of ``vector``, as long as ours, for each parameter, in its shape."""
        return [
            vector[place].view(parameter.shape)
            for place, parameter in zip(self.slices, self.parameters, strict=True)
        ]
