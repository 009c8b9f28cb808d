"""The queue of a stage: bounded, ordered, and never of two minds about an attempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.hop import Outcome
from swarm.core.intake import ACCEPTED, Intake, Job, Kind, Reply
from swarm.types import FRESH, Attempt, Mark, Stamp, Term

TERM = Term(3, "aa")
MARK = Mark(TERM, 7)
NEXT = Mark(TERM, 8)
STAGE, LAST = 1, 2
EVERYWHERE = (0, 1, 2)


@dataclass
class Clock:
    now: float = 0.0


def stamp(n: int, term: Term = TERM) -> Stamp:
    return Stamp(term, n)


def job(
    n: int,
    m: int | None = None,
    *,
    kind: Kind = Kind.FORWARD,
    mark: Mark = MARK,
    mask: tuple[int, ...] = EVERYWHERE,
    term: Term = TERM,
    expires_at: float = 1000.0,
) -> Job:
    """Attempt ``n`` of microbatch ``m`` (default: of the same number)."""
    attempt = Attempt(stamp(n, term), mark, n if m is None else m, frozenset(mask))
    return Job(kind, attempt, expires_at)


def back(of: Job, *, expires_at: float = 1000.0) -> Job:
    return Job(Kind.BACKWARD, of.attempt, expires_at)


def make(
    *, stage: int = STAGE, queue: int = 8, contexts: int = 8, answers: int = 1 << 18
) -> Intake:
    intake = Intake(stage, LAST, queue=queue, contexts=contexts, answers=answers)
    intake.adopt(TERM)
    intake.advance(MARK)
    return intake


def offer(intake: Intake, what: Job, *, tries: int = 0, now: float = 0.0) -> Reply:
    """Offer and, if accepted, let the payload be there."""
    reply = intake.offer(what, tries, now)
    if reply is ACCEPTED:
        intake.decoded(what.kind, what.attempt.stamp)
    return reply


def run(intake: Intake, what: Job, now: float = 0.0) -> bool:
    """Offer ``what``, compute it; whether its result matters."""
    assert offer(intake, what, now=now) is ACCEPTED
    assert intake.next(now) is what
    return intake.finished(what)


def outcome(intake: Intake, what: Job, *, tries: int = 0, now: float = 0.0) -> Outcome:
    return offer(intake, what, tries=tries, now=now).outcome


def order(intake: Intake, now: float = 0.0) -> list[tuple[Kind, int]]:
    """What would run, first to last."""
    ran = []
    while (found := intake.next(now)) is not None:
        ran.append((found.kind, found.attempt.stamp.n))
        intake.finished(found)
    return ran


# -- what is refused, what is busy -----------------------------------------------------------


def test_before_the_first_mark_everything_is_not_yet() -> None:
    intake = Intake(STAGE, LAST, queue=8, contexts=8)
    intake.adopt(TERM)
    assert offer(intake, job(1)) == Reply(Outcome.BUSY, "not yet at this mark")


def test_once_the_mark_is_left_everything_is_not_yet_until_there_is_one_again() -> None:
    intake = make()
    intake.leave()
    assert outcome(intake, job(1)) is Outcome.BUSY
    assert outcome(intake, job(2, mark=NEXT)) is Outcome.BUSY
    intake.advance(NEXT)
    assert outcome(intake, job(3)) is Outcome.REFUSED
    assert outcome(intake, job(4, mark=NEXT)) is Outcome.ACCEPTED


def test_work_of_a_higher_mark_is_busy_and_of_any_other_stale() -> None:
    intake = make()
    assert offer(intake, job(1, mark=NEXT)) == Reply(Outcome.BUSY, "not yet at this mark")
    old = offer(intake, job(2, mark=FRESH))
    assert old == Reply(Outcome.REFUSED, "stale: this replica is at step 7")
    same_t_of_a_lower_term = Mark(Term(2, "zz"), 7)
    assert outcome(intake, job(3, mark=same_t_of_a_lower_term)) is Outcome.REFUSED


def test_a_lower_term_is_refused_with_the_higher_one() -> None:
    reply = offer(make(), job(1, term=Term(2, "zz")))
    assert reply == Reply(Outcome.REFUSED, "term 3 is obeyed here")


def test_a_higher_term_is_busy_until_it_is_adopted() -> None:
    intake, higher = make(), Term(4, "bb")
    assert outcome(intake, job(1, term=higher)) is Outcome.BUSY
    intake.adopt(higher)
    assert outcome(intake, job(1, term=higher), tries=1) is Outcome.ACCEPTED


def test_a_cancelled_attempt_is_refused_even_if_the_cancel_came_first() -> None:
    intake = make()
    intake.cancel(stamp(1))
    assert offer(intake, job(1)) == Reply(Outcome.REFUSED, "cancelled")
    assert outcome(intake, job(2, m=1)) is Outcome.ACCEPTED


def test_what_was_sent_before_the_bar_is_refused_where_it_would_have_to_count() -> None:
    intake = make()
    intake.raise_bar(stamp(5))
    assert outcome(intake, job(4)) is Outcome.REFUSED
    assert outcome(intake, job(5)) is Outcome.REFUSED
    assert outcome(intake, job(6)) is Outcome.ACCEPTED


def test_what_only_passes_through_a_stage_in_its_round_goes_on() -> None:
    intake = make()
    passing = job(4, mask=(0, 2))
    assert offer(intake, passing) is ACCEPTED
    intake.raise_bar(stamp(5))
    assert intake.next(0.0) is passing
    assert intake.finished(passing)
    assert outcome(intake, job(3, mask=(0, 2))) is Outcome.ACCEPTED


def test_an_old_bar_does_not_lower_a_higher_one() -> None:
    intake = make()
    intake.raise_bar(stamp(9))
    intake.raise_bar(stamp(2))
    assert outcome(intake, job(5)) is Outcome.REFUSED


def test_an_older_attempt_of_a_known_microbatch_is_refused() -> None:
    intake = make()
    offer(intake, job(5, m=1))
    assert offer(intake, job(4, m=1)) == Reply(Outcome.REFUSED, "a later attempt is known")


def test_a_backward_without_a_context_is_refused() -> None:
    intake = make()
    assert outcome(intake, back(job(1))) is Outcome.REFUSED


# -- the same answer ---------------------------------------------------------------------------


def test_a_repeated_push_is_accepted_again_but_runs_once() -> None:
    intake = make()
    assert [outcome(intake, job(1)) for _ in range(3)] == [Outcome.ACCEPTED] * 3
    assert order(intake) == [(Kind.FORWARD, 1)]
    assert outcome(intake, job(1)) is Outcome.ACCEPTED
    assert outcome(intake, job(1), tries=1) is Outcome.ACCEPTED
    assert order(intake) == []


def test_a_duplicate_of_a_busy_push_stays_busy_but_a_new_try_may_be_accepted() -> None:
    intake = make(queue=1)
    offer(intake, job(1))
    assert outcome(intake, job(2)) is Outcome.BUSY
    order(intake)
    assert outcome(intake, job(2)) is Outcome.BUSY
    assert outcome(intake, job(2), tries=1) is Outcome.ACCEPTED
    assert outcome(intake, job(2)) is Outcome.ACCEPTED


def test_a_late_duplicate_of_an_older_try_stays_busy() -> None:
    intake = make(queue=1)
    offer(intake, job(1))
    assert outcome(intake, job(2), tries=0) is Outcome.BUSY
    assert outcome(intake, job(2), tries=1) is Outcome.BUSY
    order(intake)
    assert outcome(intake, job(2), tries=0) is Outcome.BUSY


def test_a_refusal_is_repeated_to_the_same_try() -> None:
    intake = make()
    assert outcome(intake, back(job(1))) is Outcome.REFUSED
    run(intake, job(1))
    assert outcome(intake, back(job(1))) is Outcome.REFUSED


def test_a_new_mark_forgets_the_answers() -> None:
    intake = make()
    assert outcome(intake, job(1, mark=NEXT)) is Outcome.BUSY
    intake.advance(NEXT)
    assert outcome(intake, job(1, mark=NEXT)) is Outcome.ACCEPTED


def test_no_more_attempts_are_remembered_than_the_bound() -> None:
    intake = make(answers=2)
    assert outcome(intake, job(1)) is Outcome.ACCEPTED
    assert outcome(intake, job(2)) is Outcome.ACCEPTED
    assert offer(intake, job(3)) == Reply(Outcome.REFUSED, "too many attempts in this step")
    assert outcome(intake, job(1)) is Outcome.ACCEPTED
    intake.advance(NEXT)
    assert outcome(intake, job(4, mark=NEXT)) is Outcome.ACCEPTED


# -- bounds --------------------------------------------------------------------------------------


def test_a_forward_beyond_the_queue_is_busy() -> None:
    intake = make(queue=2)
    assert [outcome(intake, job(n)) for n in (1, 2, 3)] == [
        Outcome.ACCEPTED,
        Outcome.ACCEPTED,
        Outcome.BUSY,
    ]
    assert intake.queued == 2
    intake.next(0.0)
    assert outcome(intake, job(4)) is Outcome.ACCEPTED


def test_contexts_waiting_and_running_forwards_all_count_towards_the_bound() -> None:
    intake = make(contexts=3)
    run(intake, job(1))
    offer(intake, job(2))
    intake.next(0.0)
    offer(intake, job(3))
    assert (intake.held, intake.queued) == (1, 1)
    assert offer(intake, job(4)) == Reply(Outcome.BUSY, "3 microbatches are under way here")


def test_a_backward_needs_no_room() -> None:
    intake = make(queue=1, contexts=1)
    forward = job(1)
    run(intake, forward)
    assert outcome(intake, job(2)) is Outcome.BUSY
    assert run(intake, back(forward))
    assert intake.held == 0
    assert outcome(intake, job(3)) is Outcome.ACCEPTED


def test_a_running_backward_takes_no_room() -> None:
    intake = make(contexts=2)
    forward = job(1)
    run(intake, forward)
    offer(intake, back(forward))
    intake.next(0.0)
    assert outcome(intake, job(2)) is Outcome.ACCEPTED


def test_what_leaves_no_context_needs_none() -> None:
    intake = make(contexts=1)
    run(intake, job(1))
    assert outcome(intake, job(2, mask=())) is Outcome.ACCEPTED
    assert outcome(intake, job(3, mask=(2,))) is Outcome.ACCEPTED
    assert outcome(intake, job(4, mask=(1,))) is Outcome.BUSY


@pytest.mark.parametrize(
    ("stage", "mask", "leaves"),
    [
        (1, (0, 1, 2), True),
        (1, (1,), True),
        (1, (0,), True),
        (1, (2,), False),
        (1, (), False),
        (2, (0, 1, 2), False),
        (0, (0,), True),
        (0, (1, 2), False),
    ],
)
def test_a_context_is_left_from_the_lowest_stage_of_the_mask_up_to_before_the_last(
    stage: int, mask: tuple[int, ...], leaves: bool
) -> None:
    intake = make(stage=stage)
    what = job(1, mask=mask)
    assert intake.leaves_context(what.attempt) is leaves
    assert run(intake, what)
    assert intake.held == int(leaves)
    assert intake.take_freed() == ([] if leaves else [stamp(1)])


def test_the_last_stage_never_runs_out_of_contexts() -> None:
    intake = make(stage=LAST, contexts=1)
    for n in range(1, 6):
        assert run(intake, job(n))


# -- order ---------------------------------------------------------------------------------------


def test_backward_runs_before_forward_and_older_before_younger() -> None:
    intake = make()
    third, fifth = job(3), job(5)
    for forward in (third, fifth):
        run(intake, forward)
    for what in (job(8), back(fifth), job(2), back(third)):
        offer(intake, what)
    assert order(intake) == [
        (Kind.BACKWARD, 3),
        (Kind.BACKWARD, 5),
        (Kind.FORWARD, 2),
        (Kind.FORWARD, 8),
    ]


def test_one_job_runs_at_a_time() -> None:
    intake = make()
    first = job(1)
    offer(intake, first)
    offer(intake, job(2))
    assert intake.next(0.0) is first
    assert intake.next(0.0) is None
    intake.finished(first)
    assert order(intake) == [(Kind.FORWARD, 2)]


def test_a_job_runs_only_once_its_payload_is_decoded() -> None:
    intake = make()
    assert intake.offer(job(1), 0, 0.0) is ACCEPTED
    offer(intake, job(2))
    assert order(intake) == [(Kind.FORWARD, 2)]
    assert intake.decoded(Kind.FORWARD, stamp(1))
    assert order(intake) == [(Kind.FORWARD, 1)]


def test_a_job_that_comes_again_after_the_mark_was_left_waits_for_its_payload_anew() -> None:
    intake = make()
    offer(intake, job(1))
    intake.leave()
    intake.advance(MARK)
    assert intake.offer(job(1), 0, 0.0) is ACCEPTED
    assert intake.next(0.0) is None
    intake.decoded(Kind.FORWARD, stamp(1))
    assert intake.next(0.0) == job(1)


class Watched(Job):
    """Counts how often the queue looks when any job's time is up."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.looks += name == "expires_at"
        return super().__getattribute__(name)


