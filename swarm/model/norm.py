"""Sums of squares: a good one, and one that does not depend on order at all.

Both are taken piece by piece, as the pieces come, and put together at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from swarm.model.optimizer import pieces

_LOWEST = -149
"""Below the binary exponent that ``frexp`` gives for any float32."""
_EXPONENTS = 280
_BITS = 24
"""Of a float32 mantissa."""

_ROW = 512
"""Values whose squares are summed in float32: some thirty in each lane of the processor."""
_SAFE = 1e-20, 1e30
"""Sums of squares between these have neither overflowed in float32 nor lost what counts."""

Squares = tuple[float, ...] | int
"""The sums of squares in a piece, to be put together with those of others: an integer if exact."""


def squares_of(sums: Tensor, scale: float | None) -> Squares:
    """The squares in a piece of a gradient: float32, or int64 in units of ``1 / scale``.

    Safe to call from any thread. ``squares_together`` of all pieces is the squared norm.
    """
    cuts = pieces(sums.numel())
    if scale is None:
        return tuple(_squares(sums[cut]) for cut in cuts)
    return sum(exact_squares(sums[cut].double().mul_(1.0 / scale).float()) for cut in cuts)


def squares_together(parts: Iterable[Squares]) -> float:
    """The squared norm of pieces, all exact or none; exact ones in any order give the same bits.

    Not finite if any number is not.
    """
    found = list(parts)
    exact = [part for part in found if isinstance(part, int)]
    if exact:
        return sum(exact) / (1 << 2 * (_BITS - _LOWEST))
    return _together(chain.from_iterable(part for part in found if not isinstance(part, int)))


def squared_norm(pieces: Iterable[Tensor]) -> float:
    """Sum of squares of float32 pieces, right to about 1e-7. Not finite if any number is not."""
    return _together(map(_squares, pieces))


def exact_squared_norm(pieces: Iterable[Tensor]) -> float:
    """The sum of squares of finite float32 pieces, rounded once: any order gives the same bits."""
    return squares_together([0, *map(exact_squares, pieces)])


def exact_squares(piece: Tensor) -> int:
    """The sum of squares of a finite float32 ``piece`` as an integer, in units of 2**-346.

    Mantissas are squared as integers, in halves so that sums cannot overflow, and summed for
    each exponent by itself; Python's integers put these sums together.
    """
    mantissas, exponents = np.frexp(piece.detach().cpu().numpy())
    whole = np.abs(np.ldexp(mantissas, _BITS)).astype(np.int64)
    high, low = whole >> 12, whole & 0xFFF
    places = exponents - _LOWEST
    # Exact: fewer than 2**29 products below 2**24 stay within float64's 53 bits.
    rows = [
        np.bincount(places, weights=products, minlength=_EXPONENTS).astype(np.int64).tolist()
        for products in (high * high, high * low, low * low)
    ]
    total = 0
    for place, (high_high, high_low, low_low) in enumerate(zip(*rows, strict=True)):
        total += ((high_high << 24) + (high_low << 13) + low_low) << (2 * place)
    return total


def _together(partial: Iterable[float]) -> float:
    found = list(partial)
    return math.fsum(found) if all(map(math.isfinite, found)) else math.nan


def _squares(piece: Tensor) -> float:
    """Of a float32 piece: rows in float32 and over these in float64, if that is good enough."""
    whole = piece.numel() - piece.numel() % _ROW
    rows = torch.linalg.vector_norm(piece[:whole].view(-1, _ROW), dim=1).double()
    found = float(rows.mul_(rows).sum()) + _wide_squares(piece[whole:])
    return found if _SAFE[0] < found < _SAFE[1] else _wide_squares(piece)


def _wide_squares(piece: Tensor) -> float:
    wide = piece.double()
    return float(wide.mul_(wide).sum())
