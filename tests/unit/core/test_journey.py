"""One microbatch: ask, then send again; what is known of it, and who is to look at it anew."""

from __future__ import annotations

import math

from swarm.core.journey import Ask, Journey, Phase, Silent, loss_of
from swarm.types import Replica, Stamp, Term

TERM = Term(1, "trainer")
A0, A1, B0, B1 = (Replica(name, "boot") for name in ("a0", "a1", "b0", "b1"))
ROUTE = ((A0, A1), (B0, B1))
FOREVER = float("inf")


def stamp(n: int) -> Stamp:
    return Stamp(TERM, n)


def flying(*, evaluation: bool = False) -> Journey:
    """Microbatch 7 of two stages, sent at time 0 as attempt 1 with a limit of 10 s."""
    trip = Journey(7, 2, answer_s=3.0, evaluation=evaluation)
    trip.send(stamp(1), ROUTE, 0.0, 10.0)
    return trip


def all_answer_no(trip: Journey) -> None:
    assert trip.stamp is not None
    for stage, short_list in enumerate(ROUTE):
        for replica in short_list:
            trip.answered(trip.stamp, replica, stage, False)


def test_it_is_done_when_each_stage_holds_it_and_the_loss_is_known() -> None:
    trip = flying()
    trip.holds(1, B0)
    trip.holds(0, A0)
    assert trip.phase is Phase.FLYING
    trip.measured(0.5)
    assert trip.phase is Phase.DONE
    assert trip.deadline == FOREVER
    trip.measured(9.0)
    assert trip.loss == 0.5


def test_the_first_to_say_that_it_holds_is_believed() -> None:
    trip = flying()
    trip.holds(1, B0)
    trip.holds(1, B1)
    assert trip.holders == {1: B0}


def test_an_evaluation_is_done_with_its_loss_and_counts_nowhere() -> None:
    trip = flying(evaluation=True)
    assert trip.mask == frozenset()
    trip.holds(0, A0)
    assert trip.phase is Phase.FLYING
    trip.measured(0.5)
    assert trip.phase is Phase.DONE


def test_an_evaluation_that_nobody_holds_any_more_still_counts_nowhere() -> None:
    trip = flying(evaluation=True)
    trip.holds(0, A0)
    trip.dropped(A0)
    assert trip.holders == {}
    assert trip.mask == frozenset()


def test_a_loss_that_never_came_sends_it_once_more_with_nothing_to_count() -> None:
    trip = flying()
    trip.holds(0, A0)
    trip.holds(1, B0)
    trip.tick(10.0)
    all_answer_no(trip)
    assert trip.phase is Phase.IDLE
    assert trip.mask == frozenset()


def test_signs_of_life_put_the_limit_off_but_only_those_of_this_attempt() -> None:
    trip = flying()
    trip.progress(stamp(1), 0, A0, 5.0)
    trip.progress(stamp(0), 0, A0, 8.0)
    assert trip.tick(14.9) == []
    assert trip.tick(15.0)[0] == Ask(7, stamp(1), A0)
    trip.progress(stamp(1), 1, B0, 15.5)
    assert trip.deadline == 18.0, "an answer is not waited for longer because of a late receipt"


def test_after_a_failure_all_on_the_lists_are_asked_before_it_goes_again() -> None:
    trip = flying()
    asks = trip.failed("a hop gave up", 2.0)
    assert asks == [Ask(7, stamp(1), replica) for replica in (A0, A1, B0, B1)]
    assert trip.failed("and another", 2.0) == []
    for stage, replica in ((0, A0), (0, A1), (1, B0)):
        trip.answered(stamp(1), replica, stage, False)
        assert trip.phase is Phase.ASKING
    trip.answered(stamp(1), B1, 1, True, 0.25)
    assert trip.phase is Phase.IDLE
    assert trip.mask == {0}
    assert trip.loss == 0.25


def test_answers_about_an_older_attempt_inform_but_do_not_end_the_question() -> None:
    trip = flying()
    trip.failed("late", 1.0)
    all_answer_no(trip)
    trip.send(stamp(2), ((A0,), (B0,)), 2.0, 10.0)
    trip.failed("late again", 3.0)
    trip.answered(stamp(1), A0, 0, True)
    assert trip.holders == {0: A0}
    assert trip.phase is Phase.ASKING


def test_it_may_be_done_while_answers_are_still_awaited() -> None:
    trip = flying()
    trip.failed("no progress", 1.0)
    trip.holds(0, A0)
    trip.answered(stamp(1), B0, 1, True, 0.5)
    assert trip.phase is Phase.DONE
    assert trip.tick(100.0) == []


def test_who_does_not_answer_a_question_is_silent() -> None:
    trip = flying()
    trip.failed("no progress", 1.0)
    trip.answered(stamp(1), A1, 0, False)
    assert trip.tick(3.9) == []
    silent = trip.tick(4.0)
    assert [do.replica for do in silent if isinstance(do, Silent)] == [A0, B0, B1]
    assert trip.phase is Phase.IDLE


def test_what_a_removed_replica_held_goes_again_with_the_mask_of_its_stage() -> None:
    trip = flying()
    trip.holds(0, A0)
    trip.holds(1, B0)
    trip.measured(0.5)
    assert trip.lost(B0, 5.0) == []
    assert trip.phase is Phase.IDLE
    assert trip.mask == {1}


