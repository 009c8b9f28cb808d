"""The end of a step in one stage: who takes part, when a round stands, and who is removed."""

from __future__ import annotations

import pytest

from swarm.core.closing import (
    FETCHES,
    IDLE_PROBES,
    Closing,
    Drop,
    Fetch,
    Instruction,
    Phase,
    Prepare,
    Vote,
)
from swarm.types import Replica, Stamp, Term

TERM = Term(1, "trainer")
A, B, C = (Replica(name, "boot") for name in "abc")
LIMIT_S, ANSWER_S = 10.0, 2.0
FOREVER = float("inf")


def stamp(n: int) -> Stamp:
    return Stamp(TERM, n)


def vote(n: int = 1, digest: str = "same") -> Vote:
    return Vote(stamp(n), digest, 4.0, True)


def summing(**held: set[int]) -> Closing:
    """Round 1 of stage 2 is open since time 0 among the replicas named, who hold so much."""
    closing = Closing(2, limit_s=LIMIT_S, answer_s=ANSWER_S)
    closing.prepare(stamp(1), {Replica(k, "boot"): frozenset(v) for k, v in held.items()}, 0.0)
    return closing


def asked(found: list[Instruction]) -> list[Replica]:
    return [do.replica for do in found if isinstance(do, Prepare)]


def dropped(found: list[Instruction]) -> list[Replica]:
    return [do.replica for do in found if isinstance(do, Drop)]


def probe(closing: Closing, now: float, **missed: tuple[Replica, ...]) -> list[Instruction]:
    """The round's limit has passed at ``now``; the members named say whom they miss."""
    assert asked(closing.tick(now))
    found: list[Instruction] = []
    for name, whom in missed.items():
        found += closing.agreed(Replica(name, "boot"), stamp(1), whom, now)
    return found


def test_a_prepare_names_the_round_its_order_who_contributes_and_what_is_expected() -> None:
    closing = Closing(2, limit_s=LIMIT_S, answer_s=ANSWER_S)
    expected = {B: frozenset({0, 2}), A: frozenset(), C: frozenset({1})}
    found = closing.prepare(stamp(5), expected, 0.0)
    assert found == [
        Prepare(2, stamp(5), member, (B, A, C), (B, C), expected[member]) for member in (B, A, C)
    ]
    assert closing.phase is Phase.SUMMING
    assert closing.latest == stamp(5)


def test_it_is_ready_when_every_member_has_voted_the_same() -> None:
    closing = summing(a={0}, b={1})
    closing.vote(A, vote())
    assert closing.phase is Phase.SUMMING
    closing.vote(B, vote())
    assert closing.phase is Phase.READY
    assert closing.deadline == FOREVER
    assert closing.outcome == vote()


@pytest.mark.parametrize(("who", "what"), [(C, vote()), (B, vote(n=0)), (B, vote(n=2))])
def test_votes_of_strangers_and_of_other_rounds_are_ignored(who: Replica, what: Vote) -> None:
    closing = summing(a={0}, b={1})
    closing.vote(A, vote())
    closing.vote(who, what)
    assert closing.phase is Phase.SUMMING
    assert closing.votes == {A: vote()}


def test_who_takes_part_is_not_asked_again_before_the_limit() -> None:
    closing = summing(a={0}, b={1})
    assert closing.agreed(A, stamp(1), (), 1.0) == []
    assert closing.tick(LIMIT_S - 0.1) == []
    assert asked(closing.tick(LIMIT_S)) == [A, B]
    assert closing.phase is Phase.PROBING
    assert closing.deadline == LIMIT_S + ANSWER_S


def test_only_those_that_have_not_voted_are_asked_how_far_they_are() -> None:
    closing = summing(a={0}, b={1}, c={2})
    closing.vote(B, vote())
    assert asked(closing.tick(LIMIT_S)) == [A, C]


def test_trouble_between_members_brings_the_question_forward() -> None:
    closing = summing(a={0}, b={1})
    assert closing.hurry(stamp(0), 1.0) == []
    assert asked(closing.hurry(stamp(1), 1.0)) == [A, B]
    assert closing.hurry(stamp(1), 1.0) == [], "they are being asked already"


def test_the_silent_are_removed() -> None:
    closing = summing(a={0}, b={1}, c={2})
    assert probe(closing, 10.0, a=(B, C)) == []
    assert closing.tick(11.9) == []
    assert dropped(closing.tick(12.0)) == [B, C]


def test_a_vote_that_comes_while_all_are_asked_is_an_answer() -> None:
    closing = summing(a={0}, b={1})
    probe(closing, 10.0)
    closing.vote(B, vote())
    assert closing.agreed(A, stamp(1), (B,), 10.5) == [Fetch(2, stamp(1), A, B)]


@pytest.mark.parametrize(("who", "n"), [(C, 1), (A, 0)])
def test_answers_of_strangers_and_of_other_rounds_do_not_count(who: Replica, n: int) -> None:
    closing = summing(a={0})
    closing.tick(10.0)
    assert closing.agreed(who, stamp(n), (), 10.5) == []
    assert dropped(closing.tick(12.0)) == [A]


def test_who_lacks_a_part_fetches_it_from_one_voter_after_the_other() -> None:
    closing = summing(a={0}, b={1}, c={2})
    closing.vote(A, vote())
    closing.vote(B, vote())
    now, sources = 10.0, []
    for _ in range(FETCHES):
        (found,) = probe(closing, now, c=(A,))
        assert isinstance(found, Fetch)
        assert found.replica == C
        sources.append(found.source)
        now = closing.deadline
    assert sources == [A, B, A]
    assert dropped(probe(closing, now, c=(A,))) == [C], "it cannot get the sum"


