"""Cutting layers into stages and vectors into parts."""

from __future__ import annotations

import itertools
import random

import pytest

from swarm.core.partition import cuts_into_stages, layers_into_stages, vector_into_parts


def dearest(costs: list[float], stages: list[range]) -> float:
    return max(sum(costs[layer] for layer in stage) for stage in stages)


def all_cuts(layers: int, count: int) -> list[list[range]]:
    inner = itertools.combinations(range(1, layers), count - 1)
    return [cuts_into_stages(layers, cuts) for cuts in inner]


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_has_a_cheaper_dearest_stage(seed: int) -> None:
    rng = random.Random(seed)
    costs = [float(rng.choice([0, 1, 2, 3, 7, 20])) for _ in range(rng.randint(1, 9))]
    for count in range(1, len(costs) + 1):
        stages = layers_into_stages(costs, count)
        assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
        assert len(stages) == count
        assert all(len(stage) > 0 for stage in stages)
        cheapest = min(dearest(costs, other) for other in all_cuts(len(costs), count))
        assert dearest(costs, stages) == cheapest


def test_nearly_free_ends_go_with_their_neighbours() -> None:
    costs = [0.01, 1, 1, 1, 1, 1, 1, 0.2]
    assert layers_into_stages(costs, 3) == [range(0, 3), range(3, 5), range(5, 8)]


def test_many_layers_are_cut_in_bounded_time() -> None:
    stages = layers_into_stages([1.0] * 1026, 64)
    assert {len(stage) for stage in stages} <= {15, 16, 17}


@pytest.mark.parametrize("count", [0, 4, -1])
def test_a_count_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="3 layers make 1 to 3 stages"):
        layers_into_stages([1, 1, 1], count)


def test_negative_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        layers_into_stages([1, -1], 1)


def test_cuts_are_the_first_layers_of_later_stages() -> None:
    assert cuts_into_stages(8, [3, 5]) == [range(0, 3), range(3, 5), range(5, 8)]
    assert cuts_into_stages(8, []) == [range(0, 8)]


@pytest.mark.parametrize("cuts", [[0], [8], [3, 3], [5, 3]])
def test_cuts_that_do_not_rise_are_refused(cuts: list[int]) -> None:
    with pytest.raises(ValueError, match="must rise from 1 to 7"):
        cuts_into_stages(8, cuts)


@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("members", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 100, 1024, 1037])
def test_parts_cover_the_vector_once(length: int, members: int, align: int) -> None:
    parts = vector_into_parts(length, members, align=align)
    assert len(parts) == members
    assert [i for part in parts for i in part] == list(range(length))
    assert all(part.start % align == 0 for part in parts if part)
    blocks = [-(-len(part) // align) for part in parts]
    assert max(blocks) - min(blocks) <= 1


def test_members_without_a_block_get_an_empty_part() -> None:
    assert [len(part) for part in vector_into_parts(20, 4, align=16)] == [16, 4, 0, 0]


@pytest.mark.parametrize(("length", "members", "align"), [(-1, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_parts_that_cannot_be_are_refused(length: int, members: int, align: int) -> None:
    with pytest.raises(ValueError, match="cannot cut"):
        vector_into_parts(length, members, align=align)
