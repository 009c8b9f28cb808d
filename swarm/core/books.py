"""Which step an attempt belongs to, where a replica works on two: its own, and the one ahead.

With delayed updates (``step.delay = 1``) a replica at the mark of step t keeps two books, each a
ledger and accumulators. Its *own* is of step t, which is being finished: that step's gradients are
of the weights before those of the mark. The one *ahead* is of step t + 1, which is computed on the
weights of the mark meanwhile. When the decision of step t is applied, the book ahead becomes the
own one of the new mark: the weights it was computed on are then those before. So one attempt
has two names, before and after: (mark of t, ahead) and (mark of t + 1, own).

Without delay there is the own book alone, and its weights are those of the mark.
"""

from __future__ import annotations

from enum import IntEnum

from swarm.types import Attempt, Mark


class Book(IntEnum):
    """OWN: of the step that the mark names. AHEAD: of the step after it."""

    OWN = 0
    AHEAD = 1


def book_of(mark: Mark, ahead: bool, at: Mark | None, before: Mark | None) -> Book | None:
    """The book for work that is named ``mark`` and ``ahead``; None: of another step.

    The replica is ``at`` a mark, to which a decision led from ``before`` (None: it did not come
    from there, or there is no delay).
    """
    if at is None:
        return None
    if mark == at:
        return Book.AHEAD if ahead else Book.OWN
    return Book.OWN if ahead and mark == before else None


def step_of(attempt: Attempt) -> int:
    """The number of the step that ``attempt`` is for."""
    return attempt.mark.t + attempt.ahead
