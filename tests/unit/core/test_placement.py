"""Where a newcomer is needed."""

from __future__ import annotations

import random

import pytest

from swarm.core.placement import least_served


def test_the_stage_with_the_fewest_replicas() -> None:
    assert least_served([2, 1, 3], random.Random(0)) == 1


def test_equals_are_drawn_by_lot_so_that_nodes_that_start_together_spread() -> None:
    rng = random.Random(0)
    drawn = {least_served([1, 0, 0, 2, 0], rng) for _ in range(100)}
    assert drawn == {1, 2, 4}


def test_no_stage_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        least_served([], random.Random(0))
