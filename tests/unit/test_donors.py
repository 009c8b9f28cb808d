"""Whose turn it is to give a piece, and who is left out for a while."""

from __future__ import annotations

import pytest

from peers.donors import ASIDE_S, LONGEST_ASIDE_S, Donors
from swarm.types import Replica

A, B, C = (Replica(name, "boot") for name in "abc")


def turns(donors: Donors, count: int, now: float = 0.0) -> list[Replica | None]:
    return [donors.next(now) for _ in range(count)]


def test_all_take_turns() -> None:
    donors = Donors([C, A, B, A])
    found = turns(donors, 6)
    assert found[:3] == found[3:]
    assert set(found) == {A, B, C}


def test_in_turn_names_each_once_and_begins_with_another_each_time() -> None:
    donors = Donors([A, B, C])
    first, second = list(donors.in_turn(0.0)), list(donors.in_turn(0.0))
    assert sorted(first) == sorted(second) == [A, B, C]
    assert first[0] != second[0]


def test_one_that_failed_is_left_out_until_its_pause_is_over() -> None:
    donors = Donors([A, B])
    donors.failed(A, 10.0)
    assert set(turns(donors, 4, 10.5)) == {B}
    assert set(turns(donors, 4, 10.0 + ASIDE_S)) == {A, B}


def test_nobody_is_named_while_all_have_failed_lately() -> None:
    donors = Donors([A, B])
    donors.failed(A, 0.0)
    donors.failed(B, 0.0)
    assert donors.next(0.5) is None
    assert donors.witness(0.5) is None
    assert list(donors.in_turn(0.5)) == []
    assert Donors([]).next(0.0) is None


def pause(donors: Donors, replica: Replica, now: float) -> float:
    """How long it is left out from ``now`` on, to a quarter of a second."""
    quarters = 0
    while replica not in donors.in_turn(now + quarters / 4):
        quarters += 1
    return quarters / 4


def test_pauses_grow_to_a_limit_and_end_with_success() -> None:
    donors = Donors([A, B])
    pauses = []
    for i in range(8):
        donors.failed(A, 1000.0 * i)
        pauses.append(pause(donors, A, 1000.0 * i))
    assert pauses == [ASIDE_S * 2**i for i in range(6)] + [LONGEST_ASIDE_S] * 2
    donors.gave(A)
    assert pause(donors, A, 7000.0) == 0.0
    donors.failed(A, 9000.0)
    assert pause(donors, A, 9000.0) == ASIDE_S


def test_a_donor_may_fail_as_often_as_it_likes() -> None:
    donors = Donors([A])
    for _ in range(2000):
        donors.failed(A, 0.0)
    assert pause(donors, A, 0.0) == LONGEST_ASIDE_S


def test_only_those_that_the_trainer_still_names_are_asked() -> None:
    donors = Donors([A, B])
    donors.offered([B, C])
    assert set(turns(donors, 4)) == {B, C}
    donors.failed(B, 0.0)
    donors.offered([B])
    assert donors.next(0.5) is None, "naming it again is no success"


# -- the witness ----------------------------------------------------------------------------


def test_the_witness_is_one_that_gave_nothing() -> None:
    donors = Donors([A, B, C])
    donors.gave(A)
    assert donors.witness(0.0) == B
    donors.failed(B, 0.0)
    assert donors.witness(0.5) == C
    donors.gave(C)
    assert donors.witness(ASIDE_S) == B


def test_where_all_gave_any_of_them_is_the_witness() -> None:
    donors = Donors([A, B])
    donors.gave(A)
    donors.gave(B)
    assert donors.witness(0.0) in (A, B)


# -- copying from one alone -----------------------------------------------------------------


def preferring() -> Donors:
    """B is preferred, after all three have given something."""
    donors = Donors([A, B, C])
    for replica in (A, B, C):
        donors.gave(replica)
    donors.prefer(B)
    return donors


def test_the_preferred_alone_is_asked_and_is_the_witness() -> None:
    donors = preferring()
    assert turns(donors, 4) == [B] * 4
    assert list(donors.in_turn(0.0)) == [B]
    assert donors.witness(0.0) == B
    assert [donors.has_given(replica) for replica in (A, B, C)] == [False, True, False]


def test_the_others_take_turns_while_the_preferred_has_failed_lately() -> None:
    donors = preferring()
    donors.failed(B, 0.0)
    assert set(turns(donors, 4, 0.5)) == {A, C}
    assert turns(donors, 4, ASIDE_S) == [B] * 4


@pytest.mark.parametrize(("named", "expected"), [([A, B], {B}), ([A, C], {A, C})])
def test_it_stays_preferred_as_long_as_it_is_named(named: list, expected: set) -> None:
    donors = preferring()
    donors.offered(named)
    assert set(turns(donors, 4)) == expected
