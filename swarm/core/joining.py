"""The pieces of a stage's state on their way to one mark, while the run goes on.

Each piece is copied from some replica at whatever mark that one is at, and then stepped with every
decision by that piece of the sum. The optimizer is elementwise, so pieces at different marks get
along; a piece whose sum was missed is copied anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from swarm.types import Mark


class Joining:
    """Machine: which piece to copy next, which can be stepped, and whether all are at one mark.

    Args:
        marks: the mark of each piece now; None: of no version that is known.
        head: the newest version of the run that is known.
    """

    def __init__(self, marks: Sequence[Mark | None], head: Mark) -> None:
        self.marks = list(marks)
        self.head = head
        self._taken: set[int] = set()
        self._from: Mark | None = None

    # -- copies -----------------------------------------------------------------------------

    def take(self) -> int | None:
        """The next piece to copy, now on its way; None if none is needed.

        Those of no version go first: the others may yet be stepped.
        """
        stale = [piece for piece, mark in enumerate(self.marks) if self._is_stale(piece, mark)]
        if not stale:
            return None
        piece = min(stale, key=lambda piece: (self.marks[piece] is not None, piece))
        self._taken.add(piece)
        return piece

    def _is_stale(self, piece: int, mark: Mark | None) -> bool:
        """What the last decision can step need not be copied."""
        if piece in self._taken or (mark is not None and mark == self._from):
            return False
        return mark is None or mark < self.head

    def copied(self, piece: int, mark: Mark) -> None:
        """A copy has come, at ``mark``: perhaps one that we have not heard of yet."""
        self._taken.discard(piece)
        self.marks[piece] = mark

    def failed(self, piece: int) -> None:
        """Nobody gave it this time."""
        self._taken.discard(piece)

    # -- steps ------------------------------------------------------------------------------

    def at(self, mark: Mark) -> list[int]:
        """The pieces that the decision which leads on from ``mark`` can step."""
        return [p for p, m in enumerate(self.marks) if m == mark and p not in self._taken]

    def take_at(self, mark: Mark) -> list[int]:
        """Those pieces, being stepped now: none of them is copied meanwhile."""
        pieces = self.at(mark)
        self._taken.update(pieces)
        return pieces

    def stepped(self, pieces: Collection[int], to: Mark) -> None:
        self._taken.difference_update(pieces)
        for piece in pieces:
            self.marks[piece] = to

    def lost(self, pieces: Collection[int]) -> None:
        """What these hold is good for nothing: their sum was missed, or they are wrong."""
        self._taken.difference_update(pieces)
        for piece in pieces:
            self.marks[piece] = None

    def decided(self, mark: Mark, to: Mark) -> None:
        """A decision leads on ``to`` the newest version: pieces at ``mark`` are to be stepped."""
        if to > self.head:
            self.head, self._from = to, mark

    def moved(self, head: Mark) -> None:
        """The run has got to ``head``, we do not know how. It never goes back."""
        if head > self.head:
            self.head, self._from = head, None

    # -- how far ----------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """All pieces are at the newest version."""
        return not self._taken and all(mark == self.head for mark in self.marks)

    @property
    def share(self) -> float:
        """How much of the state is there, from 0 to 1, whatever its mark."""
        return sum(mark is not None for mark in self.marks) / max(1, len(self.marks))


def runs(pieces: Sequence[int], longest: int) -> list[range]:
    """Neighbouring ``pieces`` (rising) put together, at most ``longest`` of them in one run."""
    if not pieces:
        return []
    cuts = [i for i, (a, b) in enumerate(pairwise(pieces), start=1) if b != a + 1]
    found = []
    for start, stop in pairwise([0, *cuts, len(pieces)]):
        for first in range(start, stop, longest):
            last = min(first + longest, stop) - 1
            found.append(range(pieces[first], pieces[last] + 1))
    return found
