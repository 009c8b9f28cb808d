"""What the dashboard is sent: whole, strict JSON, each point once, few however long the run is."""

from __future__ import annotations

import json
import math

import pytest

from peers.board import MOST, Curve, Point, Reader, document, number, thin
from peers.runview import ReplicaView, RunView, StageView

REPLICA = ReplicaView(
    "aaaaaa", "ready", 41, 0.75, 0.04, 2, "note", 0.4, "12D3KooWaaaaaa", "1.2.3.4:31000", 200.0
)
VIEW = RunView(
    name="tiny",
    run_id="3fa9",
    step=50,
    steps=200,
    loss=math.nan,
    losses=(),
    samples_per_s=32.0,
    started_s_ago=100.0,
    phase="",
    stages=(StageView(0, (REPLICA,), ("bbbbbb",)), StageView(1, ())),
    events=("ignored: the document has its own, with times",),
    warnings=("stage 1 has no replica",),
)


def point(step: int, loss: float = 1.0) -> Point:
    return Point(step, loss, None, 10.0)


def curve(*steps: int) -> Curve:
    made = Curve()
    for step in steps:
        made.add(point(step))
    return made


def steps_of(news: dict[str, object]) -> list[int]:
    return [row[0] for row in news["points"]]  # type: ignore[index, attr-defined]


def test_the_document_says_what_the_view_says():
    found = document(VIEW, [(1700000000.04, "somebody came")], samples_in_step=16)
    assert found["stages"] == [
        {
            "stage": 0,
            "lost": ["bbbbbb"],
            "replicas": [
                {
                    "name": "aaaaaa",
                    "peer": "12D3KooWaaaaaa",
                    "address": "1.2.3.4:31000",
                    "state": "ready",
                    "step": 41,
                    "share": 0.75,
                    "samples_per_s": 200.0,
                    "mean_time_s": 0.04,
                    "queue": 2,
                    "last_work_s": 0.4,
                    "note": "note",
                }
            ],
        },
        {"stage": 1, "lost": [], "replicas": []},
    ]
    assert found["events"] == [{"at": 1700000000.0, "text": "somebody came"}]
    assert found["warnings"] == ["stage 1 has no replica"]
    assert found["eta_s"] == 150 * 16 / 32.0
    assert found["loss"] is None
    json.dumps(found, allow_nan=False)


def test_how_long_it_takes_is_not_known_before_anything_is_done():
    from dataclasses import replace

    assert document(replace(VIEW, samples_per_s=0.0), [], 16)["eta_s"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_what_is_no_number_is_null(value: float | None):
    assert number(value) is None


def test_a_page_gets_each_point_once():
    steps = curve(0, 1, 2)
    reader = Reader(steps)
    first = reader.news()
    assert (steps_of(first), first["reset"]) == ([0, 1, 2], True)
    assert reader.news() == {"points": [], "reset": False}
    steps.add(point(3))
    assert reader.news() == {"points": [[3, 1.0, None, 10.0]], "reset": False}


def test_after_a_rollback_a_page_begins_anew():
    steps = curve(*range(10))
    reader = Reader(steps)
    reader.news()
    steps.rewind(4)
    steps.add(point(4, 9.0))
    news = reader.news()
    assert news["reset"] is True
    assert steps_of(news) == [0, 1, 2, 3, 4]
    assert news["points"][-1][1] == 9.0


def test_a_step_that_is_told_again_replaces_the_one_before():
    steps = curve(0, 1)
    steps.add(point(1, 7.0))
    assert [(p.step, p.loss) for p in steps.points] == [(0, 1.0), (1, 7.0)]


def test_a_run_that_is_taken_back_whole_leaves_an_empty_page():
    steps = curve(0, 1)
    reader = Reader(steps)
    reader.news()
    steps.rewind(0)
    assert reader.news() == {"points": [], "reset": True}
    steps.add(point(0))
    assert steps_of(reader.news()) == [0]


def test_a_long_run_is_thinned_with_its_first_and_last_point():
    found = Reader(curve(*range(3 * MOST))).news()["points"]
    assert len(found) == MOST
    assert (found[0][0], found[-1][0]) == (0, 3 * MOST - 1)
    assert thin([point(0), point(1)], most=5) == [point(0), point(1)]


def test_a_run_that_is_gone_on_with_shows_what_was_before():
    steps = Curve()
    steps.load(
        [
            {"step": 0, "loss": 5.0, "samples": 16, "seconds": 2.0},
            {"step": 1, "loss": 4.0, "samples": 16, "seconds": None, "eval_loss": 4.5},
        ]
    )
    assert steps.points == [Point(0, 5.0, None, 8.0), Point(1, 4.0, 4.5, None)]
