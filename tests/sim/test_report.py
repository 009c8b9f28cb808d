"""An outcome in figures and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest

from swarm.sim.report import as_tree, between, middle, share_of_optimum, stage_figures, to_json
from swarm.sim.world import Moved, Outcome, Sample
from tests.sim.worlds import world


def outcome() -> Outcome:
    samples = [
        Sample(60.0, 1.0, 2.0, (1, 2, 3)),
        Sample(120.0, 2.0, 2.0, (1, 1, 4), resent=5),
        Sample(180.0, 3.0, 4.0, (2, 1, 3)),
    ]
    moves = [Moved(70.0, "b", 1, 2, "why", 90.0), Moved(130.0, "c", 2, 0, "why", inf)]
    return Outcome(
        world(duration_s=180.0),
        "fluid",
        samples=samples,
        moves=moves,
        done=360.0,
        resent=5,
        sent_bytes={"b": 2.0, "a": 1.0, "c": 9.0},
    )


def test_the_share_is_work_by_work_not_a_mean_of_shares():
    assert share_of_optimum(outcome().samples) == 6 / 8
    assert share_of_optimum([]) is None
    assert share_of_optimum([Sample(1.0, 0.0, 0.0, (0,))]) is None


def test_a_stretch_belongs_to_where_it_ends():
    assert [s.at_s for s in between(outcome().samples, 60, 120)] == [120.0]
    assert len(between(outcome().samples, 0, 180)) == 3


def test_stages_tell_who_served_and_who_moved():
    first, second, third = stage_figures(outcome())
    assert (first.least, first.most, first.came, first.went) == (1, 2, 1, 0)
    assert second.mean == pytest.approx(4 / 3)
    assert (third.came, third.went) == (1, 1)


def test_nothing_can_be_told_of_an_empty_outcome():
    empty = Outcome(world(), "fluid")
    assert [f.most for f in stage_figures(empty)] == [0, 0, 0]
    assert as_tree(empty)["share_of_optimum"]["overall"] is None
    assert middle({}) == 0


def test_json_is_finite_sorted_and_whole():
    tree = json.loads(to_json(outcome()))
    assert tree["share_of_optimum"]["overall"] == 0.75
    assert tree["samples_per_s"] == 2
    assert [sample["resent"] for sample in tree["timeline"]] == [0, 5, 0]
    assert [move["done_s"] for move in tree["moves"]] == [90, None]
    assert list(tree["bytes"]["sent"]) == ["a", "b", "c"]


def test_json_is_the_same_for_the_same_outcome():
    shuffled = outcome()
    shuffled.sent_bytes = dict(reversed(shuffled.sent_bytes.items()))
    assert to_json(shuffled) == to_json(outcome())
    shuffled.moves[0] = replace(shuffled.moves[0], at_s=71.0)
    assert to_json(shuffled) != to_json(outcome())
