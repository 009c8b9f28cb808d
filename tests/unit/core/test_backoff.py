"""Pauses that grow and bans that end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.backoff import Backoff, Bans

BACKOFF = Backoff(first_s=1.0, factor=2.0, cap_s=10.0)


class Fixed(random.Random):
    """``random()`` always gives the same value."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self._value = value

    def random(self) -> float:
        return self._value


NO_JITTER = Fixed(1.0)


def test_pauses_double_up_to_the_cap() -> None:
    pauses = [BACKOFF.pause(failures, NO_JITTER) for failures in range(1, 7)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_jitter_takes_off_at_most_half() -> None:
    assert BACKOFF.pause(2, Fixed(0.0)) == 1.0
    assert BACKOFF.pause(2, Fixed(0.5)) == 1.5


@settings(deadline=None, derandomize=True)
@given(st.integers(-5, 10**9), st.integers(0, 1000))
def test_a_pause_is_between_half_the_first_and_the_cap(failures: int, seed: int) -> None:
    assert 0.5 <= BACKOFF.pause(failures, random.Random(seed)) <= 10.0


def test_the_seed_decides_the_jitter() -> None:
    first = [BACKOFF.pause(3, random.Random(seed)) for seed in range(10)]
    assert first == [BACKOFF.pause(3, random.Random(seed)) for seed in range(10)]
    assert len(set(first)) == 10


@pytest.fixture
def bans() -> Bans[str]:
    return Bans(BACKOFF)


def test_a_ban_ends(bans: Bans[str]) -> None:
    until = bans.failed("a", 100.0, NO_JITTER)
    assert until == 101.0
    assert bans.banned("a", 100.5)
    assert not bans.banned("a", 101.0)
    assert not bans.banned("b", 100.5)


def test_bans_grow_on_repetition_even_after_they_ended(bans: Bans[str]) -> None:
    assert bans.failed("a", 0.0, NO_JITTER) == 1.0
    assert bans.failed("a", 100.0, NO_JITTER) == 102.0
    assert bans.failed("b", 100.0, NO_JITTER) == 101.0


def test_success_ends_a_ban_and_its_history(bans: Bans[str]) -> None:
    bans.failed("a", 0.0, NO_JITTER)
    bans.failed("a", 0.0, NO_JITTER)
    bans.succeeded("a")
    assert not bans.banned("a", 0.0)
    assert bans.failed("a", 0.0, NO_JITTER) == 1.0


def test_success_of_one_who_never_failed_is_nothing(bans: Bans[str]) -> None:
    bans.succeeded("a")
    assert not bans.banned("a", 0.0)


def test_the_banned_are_left_out_in_the_given_order(bans: Bans[str]) -> None:
    bans.failed("b", 0.0, NO_JITTER)
    assert bans.allowed(["c", "b", "a"], 0.5) == ["c", "a"]
    assert bans.allowed(["c", "b", "a"], 1.0) == ["c", "b", "a"]


def test_bans_are_dropped_where_they_would_leave_nobody(bans: Bans[str]) -> None:
    bans.failed("a", 0.0, NO_JITTER)
    bans.failed("b", 0.0, NO_JITTER)
    assert bans.allowed(["a", "b"], 0.5) == ["a", "b"]
    assert bans.allowed([], 0.5) == []
