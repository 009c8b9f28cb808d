"""Microbatches in flight: who is sent next, what a receipt means, and what it must not mean."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swarm.core.backoff import Backoff
from swarm.core.flight import (
    COUNTED,
    DROPPED,
    HELD,
    NOT_FINITE,
    Flight,
    Launch,
    Pace,
    Receipt,
    Stamps,
)
from swarm.core.intake import Kind
from swarm.core.journey import Ask, Journey, Phase, Silent
from swarm.core.wiring import Window, Wiring
from swarm.types import FRESH, Replica, Stamp, Term

TERM = Term(1, "trainer")
A0, A1, B0, B1 = (Replica(name, "boot") for name in ("a0", "a1", "b0", "b1"))
STAGES = [[A0, A1], [B0, B1]]
FLOOR_S = 0.5


class Bench:
    """A flight of ``count`` microbatches over two stages of two replicas, and what it uses."""

    def __init__(self, count: int = 1, window: int = 4) -> None:
        self.wiring = Wiring(2, ban=Backoff(1.0))
        self.window = Window(window, least=1, most=8)
        self.pace = Pace(FLOOR_S)
        self.flight = Flight(
            [Journey(m, 2, answer_s=3.0) for m in range(count)],
            FRESH,
            wiring=self.wiring,
            window=self.window,
            pace=self.pace,
            stamps=Stamps(lambda n: Stamp(TERM, n)),
            rng=random.Random(0),
        )

    def launch(self, now: float = 0.0, stages: list[list[Replica]] = STAGES) -> list[Launch]:
        found = self.flight.fill(stages, now)
        assert all(isinstance(do, Launch) for do in found)
        return [do for do in found if isinstance(do, Launch)]

    def outstanding(self) -> int:
        return sum(load.outstanding for stage in (0, 1) for load in self.wiring.loads(stage))

    def goes_through(self, launch: Launch, now: float) -> None:
        """All receipts of ``launch``, served by the first choices, arrive at ``now``."""
        for receipt in (forward(launch), backward(launch, 1, loss=0.5), backward(launch, 0)):
            assert self.flight.receipt(receipt, False, now) == []


def forward(launch: Launch, /, **changes: object) -> Receipt:
    """The receipt of stage 0's first choice for a forward, but for ``changes``."""
    attempt, first = launch.attempt, launch.route[0][0]
    plain = Receipt(
        attempt.stamp, attempt.m, 0, first, Kind.FORWARD, "", queue_s=0.0, compute_s=0.2, link_s=0.1
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def backward(launch: Launch, at: int, told: str = COUNTED, /, **changes: object) -> Receipt:
    """The receipt of the first choice of stage ``at`` for a backward, but for ``changes``."""
    plain = {"stage": at, "replica": launch.route[at][0], "kind": Kind.BACKWARD, "verdict": told}
    return forward(launch, **(plain | changes))


def test_stamps_come_from_one_counter_that_never_repeats() -> None:
    stamps = Stamps(lambda n: Stamp(TERM, n))
    assert [stamps.take() for _ in range(3)] == [Stamp(TERM, n) for n in (1, 2, 3)]


def test_limits_follow_measured_times_with_a_floor_and_grow_with_each_try() -> None:
    pace = Pace(FLOOR_S)
    assert pace.limit_s(0) == Pace.FIRST * FLOOR_S
    pace.took(2.0)
    assert pace.limit_s(0) == Pace.FACTOR * 2.0
    assert pace.limit_s(2) == Pace.FACTOR * 2.0 * Pace.GROWTH**2
    assert pace.limit_s(100) == pace.limit_s(8)
    quick = Pace(FLOOR_S)
    quick.took(0.001)
    assert quick.limit_s(0) == FLOOR_S


def test_as_many_as_the_window_allows_are_launched_oldest_first() -> None:
    bench = Bench(count=5, window=2)
    launched = bench.launch()
    assert [do.attempt.m for do in launched] == [0, 1]
    assert bench.launch() == []
    bench.goes_through(launched[0], 1.0)
    assert [do.attempt.m for do in bench.launch(1.0)] == [2, 3], "it has grown by one"
    assert bench.flight.in_flight == 3


def test_an_attempt_names_what_has_to_count_and_whom_each_hop_may_try() -> None:
    (launch,) = Bench().launch()
    assert launch.attempt.mark == FRESH
    assert launch.attempt.mask == {0, 1}
    assert [set(short_list) for short_list in launch.route] == [set(s) for s in STAGES]


def test_nothing_is_launched_while_a_stage_has_nobody() -> None:
    bench = Bench()
    assert bench.launch(stages=[[A0], []]) == []
    assert len(bench.launch()) == 1


def test_a_microbatch_is_done_by_its_receipts_and_the_window_grows() -> None:
    bench = Bench()
    (launch,) = bench.launch()
    bench.goes_through(launch, 2.0)
    assert bench.flight.done
    assert bench.flight.loss() == 0.5
    assert bench.flight.held_by(0, launch.route[0][0]) == {0}
    assert bench.pace.limit_s(0) == Pace.FACTOR * 2.0
    assert bench.outstanding() == 0
    sizes = [bench.window.size]
    bench.goes_through(launch, 3.0)
    assert bench.window.size == sizes[0], "repeated receipts are no second success"
    assert bench.pace.limit_s(0) == Pace.FACTOR * 2.0


def test_service_time_is_forward_and_backward_together() -> None:
    bench = Bench()
    (launch,) = bench.launch()
    first = launch.route[0][0]
    bench.flight.receipt(forward(launch, compute_s=0.2, link_s=0.5), False, 1.0)
    bench.flight.receipt(backward(launch, 0, compute_s=0.4, link_s=0.1), False, 2.0)
    assert bench.wiring.expected_s(0, first) == pytest.approx(0.6)


def test_a_link_is_work_as_far_as_it_is_slower_than_the_quickest_of_its_way() -> None:
    pace = Pace(10.0)
    assert pace.beyond_latency_s((0, Kind.FORWARD), 0.5) == 0.0
    assert pace.beyond_latency_s((0, Kind.FORWARD), 0.9) == pytest.approx(0.4)
    assert pace.beyond_latency_s((0, Kind.FORWARD), 0.2) == 0.0
    assert pace.beyond_latency_s((0, Kind.FORWARD), 0.9) == pytest.approx(0.7)
    assert pace.beyond_latency_s((1, Kind.FORWARD), 0.9) == 0.0


def test_a_link_time_that_is_not_known_is_no_quick_one() -> None:
    pace = Pace(10.0)
    pace.beyond_latency_s((0, Kind.FORWARD), 0.5)
    assert pace.beyond_latency_s((0, Kind.FORWARD), 0.0) == 0.0
    assert pace.beyond_latency_s((0, Kind.FORWARD), 0.9) == pytest.approx(0.4, rel=0.02)


def test_the_quickest_of_a_way_is_forgotten_after_some_hundred_pushes() -> None:
    pace = Pace(10.0)
    pace.beyond_latency_s((0, Kind.FORWARD), 0.1)
    beyond = [pace.beyond_latency_s((0, Kind.FORWARD), 0.5) for _ in range(500)]
    assert beyond[0] == pytest.approx(0.4)
    assert beyond[10] > 0.3
    assert beyond[-1] < 0.01


def test_what_a_replica_says_it_holds_already_counts_as_held() -> None:
    bench = Bench()
    (launch,) = bench.launch()
    bench.flight.receipt(backward(launch, 1, HELD), False, 1.0)
    assert bench.flight.stage_done(1)
    assert not bench.flight.stage_done(0)


@pytest.mark.parametrize("verdict", ["below bar", "cancelled", "not asked", "nonsense"])
def test_any_other_verdict_counts_nothing(verdict: str) -> None:
    bench = Bench()
    (launch,) = bench.launch()
    assert bench.flight.receipt(backward(launch, 1, verdict), False, 1.0) == []
    assert not bench.flight.stage_done(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"stamp": Stamp(TERM, 99)},
        {"m": 1},
        {"stage": -1},
        {"stage": 2},
        {"replica": Replica("stranger", "boot")},
        {"replica": Replica("a0", "another boot")},
        {"stage": 0, "replica": B0},
    ],
)
def test_a_receipt_that_fits_no_attempt_is_ignored(changes: dict[str, object]) -> None:
    bench = Bench(count=2)
    launch, _ = bench.launch()
    bench.flight.receipt(backward(launch, 1), False, 1.0)
    before = bench.flight.journeys[0].deadline
    told = backward(launch, 0, busy=1000, loss=0.5, **changes)
    assert bench.flight.receipt(told, False, 2.0) == []
    assert bench.flight.journeys[0].loss is None
    assert bench.flight.journeys[0].holders.keys() == {1}
    assert bench.flight.journeys[0].deadline == before
    assert bench.window.size == 4