def test_an_offer_or_a_turn_does_not_look_at_all_that_waits() -> None:
    intake = make(queue=1000, contexts=1000)
    jobs = [Watched(Kind.FORWARD, job(n).attempt, 1000.0) for n in range(1, 501)]
    for what in jobs:
        assert offer(intake, what) is ACCEPTED
    while (running := intake.next(0.0)) is not None:
        intake.finished(running)
    assert intake.held == 500
    assert Watched.looks < 500 * 10, "all at each turn would be a quarter of a million"


def test_a_job_that_ended_while_its_payload_was_decoded_does_not_run() -> None:
    intake = make()
    intake.offer(job(1), 0, 0.0)
    intake.cancel(stamp(1))
    assert not intake.decoded(Kind.FORWARD, stamp(1))
    assert order(intake) == []


# -- what ends -----------------------------------------------------------------------------------


def test_a_cancel_ends_a_queued_job_and_a_context() -> None:
    intake = make()
    forward = job(1)
    run(intake, forward)
    offer(intake, job(2))
    intake.cancel(stamp(1))
    intake.cancel(stamp(2))
    assert (intake.held, intake.queued) == (0, 0)
    assert set(intake.take_freed()) == {stamp(1), stamp(2)}
    assert intake.take_freed() == []
    assert outcome(intake, back(forward)) is Outcome.REFUSED


