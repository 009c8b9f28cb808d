"""bf16: the upper half of each float32, rounded to nearest, ties to even; 2 bytes each.

The range is that of float32, the relative error at most 2**-8. Finite values within half a step
of the largest float32 become infinite.
"""

from __future__ import annotations

import math

import torch

from swarm.codecs.base import byte_view, flat_values, received_bytes

_NAN_BITS = 0x7FC0


class Bf16:
    """Half the bytes of fp32. See :class:`swarm.codecs.base.Codec`."""

    name = "bf16"
    lossless = False

    def nbytes(self, count: int) -> int:
        return 2 * count

    def encode(self, tensor: torch.Tensor) -> memoryview:
        values = flat_values(tensor)
        rounded = values.to(torch.bfloat16)
        # torch's bits for a NaN depend on the instruction set; ours must not. The sum is finite
        # only if no value is NaN, and costs less than a look at each.
        if not math.isfinite(values.sum().item()):
            rounded.view(torch.int16).masked_fill_(values.isnan(), _NAN_BITS)
        return byte_view(rounded)

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> torch.Tensor:
        received = received_bytes(self, data, shape).view(torch.bfloat16)
        return received.to(torch.float32).reshape(shape)
