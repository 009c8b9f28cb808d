"""A stage's accumulators as a round sees them: in the host's memory."""

from __future__ import annotations

from torch import Tensor

from swarm.model.stage import StageModel


class Mirror:
    """On the CPU the accumulators themselves; on a GPU a copy, made when a round begins.

    All of it is for the thread that computes, but for ``vector``, which a round reads from any.
    """

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._copy: Tensor | None = None

    def take(self) -> None:
        """A round begins: ``vector`` is what the accumulators hold now, and all of it is here."""
        if self._model.device.copies:
            self._copy = self._model.device.to_host(self._model.accumulators).wait()

    @property
    def vector(self) -> Tensor:
        """On the host, of the accumulators' length and dtype; before ``take`` of any content."""
        if not self._model.device.copies:
            return self._model.accumulators
        if self._copy is None:
            self._copy = self.room()
        return self._copy

    def room(self) -> Tensor:
        """For a vector like this one, of any content."""
        return self._model.device.room(self._model.accumulators)

    def give(self, other: Tensor | None) -> Tensor:
        """``vector``, which is the caller's from now on; ``other`` may be used in its place."""
        if not self._model.device.copies:
            return self._model.swap_accumulators(other)
        given, self._copy = self.vector, other
        return given
