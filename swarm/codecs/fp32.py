"""fp32: the values as they are, 4 bytes each."""

from __future__ import annotations

import torch

from swarm.codecs.base import byte_view, flat_values, received_bytes


class Fp32:
    """Exact and without a copy. See :class:`swarm.codecs.base.Codec`."""

    name = "fp32"
    lossless = True

    def nbytes(self, count: int) -> int:
        return 4 * count

    def encode(self, tensor: torch.Tensor) -> memoryview:
        return byte_view(flat_values(tensor))

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> torch.Tensor:
        return received_bytes(self, data, shape).view(torch.float32).reshape(shape)