def test_busy_answers_narrow_the_window_however_many_they_are_once_one_is_done() -> None:
    bench = Bench(count=2, window=8)
    launch, _ = bench.launch()
    bench.flight.busy(10**18)
    assert bench.window.size == 8, "the whole window arrives at once at first"
    bench.goes_through(launch, 1.0)
    size = bench.window.size
    bench.flight.busy(0)
    assert bench.window.size == size
    bench.flight.busy(10**18)
    assert bench.window.size == size - 1


def test_a_quiet_attempt_is_asked_for_and_then_sent_again() -> None:
    bench = Bench()
    (launch,) = bench.launch()
    assert bench.flight.deadline() == launch.limit_s
    asks = bench.flight.tick(launch.limit_s)
    assert {do.replica for do in asks if isinstance(do, Ask)} == {A0, A1, B0, B1}
    assert bench.outstanding() == 0, "what is asked for is expected of nobody"
    for ask in asks:
        assert isinstance(ask, Ask)
        bench.flight.answered(ask, int(ask.replica in STAGES[1]), ask.replica == B1, 0.5)
    (again,) = bench.launch(4.0)
    assert again.attempt.mask == {0}
    assert again.attempt.stamp > launch.attempt.stamp
    assert again.limit_s > launch.limit_s
    assert bench.flight.resent == 1


