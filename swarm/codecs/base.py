"""What a codec is, and how bytes from the network become a tensor safely."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from swarm.errors import BadMessage

_INT64_END = 2**63


class Codec(Protocol):
    """Encodes float32 tensors on the CPU. Equal input gives equal bytes on every machine."""

    name: str
    lossless: bool

    def nbytes(self, count: int) -> int:
        """The exact size in bytes of ``count`` encoded values."""
        ...

    def encode(self, tensor: torch.Tensor) -> memoryview:
        """The bytes of a contiguous float32 ``tensor`` of any shape.

        fp32 copies nothing: its view shares the tensor's memory and keeps it alive.

        Raises:
            TypeError: the tensor is not float32.
        """
        ...

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> torch.Tensor:
        """The float32 tensor of ``shape`` that ``data`` holds.

        fp32 copies nothing if ``data`` is writable and aligned: the tensor shares its memory.
        The other codecs always return memory of their own.

        Raises:
            BadMessage: ``data`` has another size than this shape needs, or no tensor can have
                this shape.
        """
        ...


def roundtrip(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    """What the receiver of ``tensor`` will see; ``tensor`` itself if ``codec`` is lossless."""
    if codec.lossless:
        return tensor
    return codec.decode(codec.encode(tensor), tuple(tensor.shape))


def flat_values(tensor: torch.Tensor) -> torch.Tensor:
    """A one-dimensional view of a float32 tensor, outside of autograd."""
    if tensor.dtype != torch.float32:
        raise TypeError(f"codecs encode float32 tensors, not {tensor.dtype}")
    return tensor.detach().reshape(-1)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a one-dimensional tensor as bytes, without a copy."""
    return tensor.view(torch.uint8).numpy().data


def received_bytes(codec: Codec, data: memoryview, shape: tuple[int, ...]) -> torch.Tensor:
    """``data`` as a uint8 tensor whose start is aligned for float32.

    Shares memory with ``data`` unless that is read-only or not aligned.

    Raises:
        BadMessage: see :meth:`Codec.decode`.
    """
    # A shape with a zero in it has no values, but torch overflows on its other dimensions.
    if any(size < 0 for size in shape) or math.prod(max(size, 1) for size in shape) >= _INT64_END:
        raise BadMessage(f"{codec.name}: no tensor has the shape {shape}")
    expected = codec.nbytes(math.prod(shape))
    if data.nbytes != expected:
        raise BadMessage(
            f"{codec.name}: {data.nbytes} bytes for the shape {shape}, which takes {expected}"
        )
    if expected == 0:
        return torch.empty(0, dtype=torch.uint8)  # torch.frombuffer refuses an empty buffer
    if data.readonly:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    received = torch.frombuffer(data, dtype=torch.uint8)
    return received.clone() if received.data_ptr() % 4 else received