ENDS = {
    "cancel": lambda intake: intake.cancel(stamp(1)),
    "bar": lambda intake: intake.raise_bar(stamp(5)),
    "higher term": lambda intake: intake.adopt(Term(4, "bb")),
    "new mark": lambda intake: intake.advance(NEXT),
    "no mark": lambda intake: intake.leave(),
    "later attempt": lambda intake: offer(intake, job(6, m=1)),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("state", ["queued", "running", "context", "backward queued", "backward"])
def test_whatever_ends_an_attempt_ends_it_wherever_it_is(state: str, end: str) -> None:
    intake = make()
    what = job(1)
    if state in ("queued", "running"):
        offer(intake, what)
    else:
        run(intake, what)
    if state in ("backward queued", "backward"):
        what = back(what)
        offer(intake, what)
    if state in ("running", "backward"):
        assert intake.next(0.0) is what
    ENDS[end](intake)
    if state in ("running", "backward"):
        assert not intake.finished(what)
    assert intake.held == 0
    assert (Kind.FORWARD, 1) not in order(intake)
    assert stamp(1) in intake.take_freed()


def test_a_later_attempt_ends_the_older_even_if_there_is_no_room_for_it() -> None:
    intake = make(queue=1)
    run(intake, job(1))
    offer(intake, job(2))
    assert outcome(intake, job(3, m=1)) is Outcome.BUSY
    assert intake.held == 0
    assert stamp(1) in intake.take_freed()
    assert outcome(intake, job(3, m=1), tries=1) is Outcome.BUSY


def test_a_later_attempt_takes_the_room_of_the_older() -> None:
    intake = make(contexts=1)
    run(intake, job(1))
    assert outcome(intake, job(2)) is Outcome.BUSY
    assert outcome(intake, job(3, m=1)) is Outcome.ACCEPTED


def test_an_evaluation_does_not_end_the_training_microbatch_of_its_number() -> None:
    intake = make()
    run(intake, job(1))
    assert outcome(intake, job(2, m=1, mask=())) is Outcome.ACCEPTED
    assert intake.held == 1


def test_the_same_or_a_lower_term_changes_nothing() -> None:
    intake = make()
    offer(intake, job(1))
    assert not intake.adopt(TERM)
    assert not intake.adopt(Term(2, "zz"))
    assert intake.queued == 1
    assert intake.adopt(Term(3, "ab"))
    assert (intake.term, intake.queued) == (Term(3, "ab"), 0)


def test_contexts_and_queued_jobs_end_at_their_time_limit() -> None:
    intake = make(contexts=2)
    run(intake, job(1, expires_at=10.0))
    offer(intake, job(2, expires_at=20.0))
    intake.expire(9.9)
    assert (intake.held, intake.queued) == (1, 1)
    intake.expire(10.0)
    assert (intake.held, intake.queued) == (0, 1)
    assert intake.next(20.0) is None
    assert set(intake.take_freed()) == {stamp(1), stamp(2)}


def test_room_is_made_by_what_has_expired() -> None:
    intake = make(contexts=1)
    run(intake, job(1, expires_at=10.0))
    assert outcome(intake, job(2), now=9.0) is Outcome.BUSY
    assert outcome(intake, job(3), now=10.0) is Outcome.ACCEPTED


# -- any order of events -------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["forward", "backward", "run", "cancel", "bar", "tick"]),
        st.integers(1, 10),
        st.sampled_from([EVERYWHERE, (), (0,), (2,)]),
    ),
    max_size=60,
)


