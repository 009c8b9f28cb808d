"""Held-out microbatches: they stop at the loss, count nowhere, and survive failures."""

from __future__ import annotations

import random

import pytest

from swarm.core.backoff import Backoff
from swarm.core.evaluation import Evaluation
from swarm.core.flight import Flight, Launch, Pace, Receipt, Stamps
from swarm.core.intake import Kind
from swarm.core.journey import Ask, Journey
from swarm.core.step import Probe, Remove
from swarm.core.wiring import Window, Wiring
from swarm.types import FRESH, Replica, Stamp, Term

A0, A1, B = Replica("a0", "1"), Replica("a1", "1"), Replica("b", "1")
STAGES = [[A0, A1], [B]]


def evaluation(microbatches: int = 2, stages: list[list[Replica]] = STAGES) -> Evaluation:
    term = Term(1, "t")
    flight = Flight(
        [Journey(m, 2, answer_s=5.0, evaluation=True) for m in range(microbatches)],
        FRESH,
        wiring=Wiring(2, ban=Backoff(1.0)),
        window=Window(4, least=1, most=8),
        pace=Pace(10.0),
        stamps=Stamps(lambda n: Stamp(term, n)),
        rng=random.Random(0),
    )
    return Evaluation(flight, 2, ready=lambda stage: list(stages[stage]))


def launches(todo: list) -> list[Launch]:
    return [do for do in todo if isinstance(do, Launch)]


def loss(launch: Launch, value: float) -> Receipt:
    return Receipt(
        launch.attempt.stamp, launch.attempt.m, 1, B, Kind.BACKWARD, "not asked", 0, 0.1, 0, value
    )


def test_it_is_finished_when_every_loss_is_known() -> None:
    work = evaluation()
    sent = launches(work.advance(0.0))
    assert [launch.attempt.m for launch in sent] == [0, 1]
    assert all(launch.attempt.evaluation for launch in sent)
    work.receipt(loss(sent[0], 0.25), 1.0)
    assert not work.finished
    work.receipt(loss(sent[1], 0.5), 1.0)
    assert work.finished
    assert work.flight.loss() == 0.75
    assert work.deadline() == float("inf")


def test_a_failed_attempt_is_asked_for_and_goes_again() -> None:
    work = evaluation(1)
    (first,) = launches(work.advance(0.0))
    work.failed(0, first.attempt.stamp, "a hop gave up", 1.0)
    asks = [do for do in work.advance(1.0) if isinstance(do, Ask)]
    assert {ask.replica for ask in asks} >= {B}
    for ask in asks:
        work.answered(ask, 0, True, 3.0)  # what they hold of training means nothing here
    assert not work.finished
    (again,) = launches(work.advance(2.0))
    assert again.attempt.stamp > first.attempt.stamp
    work.receipt(loss(again, 1.0), 3.0)
    assert work.finished


def test_a_removed_replica_gets_no_more_work_until_it_is_admitted() -> None:
    work = evaluation(1)
    (first,) = launches(work.advance(0.0))
    gone = first.route[0][0]
    work.remove(gone, "silent", 1.0)
    work.remove(gone, "silent", 1.0)
    todo = work.advance(1.0)
    assert [do for do in todo if isinstance(do, Remove)] == [Remove(gone, "silent")]
    for ask in [do for do in todo if isinstance(do, Ask)]:
        work.answered(ask, 0, False)
    (again,) = launches(work.advance(2.0))
    assert gone not in again.route[0]
    work.admitted(gone, stage=0)
    work.failed(0, again.attempt.stamp, "once more", 3.0)
    for ask in [do for do in work.advance(3.0) if isinstance(do, Ask)]:
        work.answered(ask, 0, False)
    (third,) = launches(work.advance(4.0))
    assert gone in third.route[0]


def test_unreachable_replicas_are_probed_unless_removed() -> None:
    work = evaluation(1)
    (first,) = launches(work.advance(0.0))
    skipped = Receipt(
        *(first.attempt.stamp, 0, 0, first.route[0][0], Kind.FORWARD, "not asked", 0, 0.1, 0),
        skipped=(B,),
    )
    work.receipt(skipped, 1.0)
    assert Probe(B) in work.advance(1.0)
    work.remove(B, "silent", 2.0)
    work.unreachable([B])
    assert Probe(B) not in work.advance(2.0)


def test_silence_ends_in_removal() -> None:
    work = evaluation(1)
    work.advance(0.0)
    late = work.deadline()
    asks = [do for do in work.advance(late) if isinstance(do, Ask)]
    assert asks
    removed = [do.replica for do in work.advance(late + 5.0) if isinstance(do, Remove)]
    assert set(removed) == {ask.replica for ask in asks}


def test_nothing_is_sent_while_a_stage_has_nobody() -> None:
    work = evaluation(1, [[A0], []])
    assert work.advance(0.0) == []
    assert not work.finished


@pytest.mark.parametrize("alone", [True, False])
def test_a_loss_that_is_not_finite_is_looked_at_by_another(alone: bool) -> None:
    work = evaluation(1, [[A0], [B]] if alone else [[A0], [B, A1]])
    (first,) = launches(work.advance(0.0))
    bad = Receipt(
        first.attempt.stamp, 0, 1, first.route[1][0], Kind.BACKWARD, "not finite", 0, 0.1, 0
    )
    work.receipt(bad, 1.0)
    for ask in [do for do in work.advance(1.0) if isinstance(do, Ask)]:
        work.answered(ask, 0, False)
    (again,) = launches(work.advance(2.0))
    assert (again.route[1][0] != first.route[1][0]) is not alone


def test_what_a_stranger_says_is_not_believed() -> None:
    work = evaluation(1)
    (first,) = launches(work.advance(0.0))
    stranger = Receipt(
        *(first.attempt.stamp, 0, 1, Replica("x", "1"), Kind.BACKWARD, "not asked", 0, 0.1, 0),
        loss=0.0,
    )
    work.receipt(stranger, 1.0)
    assert not work.finished


def test_replicas_that_leave_get_none_of_it_unless_all_that_stay_are_gone() -> None:
    whole = evaluation(1)
    work = Evaluation(
        whole.flight,
        2,
        ready=lambda stage: list(STAGES[stage]),
        serving=lambda stage: [A1] if stage == 0 else [B],
    )
    (first,) = launches(work.advance(0.0))
    assert first.route[0] == (A1,)
    work.remove(A1, "silent", 1.0)
    for ask in [do for do in work.advance(1.0) if isinstance(do, Ask)]:
        work.answered(ask, 0, False)
    (again,) = launches(work.advance(2.0))
    assert again.route[0] == (A0,)
