"""Sums of squares: a good one, and one that does not depend on order at all."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from torch import Tensor

_LOWEST = -149
"""Below the binary exponent that ``frexp`` gives for any float32."""
_EXPONENTS = 280
_BITS = 24
"""Of a float32 mantissa."""


def squared_norm(pieces: Iterable[Tensor]) -> float:
    """Sum of squares of float32 pieces, in float64. Not finite if any number is not."""
    partial = []
    for piece in pieces:
        wide = piece.double()
        partial.append(float(wide.mul_(wide).sum()))
    if not all(map(math.isfinite, partial)):
        return math.nan
    return math.fsum(partial)


def exact_squared_norm(pieces: Iterable[Tensor]) -> float:
    """The sum of squares of finite float32 pieces, rounded once: any order gives the same bits.

    Mantissas are squared as integers, in halves so that sums cannot overflow, and summed for
    each exponent by itself; Python's integers put these sums together.
    """
    sums = np.zeros((3, _EXPONENTS), dtype=np.int64)
    for piece in pieces:
        mantissas, exponents = np.frexp(piece.detach().cpu().numpy())
        whole = np.abs(np.ldexp(mantissas, _BITS)).astype(np.int64)
        high, low = whole >> 12, whole & 0xFFF
        places = exponents - _LOWEST
        for row, products in enumerate((high * high, high * low, low * low)):
            # Exact: fewer than 2**29 products below 2**24 stay within float64's 53 bits.
            counted = np.bincount(places, weights=products, minlength=_EXPONENTS)
            sums[row] += counted.astype(np.int64)
    total = 0
    for place, (high_high, high_low, low_low) in enumerate(sums.T.tolist()):
        total += ((high_high << 24) + (high_low << 13) + low_low) << (2 * place)
    return total / (1 << 2 * (_BITS - _LOWEST))
