"""What is looked at in a sum before anyone votes for it: its bits, and its size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3
from torch import Tensor

from swarm.model.norm import Squares, squares_of, squares_together


@dataclass(frozen=True, slots=True)
class Look:
    """At one piece: the BLAKE3 digest of its bytes, and its squares.

    Every sum is digested by every member, on one core: BLAKE3 takes a third of SHA-256's time.
    """

    digest: bytes
    squares: Squares


def look_at(sums: Tensor, scale: float | None) -> Look:
    """See ``norm.squares_of``. Safe to call from any thread."""
    data = memoryview(sums.cpu().numpy()).cast("B")  # type: ignore[arg-type]
    return Look(blake3(data).digest(), squares_of(sums, scale))


def together(looks: Sequence[Look]) -> tuple[str, float, bool]:
    """Digest (hex) and squared norm of pieces that lie in this order, and whether it is finite.

    The same whenever each piece was looked at, as long as the cuts are the same.
    """
    digest = blake3(b"".join(look.digest for look in looks)).hexdigest()
    norm = squares_together(look.squares for look in looks)
    return digest, norm if math.isfinite(norm) else 0.0, math.isfinite(norm)
