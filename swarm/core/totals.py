"""How many microbatches each peer has counted in the run so far, by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAX_PEERS = 4096
"""At most so many names a stage, ``OTHERS`` among them."""

OTHERS = "others"
"""The name under which all peers are counted that come when there is no room left."""

Totals = tuple[Mapping[str, int], ...]
"""For each stage: peer -> microbatches."""


MAX_NAMES = 6000
"""In all stages together: totals travel in the header of a message, twice in some."""


def fold(totals: Totals, counts: Sequence[Mapping[str, int]]) -> Totals:
    """``totals`` after a decision with ``counts`` was applied; the arguments stay as they are.

    The result has the stages of ``totals``: what ``counts`` lacks adds nothing, what it has
    beyond is ignored, as are counts that are not positive. All who fold the same decisions get
    the same, in whatever order their mappings are.
    """
    none: Sequence[Mapping[str, int]] = [{}] * len(totals)
    most = max(2, min(MAX_PEERS, MAX_NAMES // max(1, len(totals))))
    pairs = zip(totals, (*counts, *none), strict=False)
    return tuple(_add(total, more, most) for total, more in pairs)


def _add(total: Mapping[str, int], more: Mapping[str, int], most: int) -> dict[str, int]:
    merged: dict[str, int] = {}
    for source in (total, more):  # who is named already stays named
        for peer in sorted(source):
            if source[peer] > 0:
                named = len(merged) - (OTHERS in merged)
                name = peer if peer in merged or named < most - 1 else OTHERS
                merged[name] = merged.get(name, 0) + source[peer]
    return merged
