"""A hop tries its list without ever leaving the payload with two replicas."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.backoff import Backoff
from swarm.core.hop import Delivered, Hop, Outcome, Pause, Push, Tell
from swarm.types import Replica

A, B, C = (Replica(f"peer-{name}", "b0") for name in ("aaaaaa", "bbbbbb", "cccccc"))
BACKOFF = Backoff(first_s=1.0, factor=2.0, cap_s=8.0)
SURELY_NOT_THERE = [Outcome.BUSY, Outcome.REFUSED, Outcome.UNREACHABLE]


def hop(*candidates: Replica, deadline: float = 100.0) -> Hop:
    return Hop(candidates, deadline, BACKOFF, random.Random(0))


def test_the_best_candidate_is_tried_first_and_delivery_ends_the_hop() -> None:
    h = hop(A, B)
    assert h.start(0.0) == Push(A, 0)
    assert h.answered(Outcome.ACCEPTED, "", 0.1) == Delivered(A)


@pytest.mark.parametrize("outcome", SURELY_NOT_THERE)
def test_the_next_is_tried_where_the_payload_surely_is_not(outcome: Outcome) -> None:
    h = hop(A, B)
    h.start(0.0)
    assert h.answered(outcome, "why", 0.1) == Push(B, 0)
    assert h.answered(Outcome.ACCEPTED, "", 0.2) == Delivered(B)


def test_after_silence_nobody_else_is_tried_and_the_silent_one_is_named() -> None:
    h = hop(A, B)
    h.start(0.0)
    told = h.answered(Outcome.LOST, "cut", 0.1)
    assert told == Tell("aaaaaa fell silent: cut", A)


def test_silence_is_told_even_if_others_were_busy() -> None:
    h = hop(A, B, C)
    h.start(0.0)
    h.answered(Outcome.BUSY, "", 0.1)
    told = h.answered(Outcome.LOST, "cut", 0.2)
    assert isinstance(told, Tell)
    assert told.silent == B


def test_when_all_are_busy_the_payload_is_kept_and_all_are_tried_again() -> None:
    h = hop(A, B)
    h.start(0.0)
    h.answered(Outcome.BUSY, "", 0.0)
    pause = h.answered(Outcome.BUSY, "", 0.0)
    assert isinstance(pause, Pause)
    assert 0.5 <= pause.until <= 1.0
    assert h.resume(pause.until) == Push(A, 1)
    assert h.answered(Outcome.BUSY, "", 1.0) == Push(B, 1)
    assert h.answered(Outcome.ACCEPTED, "", 1.0) == Delivered(B)
    assert h.busy_answers == 3


def test_pauses_grow() -> None:
    h = hop(A)
    h.start(0.0)
    lengths = []
    for _ in range(4):
        pause = h.answered(Outcome.BUSY, "", 0.0)
        assert isinstance(pause, Pause)
        lengths.append(pause.until)
        h.resume(0.0)
    for length, full in zip(lengths, [1.0, 2.0, 4.0, 8.0], strict=True):
        assert full / 2 <= length <= full


def test_after_a_pause_only_the_busy_are_tried_again() -> None:
    h = hop(A, B, C)
    h.start(0.0)
    h.answered(Outcome.REFUSED, "stale", 0.0)
    h.answered(Outcome.BUSY, "", 0.0)
    assert isinstance(h.answered(Outcome.UNREACHABLE, "no route", 0.0), Pause)
    assert h.resume(1.0) == Push(B, 1)
    assert isinstance(h.answered(Outcome.BUSY, "", 1.0), Pause)
    assert h.unreachable == [C]


def test_when_nobody_is_left_the_trainer_hears_every_reason() -> None:
    h = hop(A, B)
    h.start(0.0)
    h.answered(Outcome.REFUSED, "stale", 0.0)
    assert h.answered(Outcome.UNREACHABLE, "no route", 0.0) == Tell(
        "aaaaaa refused: stale; bbbbbb unreachable: no route", None
    )


def test_an_empty_list_is_told_at_once() -> None:
    assert hop().start(0.0) == Tell("nobody to send to", None)


def test_a_pause_ends_at_the_deadline_and_then_the_trainer_is_told() -> None:
    h = hop(A, B, deadline=0.25)
    h.start(0.0)
    h.answered(Outcome.REFUSED, "stale", 0.0)
    assert h.answered(Outcome.BUSY, "", 0.0) == Pause(0.25)
    assert h.resume(0.25) == Tell("time is up; aaaaaa refused: stale", None)


def test_delivery_counts_even_after_the_deadline() -> None:
    h = hop(A, deadline=1.0)
    h.start(0.0)
    assert h.answered(Outcome.ACCEPTED, "", 5.0) == Delivered(A)


def test_an_answer_without_a_call_is_a_mistake_of_the_caller() -> None:
    h = hop(A)
    with pytest.raises(ValueError, match="no call is under way"):
        h.answered(Outcome.BUSY, "", 0.0)
    h.start(0.0)
    h.answered(Outcome.ACCEPTED, "", 0.0)
    with pytest.raises(ValueError, match="no call is under way"):
        h.answered(Outcome.ACCEPTED, "", 0.0)


@settings(deadline=None, derandomize=True)
@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.sampled_from(list(Outcome)), st.floats(0.0, 3.0)), max_size=40),
)
def test_whatever_is_answered_at_most_one_replica_may_have_the_payload(
    candidates: int, answers: list[tuple[Outcome, float]]
) -> None:
    replicas = [Replica(f"peer-{n}", "b0") for n in range(candidates)]
    h = hop(*replicas, deadline=30.0)
    now, may_have, tries = 0.0, [], []
    move = h.start(now)
    for outcome, passed in answers:
        if isinstance(move, Pause):
            assert now <= move.until <= 30.0
            now = max(now, move.until)
            move = h.resume(now)
        if not isinstance(move, Push):
            break
        assert (move.replica, move.tries) not in tries
        tries.append((move.replica, move.tries))
        if outcome in (Outcome.ACCEPTED, Outcome.LOST):
            may_have.append(move.replica)
        now += passed
        move = h.answered(outcome, "", now)
        if outcome is Outcome.ACCEPTED:
            assert move == Delivered(may_have[0])
        if outcome is Outcome.LOST:
            assert isinstance(move, Tell)
            assert move.silent == may_have[0]
    assert len(may_have) <= 1
