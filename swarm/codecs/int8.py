"""int8: blocks of 256 values, each with one float32 scale; 1 + 1/64 bytes a value.

Layout of ``count`` values in ``n = ceil(count / 256)`` blocks, the last of which may be short::

    n float32 scales (absmax / 127) | count int8 values (nearest multiple of the scale)

The error of a value is at most half a scale, about 1/254 of the largest magnitude in its block.
A block that holds a NaN or an infinity decodes to NaN throughout, so whoever checks for finite
values finds it. A block of magnitudes below 2**-100 is sent as zeros: its scale would come near
the subnormal numbers, which some hosts flush to zero and others do not.

Only single, correctly rounded operations are used, so the bytes do not depend on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swarm.codecs.base import byte_view, flat_values, received_bytes

BLOCK = 256
_PIECE_BLOCKS = 1024  # 1 MiB of float32 at a time: stays in the cache, bounds what is temporary
_LEVELS = torch.tensor(127.0)
_TINY = 2.0**-100
_LARGEST_SCALE = 2.0**121  # 127 times a larger one could overflow
_LARGEST_USUAL = 127 * _LARGEST_SCALE


class Int8:
    """A quarter of the bytes of fp32. See :class:`swarm.codecs.base.Codec`."""

    name = "int8"
    lossless = False

    def nbytes(self, count: int) -> int:
        return 4 * _block_count(count) + count

    def encode(self, tensor: torch.Tensor) -> memoryview:
        values = flat_values(tensor)
        count = values.numel()
        encoded = torch.empty(self.nbytes(count), dtype=torch.uint8)
        scales, levels = _parts(encoded, count)
        scratch = torch.empty(min(count, _PIECE_BLOCKS * BLOCK), dtype=torch.float32)
        for blocks, span, width in _pieces(count):
            piece = values[span].view(-1, width)
            room = scratch[: piece.numel()].view(-1, width)
            _quantize(piece, scales[blocks], levels[span].view(-1, width), room)
        return byte_view(encoded)

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> torch.Tensor:
        encoded = received_bytes(self, data, shape)
        decoded = torch.empty(shape, dtype=torch.float32)
        values = decoded.view(-1)
        scales, levels = _parts(encoded, values.numel())
        for blocks, span, width in _pieces(values.numel()):
            piece = values[span].view(-1, width)
            piece.copy_(levels[span].view(-1, width)).mul_(scales[blocks].unsqueeze(1))
        return decoded


def _block_count(count: int) -> int:
    return -(-count // BLOCK)


def _parts(encoded: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and the int8 values inside the encoded bytes, as views."""
    scale_bytes = 4 * _block_count(count)
    return encoded[:scale_bytes].view(torch.float32), encoded[scale_bytes:].view(torch.int8)


def _pieces(count: int) -> Iterator[tuple[slice, slice, int]]:
    """Pieces of equal blocks: which blocks, which values, how many values a block."""
    full = count // BLOCK
    for first in range(0, full, _PIECE_BLOCKS):
        last = min(first + _PIECE_BLOCKS, full)
        yield slice(first, last), slice(first * BLOCK, last * BLOCK), BLOCK
    if count % BLOCK:
        yield slice(full, full + 1), slice(full * BLOCK, count), count % BLOCK


def _quantize(
    piece: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Write the scale of each row of ``piece`` to ``scales`` and its int8 values to ``levels``."""
    # The larger of maximum and -minimum: faster than a copy of magnitudes; NaN goes through.
    absmax = torch.maximum(piece.amax(dim=1), piece.amin(dim=1).neg_())
    # Multiplying by 127 / absmax, not dividing by the scale, keeps the result within +-127.
    factors = _LEVELS / absmax
    torch.div(absmax, _LEVELS, out=scales)
    low, high = (bound.item() for bound in absmax.aminmax())
    usual = low >= _TINY and high <= _LARGEST_USUAL  # neither holds for a NaN
    broken = None if usual else _mend(absmax, factors, scales)
    torch.mul(piece, factors.unsqueeze(1), out=scratch).round_()
    if broken is not None and broken.any():
        scratch[broken] = 0.0  # the cast of a NaN to int8 is not defined
    levels.copy_(scratch)


def _mend(absmax: torch.Tensor, factors: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Set right the rows that are tiny, huge or not finite; returns which are not finite.

    Apart from the others because it is seldom needed, and small tensors take the time that the
    number of operations takes.
    """
    tiny, broken = absmax < _TINY, ~absmax.isfinite()
    factors.masked_fill_(tiny, 0.0)
    scales.clamp_(max=_LARGEST_SCALE).masked_fill_(tiny, 0.0).masked_fill_(broken, float("nan"))
    return broken
