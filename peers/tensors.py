"""Tensors in a frame's payload: one after the other, each start aligned to 64 bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.messages import TensorMeta
from swarm.codecs import get_codec
from swarm.errors import BadMessage

ALIGN = 64
RAW = "raw"
"""Codec name of tensors that travel as they are: integers, finished sums and weights."""

_DTYPES = {
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a receiver is willing to take: exactly this."""

    shape: tuple[int, ...]
    dtype: str
    codec: str


def pack(tensors: Sequence[tuple[Tensor, str]]) -> tuple[list[TensorMeta], list[memoryview]]:
    """Encode ``(tensor, codec name)`` pairs; fp32 and raw are sent from the tensor's own memory.

    Tensors are on the CPU and contiguous. They must not change until the frame is sent.
    """
    metas: list[TensorMeta] = []
    payload: list[memoryview] = []
    for tensor, codec in tensors:
        data = _bytes(tensor) if codec == RAW else get_codec(codec).encode(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        metas.append(
            TensorMeta(codec=codec, dtype=dtype, shape=list(tensor.shape), nbytes=data.nbytes)
        )
        payload.append(data)
        if rest := -data.nbytes % ALIGN:
            payload.append(memoryview(bytes(rest)))
    return metas, payload


def unpack(
    metas: Sequence[TensorMeta], payload: Sequence[memoryview], expected: Sequence[Expected]
) -> list[Tensor]:
    """Decode what ``pack`` made, if it is what is ``expected``; fp32 and raw share the buffer.

    Raises:
        BadMessage: another number of tensors, shape, dtype, codec or length.
    """
    if len(metas) != len(expected):
        raise BadMessage(f"{len(metas)} tensors, expected {len(expected)}")
    data = payload[0].cast("B") if payload else memoryview(b"")
    start = 0
    tensors = []
    for meta, want in zip(metas, expected, strict=True):
        got = Expected(tuple(meta.shape), meta.dtype, meta.codec)
        if got != want:
            raise BadMessage(f"tensor is {_text(got)}, expected {_text(want)}")
        stop = start + meta.nbytes
        if stop > data.nbytes:
            raise BadMessage(f"payload of {data.nbytes} bytes is cut: {stop} were announced")
        tensors.append(_decode(data[start:stop], want))
        start = stop + (-stop % ALIGN)
    if start != data.nbytes:
        raise BadMessage(f"payload of {data.nbytes} bytes, {start} were announced")
    return tensors


def _decode(data: memoryview, want: Expected) -> Tensor:
    if want.codec != RAW:
        return get_codec(want.codec).decode(data, want.shape)
    dtype = _DTYPES[want.dtype]
    if data.nbytes != math.prod(want.shape) * dtype.itemsize:
        raise BadMessage(f"{data.nbytes} bytes for {_text(want)}")
    if data.nbytes == 0:
        return torch.empty(want.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(want.shape)


def _bytes(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]


def _text(tensor: Expected) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} in {tensor.codec}"
