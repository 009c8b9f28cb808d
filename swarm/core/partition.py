"""Cutting: layers into stages by cost, a vector into parts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise


def layers_into_stages(costs: Sequence[float], count: int) -> list[range]:
    """Cut ``len(costs)`` layers into ``count`` runs so that the dearest run is cheapest.

    Exact, and the same on every machine. Costs are finite and not negative; each stage gets at
    least one layer.

    Raises:
        ValueError: ``count`` is not in ``1..len(costs)``, or a cost is negative.
    """
    n = len(costs)
    if not 1 <= count <= n:
        raise ValueError(f"{n} layers make 1 to {n} stages, not {count}")
    if any(cost < 0 for cost in costs):
        raise ValueError("layer costs must not be negative")
    ends = list(accumulate(costs, initial=0.0))
    # best[i]: the cost of the dearest run when layers 0..i-1 make k runs. It rises with i, and
    # the cost of a last run falls as its start rises, so the best start is where the two cross.
    best = ends
    starts: list[list[int]] = []
    for k in range(2, count + 1):
        row, row_starts = [0.0] * (n + 1), [0] * (n + 1)
        for i in range(k, n + 1):
            row[i], row_starts[i] = _best_start(best, ends, k - 1, i)
        best = row
        starts.append(row_starts)
    cuts = [n]
    for row_starts in reversed(starts):
        cuts.append(row_starts[cuts[-1]])
    cuts.append(0)
    return [range(a, b) for a, b in pairwise(reversed(cuts))]


def _best_start(
    best: Sequence[float], ends: Sequence[float], first: int, end: int
) -> tuple[float, int]:
    """The start in ``first..end-1`` of a run up to ``end``: (dearest run, start). Ties: later."""

    def crossed(start: int) -> bool:
        return best[start] >= ends[end] - ends[start]

    candidates = range(first, end)
    cross = bisect_left(candidates, True, key=crossed)
    near = candidates[max(0, cross - 1) : cross + 1]
    return min((max(best[start], ends[end] - ends[start]), -start, start) for start in near)[::2]


def cuts_into_stages(layers: int, cuts: Sequence[int]) -> list[range]:
    """Stages that begin at layer 0 and at each of ``cuts``.

    Raises:
        ValueError: the cuts do not rise strictly within ``1..layers-1``.
    """
    edges = [0, *cuts, layers]
    if any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"cuts must rise from 1 to {layers - 1}, not {list(cuts)}")
    return [range(a, b) for a, b in pairwise(edges)]


def vector_into_parts(length: int, members: int, *, align: int) -> list[range]:
    """Cut ``range(length)`` into one part for each of ``members``, sizes nearly equal.

    Each part that is not empty starts at a multiple of ``align``; parts are empty when there are
    fewer aligned blocks than members.

    Raises:
        ValueError: ``length`` is negative, or ``members`` or ``align`` is below 1.
    """
    if length < 0 or members < 1 or align < 1:
        raise ValueError(f"cannot cut {length} into {members} parts aligned to {align}")
    blocks = -(-length // align)
    share, extra = divmod(blocks, members)
    sizes = (share + (index < extra) for index in range(members))
    edges = [min(length, align * edge) for edge in accumulate(sizes, initial=0)]
    return [range(a, b) for a, b in pairwise(edges)]