def test_of_those_that_cannot_reach_each_other_the_most_missed_goes_never_all() -> None:
    closing = summing(a={0}, b={1}, c={2, 3})
    assert probe(closing, 10.0, a=(C, B), b=(C,), c=(A,)) == []
    assert dropped(probe(closing, closing.deadline, a=(C, B), b=(C,), c=(A,))) == [C]


def test_of_two_that_miss_each_other_the_one_that_holds_less_goes() -> None:
    closing = summing(a={0, 1}, b={2})
    probe(closing, 10.0, a=(B,), b=(A,))
    assert dropped(probe(closing, closing.deadline, a=(B,), b=(A,))) == [B]


def test_one_look_removes_nobody_since_it_may_have_brought_a_lost_prepare() -> None:
    closing = summing(a={0}, b={1})
    assert probe(closing, 10.0, a=(B,), b=()) == []
    assert probe(closing, closing.deadline, a=(), b=(A,)) == [], "now it is another's turn"
    assert closing.phase is Phase.SUMMING


def test_a_member_cannot_blame_itself_or_a_stranger() -> None:
    closing = summing(a={0}, b={1})
    for _ in range(IDLE_PROBES - 1):
        assert probe(closing, max(10.0, closing.deadline), a=(A, C), b=()) == []
    assert closing.phase is Phase.SUMMING


def test_a_round_in_which_nothing_is_missed_and_nobody_votes_is_begun_anew() -> None:
    closing = summing(a={0})
    for _ in range(IDLE_PROBES):
        assert closing.phase is Phase.SUMMING
        probe(closing, max(10.0, closing.deadline), a=())
    assert closing.phase is Phase.OPEN
    assert closing.round is None
    assert closing.latest == stamp(1)


def test_each_new_round_may_take_twice_as_long() -> None:
    closing = Closing(0, limit_s=LIMIT_S, answer_s=ANSWER_S)
    limits = []
    for n in range(9):
        closing.prepare(stamp(n), {A: frozenset({0})}, 100.0)
        limits.append(closing.deadline - 100.0)
    assert limits == [LIMIT_S * 2**n for n in (0, 1, 2, 3, 4, 5, 6, 6, 6)]


def test_a_round_stands_when_a_member_goes_after_somebody_has_voted() -> None:
    closing = summing(a={0}, b={1}, c={2})
    closing.vote(A, vote())
    assert closing.removed(B)
    assert closing.irreplaceable
    assert asked(closing.tick(0.1)) == [C], "what B owed the others will not come"
    closing.vote(C, vote())
    assert closing.phase is Phase.READY
    assert closing.members == (A, C)


def test_it_is_ready_as_soon_as_the_last_that_had_not_voted_is_gone() -> None:
    closing = summing(a={0}, b={1})
    closing.vote(A, vote())
    assert closing.removed(B)
    assert closing.phase is Phase.READY
    assert closing.outcome == vote()


def test_a_removal_while_all_are_asked_does_not_end_the_question() -> None:
    closing = summing(a={0}, b={1}, c={2})
    closing.vote(A, vote())
    closing.tick(10.0)
    assert closing.removed(B)
    assert closing.deadline == 12.0
    assert closing.agreed(C, stamp(1), (B,), 11.0) == [Fetch(2, stamp(1), C, A)]


def test_a_round_stands_for_one_that_came_back_empty_and_is_gone_again() -> None:
    closing = summing(a={0}, b={1})
    closing.vote(A, vote())
    closing.removed(B)
    assert closing.removed(B)
    closing.reopen()
    assert not closing.removed(B)


def test_a_member_that_held_nothing_can_be_replaced() -> None:
    closing = summing(a={0}, b=set())
    closing.vote(A, vote())
    assert closing.removed(B)
    assert not closing.irreplaceable


def test_a_round_that_nobody_holds_the_sum_of_dies_with_a_member() -> None:
    unvoted, only_voter = summing(a={0}, b={1}), summing(a={0}, b={1})
    only_voter.vote(A, vote())
    for closing in (unvoted, only_voter):
        assert not closing.removed(A)
        assert closing.phase is Phase.OPEN
        assert closing.deadline == FOREVER


def test_the_removal_of_a_stranger_changes_nothing() -> None:
    closing = summing(a={0})
    assert not closing.removed(C)
    assert closing.phase is Phase.SUMMING


def test_different_sums_are_made_anew_then_the_odd_one_goes() -> None:
    closing = summing(a={0, 1}, b={2}, c={3})
    for round_ in (1, 2):
        if round_ == 2:
            held = {A: frozenset({0, 1}), B: frozenset({2}), C: frozenset({3})}
            closing.prepare(stamp(2), held, 20.0)
        closing.vote(A, vote(round_, "odd"))
        closing.vote(B, vote(round_))
        closing.vote(C, vote(round_))
        assert closing.phase is Phase.OPEN
        assert dropped(closing.tick(20.0)) == ([] if round_ == 1 else [A])
    assert closing.tick(20.0) == []


def test_where_as_many_differ_the_sum_of_those_with_more_work_is_kept() -> None:
    closing = summing(a={0}, b={1, 2})
    for n in (1, 2):
        closing.prepare(stamp(n), {A: frozenset({0}), B: frozenset({1, 2})}, 0.0)
        closing.vote(A, vote(n, "z"))
        closing.vote(B, vote(n, "y"))
    assert dropped(closing.tick(0.0)) == [A]
