"""What is kept of all microbatches agrees with what a count of them finds, whatever happens."""

from __future__ import annotations

import random

import pytest

from swarm.core.journey import Journey, Phase
from swarm.core.tally import Tally
from swarm.types import Replica, Stamp, Term

A, B = Replica("a", "boot"), Replica("b", "boot")
ROUTE = ((A, B), (B, A))
FOREVER = float("inf")


def stamp(n: int) -> Stamp:
    return Stamp(Term(1, "trainer"), n)


def befall(trip: Journey, n: int, now: float, rng: random.Random) -> None:
    """Anything that may befall a microbatch."""
    replica, stage = rng.choice((A, B)), rng.randrange(2)
    match rng.randrange(9):
        case 0 | 1 if trip.phase is Phase.IDLE:
            trip.send(stamp(n), ROUTE, now, rng.uniform(0.0, 20.0))
        case 2:
            trip.holds(stage, replica)
        case 3:
            trip.measured(1.0)
        case 4:
            trip.dropped(replica)
        case 5:
            trip.failed("for no reason", now)
        case 6 if trip.stamp is not None:
            trip.answered(trip.stamp, replica, stage, rng.random() < 0.5)
        case 7:
            trip.tick(now)
        case 8 if trip.stamp is not None and rng.random() < 0.2:
            trip.not_finite(trip.stamp, stage, (A, B), now)
        case _ if trip.stamp is not None:
            trip.progress(trip.stamp, stage, replica, now)


def agree(tally: Tally, trips: dict[int, Journey]) -> None:
    phases = [trip.phase for trip in trips.values()]
    assert tally.done == phases.count(Phase.DONE)
    assert tally.all_done == (tally.done == len(trips))
    assert tally.in_flight == phases.count(Phase.FLYING) + phases.count(Phase.ASKING)
    assert tally.void == any(trip.void for trip in trips.values())
    assert tally.deadline() == min(trip.deadline for trip in trips.values())
    for stage in range(2):
        holders = {m: trip.holders[stage] for m, trip in trips.items() if stage in trip.holders}
        assert tally.stage_done(stage) == (len(holders) == len(trips))
        assert set(tally.holders(stage)) == set(holders.values())
        for replica in (A, B):
            held = {m for m, holder in holders.items() if holder == replica}
            assert tally.held_by(stage, replica) == held


@pytest.mark.parametrize("seed", range(10))
def test_it_agrees_with_a_count_of_all_whatever_befalls_them(seed: int) -> None:
    rng = random.Random(seed)
    trips = {m: Journey(m, 2, answer_s=3.0) for m in range(6)}
    tally = Tally(trips)
    for n in range(1, 600):
        befall(trips[rng.randrange(6)], n, float(n // 4), rng)
        agree(tally, trips)


def test_it_begins_with_what_is_so_already() -> None:
    trips = {m: Journey(m, 2, answer_s=3.0) for m in range(3)}
    trips[0].holds(1, B)
    trips[1].send(stamp(1), ROUTE, 0.0, 5.0)
    tally = Tally(trips)
    agree(tally, trips)
    assert tally.held_anywhere(B) == [trips[0]]


def test_the_idle_are_handed_out_oldest_first_and_once() -> None:
    trips = {m: Journey(m, 2, answer_s=3.0) for m in (3, 1, 2)}
    tally = Tally(trips)
    trips[2].send(stamp(1), ROUTE, 0.0, 5.0)
    assert tally.next_idle() is trips[1]
    assert tally.next_idle() is trips[3]
    assert tally.next_idle() is None
    trips[2].lost(A, 1.0)
    trips[2].lost(B, 1.0)
    assert trips[2].phase is Phase.IDLE
    assert tally.next_idle() is trips[2]


def test_what_is_idle_twice_before_it_is_sent_is_handed_out_once() -> None:
    trip = Journey(0, 1, answer_s=3.0)
    tally = Tally({0: trip})
    trip.holds(0, A)
    trip.measured(1.0)
    assert trip.phase is Phase.DONE
    trip.dropped(A)
    assert tally.next_idle() is trip
    assert tally.next_idle() is None


def test_the_late_are_found_oldest_microbatch_first() -> None:
    trips = {m: Journey(m, 2, answer_s=3.0) for m in range(3)}
    tally = Tally(trips)
    for m, limit_s in ((2, 1.0), (0, 2.0), (1, 9.0)):
        trips[m].send(stamp(m + 1), ROUTE, 0.0, limit_s)
    assert tally.due(0.5) == []
    assert tally.due(2.0) == [trips[0], trips[2]]
    assert tally.due(2.0) == []
    assert tally.deadline() == 9.0


def test_an_evaluation_counts_nowhere() -> None:
    trip = Journey(0, 2, answer_s=3.0, evaluation=True)
    tally = Tally({0: trip})
    trip.send(stamp(1), ROUTE, 0.0, 5.0)
    trip.measured(1.0)
    assert tally.all_done
    assert not tally.stage_done(0)
    assert tally.deadline() == FOREVER
