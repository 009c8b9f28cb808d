"""What lossy averaging has lost so far, and gives back: error feedback."""

from __future__ import annotations

import torch
from torch import Tensor


class Residual:
    """One replica's memory of what its own encodings have lost, over the steps that were applied.

    In a round it is added to what the replica encodes: its part of a piece that another sums, and
    the sum of a piece of its own. ``lost`` takes in what these encodings lose; it becomes the
    memory when the decision on that round is applied, and not before. So nothing is given back
    twice where a round is repeated, dead or skipped, and at any time the sums that were applied
    and the memories of all replicas add up to the sums that were meant.

    It lives in memory alone. It survives a reset, for it is of earlier steps. Whoever leaves its
    mark (to join anew, in a rollback) forgets it, joiners begin with nothing, and that of a
    replica that is gone is gone: one rounding of one step.
    """

    def __init__(self) -> None:
        self.kept: Tensor | None = None
        """float32, as long as the gradient; None: nothing."""
        self._lost: Tensor | None = None
        self._room: Tensor | None = None
        self._settled = False

    def begin(self, like: Tensor) -> Tensor:
        """Room for what a round loses, which has to be written everywhere; ends the one before."""
        self.end()
        room, self._room, self._settled = self._room, None, False
        self._lost = torch.empty_like(like) if room is None else room
        return self._lost

    def settle(self) -> None:
        """The round gives everything back and loses nothing: once applied, nothing is kept."""
        self._settled = True

    def end(self) -> None:
        """The round was not applied: the memory stays as it is."""
        if self._lost is not None:
            self._room, self._lost = self._lost, None

    def apply(self) -> None:
        """The round was applied. One in which nothing could be lost changes nothing."""
        if self._lost is None:
            return
        if self._settled:
            self._room, self.kept, self._lost = self._lost, None, None
        else:
            self._room, self.kept, self._lost = self.kept, self._lost, None

    def forget(self) -> None:
        self.kept, self._lost, self._room = None, None, None
