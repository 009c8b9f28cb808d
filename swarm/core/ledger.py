"""What a replica's accumulators hold in this step: the truth that everything else hints at."""

from __future__ import annotations

from enum import StrEnum

from swarm.core.books import Book, book_of
from swarm.types import Attempt, Mark, Stamp


class Verdict(StrEnum):
    """Whether a microbatch may be added to the accumulators, or why not."""

    COUNT = "count"
    HELD = "held"
    NOT_ASKED = "not asked"
    OTHER_MARK = "other mark"
    BELOW_BAR = "below bar"
    CANCELLED = "cancelled"


class Ledger:
    """The set of the ``m`` that count in this step, and the rules for what may be added to it.

    *Bar*: the highest stamp of poll, prepare or reset that was obeyed, in the order of the
    compute queue. What was sent before it never counts after it, however late it comes.

    ``book``: OWN for the step that ``mark`` names, AHEAD for the one after it.
    """

    def __init__(self, stage: int, mark: Mark, book: Book = Book.OWN) -> None:
        self.stage = stage
        self.mark = mark
        self.book = book
        self.before: Mark | None = None
        self.bar: Stamp | None = None
        self.held: set[int] = set()
        self._cancelled: set[Stamp] = set()

    def verdict(self, attempt: Attempt) -> Verdict:
        """Whether ``attempt``'s gradient may be added now."""
        if book_of(attempt.mark, attempt.ahead, self.mark, self.before) is not self.book:
            return Verdict.OTHER_MARK
        if attempt.m in self.held and not attempt.evaluation:
            return Verdict.HELD
        if self.stage not in attempt.mask:
            return Verdict.NOT_ASKED
        if self.bar is not None and attempt.stamp <= self.bar:
            return Verdict.BELOW_BAR
        if attempt.stamp in self._cancelled:
            return Verdict.CANCELLED
        return Verdict.COUNT

    def count(self, attempt: Attempt) -> None:
        """Record that ``attempt`` has just been added, whole.

        Raises:
            ValueError: the rules forbid it; asking first is the caller's duty.
        """
        verdict = self.verdict(attempt)
        if verdict is not Verdict.COUNT:
            raise ValueError(f"microbatch {attempt.m} must not be counted: {verdict}")
        self.held.add(attempt.m)

    def raise_bar(self, stamp: Stamp) -> None:
        """Obey a poll, prepare or reset bearing ``stamp``. The bar never falls."""
        if self.bar is None or stamp > self.bar:
            self.bar = stamp
            self._cancelled = {cancelled for cancelled in self._cancelled if cancelled > stamp}

    def cancel(self, stamp: Stamp, m: int) -> bool:
        """Never count the attempt ``stamp`` from now on; says whether ``m`` is held already."""
        self._cancelled.add(stamp)
        return m in self.held

    def drop(self) -> None:
        """The accumulators were emptied: nothing is held any more."""
        self.held.clear()

    def advance(self, mark: Mark) -> None:
        """A step was applied: a new ledger under a new mark. Bar and cancels stay."""
        self.mark, self.before = mark, None
        self.held.clear()

    def promote(self, mark: Mark) -> None:
        """The decision of the step before was applied: ahead no more, this is ``mark``'s own."""
        self.mark, self.before, self.book = mark, self.mark, Book.OWN

    def retire(self, mark: Mark) -> None:
        """Its step was applied: it is emptied, for the step after that of ``mark``."""
        self.advance(mark)
        self.book = Book.AHEAD
