"""Where a stage begins again that nobody serves any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from peers.sources import Source
from swarm.core.totals import Totals
from swarm.types import Mark, Replica


@dataclass(frozen=True, slots=True, eq=False)
class Seed:
    """A checkpoint under the mark that it is to have from now on.

    ``copies`` is the mark that it was made at; ``FRESH`` stands for the initial weights, which
    every replica can make itself. ``source`` reads a stage of it; None: the trainer has no copy.
    ``holders``: by stage, replicas that keep one.
    """

    copies: Mark
    applied: int
    totals: Totals
    source: Callable[[int], Source] | None
    holders: Mapping[int, Sequence[Replica]] = field(default_factory=dict)
