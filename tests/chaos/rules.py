"""The rules of the protocol, each of which can be switched off: to test the audit.

``switched_off("bar")`` is a context in which the code under test does not know that rule. A
harness that finds nothing then finds nothing anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from peers import messages as msg
from peers.averaging import Averager
from peers.stage import StageOwner
from swarm.core import flight
from swarm.core.closing import Closing, Vote
from swarm.core.intake import Intake
from swarm.core.ledger import Ledger, Verdict
from swarm.core.step import Decision
from swarm.core.totals import fold
from swarm.types import Attempt, Mark, Replica, Term


@contextmanager
def switched_off(rules: Iterable[str]) -> Iterator[None]:
    """Raises ValueError: there is no such rule."""
    with ExitStack() as stack:
        for rule in rules:
            if rule not in RULES:
                raise ValueError(f"no rule {rule!r}: there are {', '.join(RULES)}")
            for owner, attribute, replacement in RULES[rule]():
                stack.enter_context(mock.patch.object(owner, attribute, replacement))
        yield


Patch = tuple[Any, str, Any]


def _round_name() -> list[Patch]:
    """Parts, sums and votes are taken whatever round they are of."""

    def belongs(self: Averager, message: msg.Part | msg.Sum) -> msg.Message | None:
        del message
        return None if self._alive else msg.Busy(reason="in no round")

    def vote(self: Closing, replica: Replica, vote: Vote) -> None:
        if replica in self.members:
            self.votes[replica] = vote
            self._silent.discard(replica)
            self._if_ready()

    return [(Averager, "_belongs", belongs), (Closing, "vote", vote)]


def _bar() -> list[Patch]:
    """What was sent before the last prepare, poll or reset counts all the same."""

    def verdict(self: Ledger, attempt: Attempt) -> Verdict:
        bar, self.bar = self.bar, None
        try:
            return knows_bar(self, attempt)
        finally:
            self.bar = bar

    def barred(self: Intake, attempt: Attempt) -> bool:
        del self, attempt
        return False

    knows_bar = Ledger.verdict
    return [(Ledger, "verdict", verdict), (Intake, "_barred", barred)]


def _mark() -> list[Patch]:
    """A version is named by its step number alone."""
    return _compared(Mark, lambda mark: mark.t)


def _unique_term() -> list[Patch]:
    """A term is a number alone: two trainers may have the same."""
    return _compared(Term, lambda term: term.number)


def _compared(cls: type, key: Callable[[Any], int]) -> list[Patch]:
    def equal(self: object, other: object) -> bool:
        return isinstance(other, cls) and key(self) == key(other)

    return [
        (cls, "__eq__", equal),
        (cls, "__hash__", lambda self: hash(key(self))),
        (cls, "__lt__", lambda self, other: key(self) < key(other)),
        (cls, "__le__", lambda self, other: key(self) <= key(other)),
        (cls, "__gt__", lambda self, other: key(self) > key(other)),
        (cls, "__ge__", lambda self, other: key(self) >= key(other)),
    ]


def _atomic_add() -> list[Patch]:
    """What a gradient that failed half way has left in the accumulators stays there."""

    def count(self: StageOwner, attempt: Attempt) -> str:
        ledger = self._ledger(attempt)
        verdict = ledger.verdict(attempt)
        if verdict is not Verdict.COUNT:
            return str(verdict)
        if ledger is self.ledger:
            self.end_round()
        try:
            self._add(ledger.book)
        except RuntimeError:
            ledger.drop()
            return flight.DROPPED
        ledger.count(attempt)
        return flight.COUNTED

    return [(StageOwner, "_count", count)]


def _digest() -> list[Patch]:
    """A decision is applied with whatever sum is there."""

    def decide(self: StageOwner, decision: Decision) -> Mark | None:
        if self.decision is None or decision.to > self.decision.to:
            self.decision = decision
        if self.mark != decision.mark:
            return self.mark
        if not decision.update.skip:
            if self._total is None:
                return self.mark
            self.model.apply(self._total, decision.update)
        self._keep_sum(decision)
        totals = fold(self.totals, decision.counts)
        self.arrive(decision.to, decision.applied, totals, before=decision.mark)
        return self.mark

    return [(StageOwner, "decide", decide)]


RULES: dict[str, Callable[[], list[Patch]]] = {
    "round": _round_name,
    "bar": _bar,
    "mark": _mark,
    "term": _unique_term,
    "add": _atomic_add,
    "digest": _digest,
}