def test_who_does_not_answer_a_cancel_is_reported() -> None:
    bench = Bench()
    (launch,) = bench.launch()
    bench.flight.tick(launch.limit_s)
    silent = bench.flight.tick(launch.limit_s + 3.0)
    assert {do.replica for do in silent if isinstance(do, Silent)} == {A0, A1, B0, B1}


def test_a_hop_that_gave_up_on_an_older_attempt_changes_nothing() -> None:
    bench = Bench()
    (launch,) = bench.launch()
    assert bench.flight.failed(5, launch.attempt.stamp, "no such microbatch", 1.0) == []
    assert bench.flight.failed(0, Stamp(TERM, 99), "no such attempt", 1.0) == []
    assert len(bench.flight.failed(0, launch.attempt.stamp, "all busy", 1.0)) == 4


def test_a_late_receipt_of_an_older_attempt_is_believed_but_measures_no_pace() -> None:
    bench = Bench()
    (launch,) = bench.launch()
    for ask in bench.flight.failed(0, launch.attempt.stamp, "early limit", 1.0):
        assert isinstance(ask, Ask)
        bench.flight.answered(ask, 0, False)
    bench.launch(100.0)
    bench.goes_through(launch, 100.1)
    assert bench.flight.done
    assert bench.pace.limit_s(0) == Pace.FIRST * FLOOR_S
    assert bench.outstanding() == 0