def test_nothing_goes_again_when_the_removed_replicas_round_stands() -> None:
    trip = flying()
    trip.holds(0, A0)
    trip.holds(1, B0)
    trip.measured(0.5)
    assert trip.lost(B0, 5.0, stands=True) == []
    assert trip.phase is Phase.DONE


def test_an_attempt_at_a_removed_replica_is_asked_for_but_not_at_that_replica() -> None:
    trip = flying()
    trip.progress(stamp(1), 0, A1, 1.0)
    asks = trip.lost(A1, 2.0)
    assert [do.replica for do in asks if isinstance(do, Ask)] == [A0, B0, B1]


def test_an_attempt_goes_on_when_only_a_spare_of_its_lists_is_removed() -> None:
    trip = flying()
    trip.progress(stamp(1), 0, A1, 1.0)
    assert trip.lost(B1, 2.0) == []
    assert trip.lost(A0, 2.0) == []
    assert trip.phase is Phase.FLYING
    asks = trip.failed("no progress", 3.0)
    assert [do.replica for do in asks if isinstance(do, Ask)] == [A1, B0]


def test_a_removal_answers_the_question_to_that_replica() -> None:
    trip = flying()
    trip.failed("no progress", 1.0)
    for stage, replica in ((0, A0), (0, A1), (1, B0)):
        trip.answered(stamp(1), replica, stage, False)
    assert trip.lost(B1, 2.0) == []
    assert trip.phase is Phase.IDLE


def test_with_nobody_left_to_ask_it_may_go_again_at_once() -> None:
    trip = Journey(7, 1, answer_s=3.0)
    trip.send(stamp(1), ((A0,),), 0.0, 10.0)
    assert trip.lost(A0, 1.0) == []
    assert trip.phase is Phase.IDLE


def not_finite_on(trip: Journey, n: int, way: tuple[Replica, Replica]) -> None:
    """Attempt ``n`` goes by ``way`` and turns out not finite at stage 1."""
    trip.send(stamp(n), ((way[0],), (way[1],)), 0.0, 10.0)
    trip.not_finite(stamp(n), 1, (), 1.0)


def test_a_gradient_that_is_not_finite_is_looked_at_on_another_way() -> None:
    trip = flying()
    trip.progress(stamp(1), 0, A1, 0.5)
    asks = trip.not_finite(stamp(1), 1, (), 1.0)
    assert len(asks) == 4
    assert trip.shun == {A1, B0}
    assert not trip.void


def test_two_ways_without_a_common_replica_make_it_void() -> None:
    trip = Journey(7, 2, answer_s=3.0)
    not_finite_on(trip, 1, (A0, B0))
    not_finite_on(trip, 2, (A0, B1))
    assert not trip.void, "A0 may have caused both"
    assert trip.shun == {A0, B1}
    not_finite_on(trip, 3, (A1, B1))
    assert trip.void
    assert trip.phase is Phase.DONE
    trip.dropped(A0)
    assert trip.phase is Phase.DONE


def test_a_way_may_repeat_replicas_that_are_the_only_one_of_their_stage() -> None:
    trip = Journey(7, 2, answer_s=3.0)
    for n, replica in ((1, B0), (2, B1)):
        trip.send(stamp(n), ((A0,), (replica,)), 0.0, 10.0)
        trip.not_finite(stamp(n), 1, {A0}, 1.0)
    assert trip.void


def test_one_attempt_alone_never_makes_it_void() -> None:
    trip = Journey(7, 2, answer_s=3.0)
    trip.send(stamp(1), ((A0,), (B0,)), 0.0, 10.0)
    trip.not_finite(stamp(1), 1, {A0, B0}, 1.0)
    trip.not_finite(stamp(1), 0, {A0, B0}, 1.0)
    assert not trip.void


def test_an_older_attempts_gradient_does_not_disturb_the_one_under_way() -> None:
    trip = Journey(7, 2, answer_s=3.0)
    trip.send(stamp(1), ROUTE, 0.0, 10.0)
    trip.send(stamp(2), ROUTE, 1.0, 10.0)
    assert trip.not_finite(stamp(1), 1, (), 2.0) == []
    assert trip.phase is Phase.FLYING
    assert trip.shun == frozenset()


def test_what_has_counted_everywhere_is_not_made_void() -> None:
    trip = flying()
    trip.holds(0, A0)
    trip.holds(1, B0)
    trip.measured(0.5)
    assert trip.not_finite(stamp(1), 1, (), 2.0) == []
    assert trip.shun == frozenset()


def test_the_loss_of_a_step_is_the_exact_sum_of_its_parts() -> None:
    trips = []
    for loss in (1e16, 1.0, -1e16):
        trip = flying(evaluation=True)
        trip.measured(loss)
        trips.append(trip)
    assert loss_of(trips) == 1.0


def test_a_sum_of_losses_that_is_no_number_is_nan() -> None:
    missing, up, down = (flying(evaluation=True) for _ in range(3))
    up.measured(math.inf)
    down.measured(-math.inf)
    assert math.isnan(loss_of([missing]))
    assert math.isnan(loss_of([up, down]))
    large = [flying(evaluation=True) for _ in range(2)]
    for trip in large:
        trip.measured(1.7e308)
    assert math.isnan(loss_of(large))
