"""Limits that a volunteer sets: bytes a second, and who goes first on the processors."""

from __future__ import annotations

import random

import pytest

from swarm.core.caps import Bucket, Courtesy


@pytest.mark.parametrize("seed", range(5))
def test_bytes_do_not_go_faster_than_allowed(seed: int):
    rng, bucket, now, sent = random.Random(seed), Bucket(1000.0), 100.0, 0
    for _ in range(200):
        nbytes = rng.randrange(1, 3000)
        now += bucket.wait_s(nbytes, now)
        sent += nbytes
    assert sent <= 1000 * (now - 100.0) + 1000 * Bucket.BURST_S + 1
    assert sent >= 1000 * (now - 100.0) - 1


def test_after_a_pause_a_little_goes_at_once():
    bucket = Bucket(1000.0)
    assert bucket.wait_s(1000, 0.0) == 0.0
    assert bucket.wait_s(1000, 0.0) == 1.0
    assert bucket.wait_s(500, 1000.0) == 0.0
    assert bucket.wait_s(1500, 1000.0) == 1.0


def looks(courtesy: Courtesy, *others: float) -> list[bool]:
    return [courtesy.look(one) for one in others]


def test_it_pauses_when_others_work_for_long_and_goes_on_when_they_rest():
    courtesy, many = Courtesy(), Courtesy.LOOKS
    assert looks(courtesy, *[0.9] * (many - 1)) == [False] * (many - 1)
    assert courtesy.look(0.9)
    assert courtesy.paused
    assert not any(looks(courtesy, *[0.4] * 20)), "between low and high nothing changes"
    assert looks(courtesy, *[0.1] * many)[-1]
    assert not courtesy.paused


def test_a_moment_changes_nothing():
    courtesy = Courtesy()
    assert not any(looks(courtesy, *([0.9] * (Courtesy.LOOKS - 1) + [0.1]) * 10))
    assert not courtesy.paused
