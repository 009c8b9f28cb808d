"""The paper's rule: who moves where, and what queues would be in fluid mode."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from swarm.sim.paper import paper_choice, paper_move, queues


def test_the_shortest_queue_of_the_least_loaded_stage_goes_to_the_most_loaded():
    queued = [{"a": 4.0, "b": 6.0}, {"c": 2.0, "d": 1.0, "e": 3.0}, {"f": 7.0}]
    assert paper_move(queued, random.Random(0)) == ("d", 0)


def test_among_equals_the_lot_decides():
    queued = [{"a": 1.0, "b": 1.0}, {"c": 9.0}]
    moved = {paper_move(queued, random.Random(seed)) for seed in range(20)}
    assert moved == {("a", 1), ("b", 1)}


def test_nobody_moves_between_equal_stages_nor_as_the_last_of_one():
    assert paper_move([{"a": 1.0, "b": 2.0}, {"c": 3.0}], random.Random(0)) is None
    assert paper_move([{"a": 0.0}, {"c": 3.0}], random.Random(0)) is None


def test_a_newcomer_goes_where_most_waits_if_it_fits():
    assert paper_choice([1.0, 5.0, 3.0], [0, 1, 2]) == 1
    assert paper_choice([1.0, 5.0, 3.0], [0, 2]) == 2


def mean_queues(rates: list[float], waiting: float) -> list[float]:
    rng = random.Random(1)
    drawn = [queues(rates, waiting, rng) for _ in range(4000)]
    return [fmean(column) for column in zip(*drawn, strict=True)]


def test_work_piles_up_in_front_of_the_slowest_stage():
    found = mean_queues([1.0, 2.0, 4.0], 50.0)
    assert sum(found) == pytest.approx(50, rel=0.05)
    assert found[0] > 45
    # The others are busy for 1/2 and 1/4 of the time.
    assert found[1] == pytest.approx(1, rel=0.15)
    assert found[2] == pytest.approx(1 / 3, rel=0.15)


def test_equally_slow_stages_share_what_waits():
    assert mean_queues([1.0, 1.0, 9.0], 40.0)[:2] == pytest.approx([20, 20], rel=0.05)


def test_all_waits_for_a_stage_that_nobody_serves():
    assert queues([1.0, 0.0, 3.0], 12.0, random.Random(0)) == [0.0, 12.0, 0.0]
