"""Two steps at once, with delayed updates: whose book, whose weights, and what lives on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.core.backoff import Backoff
from swarm.core.books import Book, book_of, step_of
from swarm.core.hop import Outcome
from swarm.core.intake import ACCEPTED, Intake, Job, Kind
from swarm.core.ledger import Ledger, Verdict
from swarm.core.members import Members
from swarm.core.roster import Roster
from swarm.core.step import Decide, Prepare, Reset
from swarm.types import FRESH, Attempt, Mark, Replica, Stamp, Term
from tests.unit.core.test_step import Bench, found, only

TERM = Term(3, "aa")
OLD, NOW, NEXT = (Mark(TERM, t) for t in (6, 7, 8))
STAGE, LAST = 1, 2
A, B, C = (Replica(name, "boot") for name in "abc")


def attempt(
    n: int, m: int = 0, *, mark: Mark = NOW, ahead: bool = False, mask: tuple[int, ...] = (0, 1, 2)
) -> Attempt:
    return Attempt(Stamp(TERM, n), mark, m, frozenset(mask), ahead)


def job(n: int, m: int = 0, *, kind: Kind = Kind.FORWARD, **named: object) -> Job:
    return Job(kind, attempt(n, m, **named), 1000.0)  # type: ignore[arg-type]


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mark", "ahead", "book"),
    [
        (NOW, False, Book.OWN),
        (NOW, True, Book.AHEAD),
        (OLD, True, Book.OWN),
        (OLD, False, None),
        (NEXT, False, None),
        (NEXT, True, None),
    ],
)
def test_an_attempt_has_two_names(mark: Mark, ahead: bool, book: Book | None) -> None:
    assert book_of(mark, ahead, NOW, OLD) is book
    assert book_of(mark, ahead, None, None) is None


def test_a_mark_that_no_decision_led_to_from_here_has_one_name() -> None:
    assert book_of(OLD, True, NOW, None) is None
    assert step_of(attempt(1, mark=OLD, ahead=True)) == step_of(attempt(1)) == 7


# -- ledgers --------------------------------------------------------------------------------------


def test_each_ledger_counts_for_its_own_step() -> None:
    own, ahead = Ledger(STAGE, NOW), Ledger(STAGE, NOW, Book.AHEAD)
    assert own.verdict(attempt(1)) is Verdict.COUNT
    assert own.verdict(attempt(1, ahead=True)) is Verdict.OTHER_MARK
    assert ahead.verdict(attempt(1, ahead=True)) is Verdict.COUNT
    assert ahead.verdict(attempt(1)) is Verdict.OTHER_MARK


def test_what_was_counted_ahead_is_held_by_both_names_once_the_decision_is_applied() -> None:
    own, ahead = Ledger(STAGE, NOW), Ledger(STAGE, NOW, Book.AHEAD)
    own.count(attempt(1))
    own.raise_bar(Stamp(TERM, 5))
    ahead.count(attempt(2, ahead=True))
    ahead.promote(NEXT)
    own.retire(NEXT)
    assert ahead.verdict(attempt(3, ahead=True)) is Verdict.HELD
    assert ahead.verdict(attempt(3, mark=NEXT)) is Verdict.HELD
    assert ahead.verdict(attempt(3, m=1, ahead=True)) is Verdict.COUNT, "no prepare was for it"
    assert own.book is Book.AHEAD
    assert not own.held
    assert own.verdict(attempt(4, mark=NEXT, ahead=True)) is Verdict.BELOW_BAR
    assert own.verdict(attempt(6, mark=NEXT, ahead=True)) is Verdict.COUNT


# -- the queue ------------------------------------------------------------------------------------


@pytest.fixture
def intake() -> Intake:
    intake = Intake(STAGE, LAST, queue=8, contexts=8)
    intake.adopt(TERM)
    intake.advance(NOW)
    return intake


def outcome(intake: Intake, what: Job) -> Outcome:
    reply = intake.offer(what, 0, 0.0)
    if reply is ACCEPTED:
        intake.decoded(what.kind, what.attempt.stamp)
    return reply.outcome


def test_the_same_microbatch_of_both_steps_is_under_way_the_older_step_first(
    intake: Intake,
) -> None:
    ahead, redone = job(1, ahead=True), job(2)
    assert outcome(intake, ahead) is Outcome.ACCEPTED
    assert outcome(intake, redone) is Outcome.ACCEPTED
    assert intake.next(0.0) is redone
    assert intake.finished(redone)
    assert intake.next(0.0) is ahead
    assert intake.finished(ahead)
    assert intake.held == 2


def test_a_prepare_ends_only_work_of_its_own_step_a_poll_all(intake: Intake) -> None:
    outcome(intake, job(1, ahead=True))
    outcome(intake, job(2))
    intake.raise_bar(Stamp(TERM, 5), Book.OWN)
    assert intake.queued == 1
    assert intake.bar == Stamp(TERM, 5)
    assert outcome(intake, job(3, m=1, ahead=True)) is Outcome.ACCEPTED
    assert outcome(intake, job(4, m=1)) is Outcome.REFUSED
    intake.raise_bar(Stamp(TERM, 6))
    assert intake.queued == 0


def test_work_ahead_lives_on_when_the_decision_is_applied(intake: Intake) -> None:
    waits, own, computed = job(1, ahead=True), job(2), job(3, m=1, ahead=True)
    outcome(intake, computed)
    assert intake.next(0.0) is computed
    intake.finished(computed)
    outcome(intake, waits)
    outcome(intake, own)
    intake.raise_bar(Stamp(TERM, 9), Book.OWN)
    intake.cancel(Stamp(TERM, 40))
    intake.advance(NEXT, NOW)
    assert intake.next(0.0) is waits
    assert intake.finished(waits)
    assert intake.held == 2
    back = Job(Kind.BACKWARD, computed.attempt, 1000.0)
    assert outcome(intake, back) is Outcome.ACCEPTED
    assert outcome(intake, computed) is Outcome.ACCEPTED, "the same answer as before"
    assert outcome(intake, job(8, m=2, mark=NEXT)) is Outcome.ACCEPTED, "no prepare was for it"
    assert outcome(intake, job(2)) is Outcome.REFUSED, "that step is over"
    assert outcome(intake, job(40, mark=NEXT)) is Outcome.REFUSED, "cancelled before"
    assert outcome(intake, job(7, m=3, mark=NEXT, ahead=True)) is Outcome.REFUSED, "below the bar"
    assert outcome(intake, job(10, m=3, mark=NEXT, ahead=True)) is Outcome.ACCEPTED
    assert intake.bar is None


def test_a_later_attempt_of_the_next_step_supersedes_by_its_new_name(intake: Intake) -> None:
    first = job(1, ahead=True)
    outcome(intake, first)
    intake.advance(NEXT, NOW)
    assert outcome(intake, job(7, mark=NEXT)) is Outcome.ACCEPTED
    assert intake.queued == 1
    assert outcome(intake, job(3, m=0, ahead=True)) is Outcome.REFUSED


# -- the trainer's side ---------------------------------------------------------------------------


def test_a_step_ahead_takes_what_the_window_leaves_and_does_not_close() -> None:
    first, second = Bench(6), Bench(6)
    flight = second.step.flight
    flight.ahead, flight.beside, second.step.may_close = True, first.step.flight, False
    first.advance()
    launched = second.advance()
    assert len(launched) == 2, "the window is 8"
    assert all(do.attempt.ahead and do.attempt.mark == FRESH for do in launched)
    assert flight.knows(launched[0].attempt.stamp)
    assert not flight.knows(Stamp(Term(9, "other"), 1))
    flight.beside = None
    second.advance()
    second.counts([A, A, B, A, A, B])
    assert not only(Prepare, second.advance())
    second.step.promote(Mark(TERM, 1), second.decide, 4)
    assert not only(Prepare, second.advance()), "promoted, but it may not close yet"
    second.step.may_close = True
    assert len(only(Prepare, second.advance())) == 3
    assert (flight.mark, flight.ahead) == (Mark(TERM, 1), False)


def test_who_returns_with_the_decision_is_a_member_of_the_next_step_again() -> None:
    bench = Bench()
    bench.step.may_close = False
    bench.advance()
    bench.step.remove(B, "silent", 0.0)
    bench.advance()
    bench.counts([A, A, C])
    bench.step.promote(FRESH, bench.decide, 1)
    bench.step.may_close = True
    assert {do.replica for do in only(Prepare, bench.advance())} == {A, B, C}


def test_where_the_next_step_is_under_way_all_that_were_told_have_to_apply() -> None:
    bench = Bench()
    bench.step.all_apply = True
    decision = bench.decision()
    bench.step.applied(A, stage=0)
    assert not bench.step.finished
    late = Replica("late", "boot")
    bench.ready[0].append(late)
    bench.step.admitted(late, stage=0)
    assert bench.advance() == [Decide(late, decision)]
    bench.step.applied(B, stage=0)
    bench.step.applied(late, stage=0)
    assert not bench.step.finished
    bench.step.remove(C, "silent", 1.0)
    assert bench.step.finished


def test_a_reset_in_one_step_is_taken_note_of_in_the_other() -> None:
    first, second = Bench(), Bench()
    first.advance()
    second.advance()
    second.counts([A, A, B])
    round_ = first.prepared([A, A, B])
    first.step.mismatched(found({0, 1, 2}, C), round_, stage=0)
    (reset,) = only(Reset, first.advance())
    assert reset.replica == C
    second.step.was_reset(A, replace(reset.stamp, n=10_000))
    assert second.holders() == {0: None, 1: None, 2: B}
    second.step.receipt(second.told(0, A), 0.0)
    assert second.holders()[0] is None, "sent before the reset"


def test_members_that_return() -> None:
    ready = [A, B]
    members = Members(1, lambda stage: ready)
    members.remove(B)
    members.remove(C)
    assert members.returned(0) == [B]


def test_a_roster_knows_who_leaves() -> None:
    roster = Roster(Backoff(1.0))
    for replica in (A, B):
        roster.announced(replica, 0, 0.0)
        roster.admitted(replica, NOW)
    assert not roster.is_leaving(A)
    assert roster.leave(A, NOW) == ""
    assert roster.is_leaving(A)
    assert not roster.is_leaving(C)
