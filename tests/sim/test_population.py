"""Who is there when: a trace as single peers, and lives drawn by lot."""

from __future__ import annotations

import random
from math import inf

import pytest

from swarm.sim.population import Span, renewal, replay, steady
from swarm.sim.traces import Trace

TRACE = Trace("t", (0.0, 10.0, 20.0, 30.0, 50.0), (6, 3, 4, 0, 5), 60.0)


def alive(spans: list[Span], time_s: float) -> int:
    return sum(span.arrives_s <= time_s < span.leaves_s for span in spans)


@pytest.mark.parametrize("peers", [6, 60, 7])
def test_as_many_are_there_as_the_trace_says(peers):
    spans = replay(TRACE, peers, random.Random(1))
    scaled = TRACE.scaled(peers)
    for time in (0, 5, 10, 15, 20, 29, 30, 40, 50, 59):
        assert alive(spans, time) == scaled.at(time)


def test_who_leaves_does_not_come_back():
    spans = replay(TRACE, 6, random.Random(1))
    assert len(spans) == 6 + 1 + 5
    assert all(span.arrives_s < span.leaves_s for span in spans)


def test_the_seed_decides_who_leaves():
    def stay(seed: int) -> list[Span]:
        return replay(Trace("t", (0, 1, 2), (20, 21, 10), 3), 21, random.Random(seed))

    assert stay(3) == stay(3)
    # The one that came last is drawn for some seeds, and not for others.
    assert len({Span(1.0, 2.0) in stay(seed) for seed in range(20)}) == 2


def test_after_the_end_nobody_is_looked_for():
    spans = replay(TRACE, 6, random.Random(1), until_s=15.0)
    assert max(span.arrives_s for span in spans) == 0
    assert {span.leaves_s for span in spans} == {10.0, inf}


def test_steady_peers_stay():
    assert steady(2) == [Span(0.0, inf)] * 2


def test_lives_have_the_mean_that_was_asked_for():
    spans = renewal(2000, random.Random(4), until_s=100.0, lifetime_s=50.0)
    lives = [min(span.leaves_s, 100.0) - span.arrives_s for span in spans if not span.arrives_s]
    # The mean of a life that is cut at twice the mean is 1 - exp(-2) of it.
    assert sum(lives) / len(lives) == pytest.approx(50 * 0.8647, rel=0.05)
    assert alive(spans, 90.0) == pytest.approx(2000, rel=0.06), "arrivals make up for departures"


def test_arrivals_come_as_often_as_was_asked_for():
    spans = renewal(1, random.Random(4), until_s=1000.0, lifetime_s=1e9, arrival_s=2.0)
    assert len(spans) == pytest.approx(501, rel=0.1)
    assert all(span.leaves_s == inf for span in spans)