def test_a_failure_while_adding_uncounts_all_that_the_replica_held() -> None:
    bench = Bench(count=2)
    first, second = bench.launch()
    told = backward(first, 1)
    bench.flight.receipt(told, False, 1.0)
    assert bench.flight.held_by(1, told.replica) == {0}
    failed = backward(second, 1, DROPPED, replica=told.replica)
    asks = bench.flight.receipt(failed, False, 1.5)
    assert {do.m for do in asks if isinstance(do, Ask)} == {1}
    assert bench.flight.held_by(1, told.replica) == set()


def test_an_old_attempts_failure_while_adding_leaves_the_new_attempt_alone() -> None:
    bench = Bench()
    (launch,) = bench.launch()
    for ask in bench.flight.failed(0, launch.attempt.stamp, "early limit", 1.0):
        assert isinstance(ask, Ask)
        bench.flight.answered(ask, 0, False)
    bench.launch(2.0)
    assert bench.flight.receipt(backward(launch, 1, DROPPED), False, 3.0) == []
    assert bench.flight.journeys[0].phase is Phase.FLYING


def test_a_gradient_that_is_not_finite_goes_another_way_and_charges_are_given_back() -> None:
    bench = Bench()
    (launch,) = bench.launch()
    way = {short_list[0] for short_list in launch.route}
    asks = bench.flight.receipt(backward(launch, 1, NOT_FINITE), False, 1.0)
    assert bench.outstanding() == 0
    for ask in asks:
        assert isinstance(ask, Ask)
        bench.flight.answered(ask, 0, False)
    (again,) = bench.launch(2.0)
    assert way.isdisjoint(short_list[0] for short_list in again.route)
    assert not bench.flight.void
    bench.flight.receipt(backward(again, 1, NOT_FINITE), False, 3.0)
    assert bench.flight.void


@pytest.mark.parametrize("told_alone", [True, False])
def test_the_only_replica_of_a_stage_has_to_find_it_twice(told_alone: bool) -> None:
    bench = Bench()
    stages = [[A0], [B0, B1]] if told_alone else [[A0], [B0]]
    for n in (1, 2):
        (launch,) = bench.launch(float(n), stages)
        told = backward(launch, 0 if told_alone else 1, NOT_FINITE)
        asks = bench.flight.receipt(told, told_alone, float(n))
        assert bench.flight.void == (n == 2)
        for ask in asks:
            assert isinstance(ask, Ask)
            bench.flight.answered(ask, 0, False)


def test_what_a_removed_replica_held_or_had_goes_again() -> None:
    bench = Bench(count=2)
    first, second = bench.launch()
    bench.goes_through(first, 1.0)
    gone = first.route[1][0]
    bench.flight.receipt(forward(second, stage=1, replica=gone), False, 1.0)
    asks = bench.flight.lost(gone, 2.0)
    assert {do.m for do in asks if isinstance(do, Ask)} == {1}
    assert gone not in {do.replica for do in asks if isinstance(do, Ask)}
    (again,) = bench.launch(2.0)
    assert (again.attempt.m, again.attempt.mask) == (0, {1})


def test_nothing_is_uncounted_when_the_round_of_the_removed_stands() -> None:
    bench = Bench()
    (launch,) = bench.launch()
    bench.goes_through(launch, 1.0)
    assert bench.flight.lost(launch.route[1][0], 2.0, stands=True) == []
    assert bench.flight.done


def test_what_is_held_by_others_than_the_members_is_as_good_as_lost() -> None:
    bench = Bench()
    (launch,) = bench.launch()
    bench.goes_through(launch, 1.0)
    holder = launch.route[1][0]
    bench.flight.keep_only(1, [B0, B1])
    assert bench.flight.done
    bench.flight.keep_only(1, [replica for replica in (B0, B1) if replica != holder])
    assert bench.flight.held_by(1, holder) == set()
    assert bench.flight.stage_done(0)


def test_at_the_end_nobody_owes_anything() -> None:
    bench = Bench(count=3)
    bench.launch()
    assert bench.outstanding() == 6
    bench.flight.end()
    assert bench.outstanding() == 0


def test_an_empty_flight_has_no_deadline() -> None:
    assert Bench(count=0).flight.deadline() == float("inf")