@settings(deadline=None, derandomize=True)
@given(EVENTS)
def test_bounds_hold_and_nothing_runs_twice_whatever_happens(
    events: list[tuple[str, int, tuple[int, ...]]],
) -> None:
    intake, clock = make(queue=2, contexts=2), Clock()
    ran: list[tuple[Kind, Stamp]] = []
    masks: dict[int, tuple[int, ...]] = {}
    for event, n, mask in events:
        mask = masks.setdefault(n, mask)
        what = job(n, m=n % 4, mask=mask, expires_at=clock.now + 3.0)
        if event == "forward":
            offer(intake, what, now=clock.now)
        elif event == "backward":
            offer(intake, back(what), now=clock.now)
        elif event == "cancel":
            intake.cancel(stamp(n))
        elif event == "bar":
            intake.raise_bar(stamp(n // 2))
        elif event == "tick":
            clock.now += n
        elif (found := intake.next(clock.now)) is not None:
            ran.append((found.kind, found.attempt.stamp))
            intake.finished(found)
        assert intake.held <= 2
        assert intake.queued <= 2 + intake.held
    assert len(ran) == len(set(ran))
    for kind, of in ran:
        if kind is Kind.BACKWARD:
            assert (Kind.FORWARD, of) in ran[: ran.index((kind, of))]
