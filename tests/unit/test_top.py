"""``swarm top``: rate and curve of what it has seen."""

from __future__ import annotations

import io

from rich.console import Console

from peers.report import Report
from peers.top import LATELY_S, Looks, page
from swarm.types import Mark, Term


def report(step: int | None, loss: float | None = 3.0, steps: int = 100) -> Report:
    return Report(
        run_id="3fa9c1d2e4aa77",
        name="tiny",
        steps=steps,
        batch=16,
        state="training",
        mark=None if step is None else Mark(Term(1, "0" * 16), step),
        note="",
        loss=loss,
        leader="",
        term=1,
        quiet_s=0.5,
        trainers=(),
        stages=(),
    )


def text(shown: Report, looks: Looks) -> str:
    console = Console(width=90, file=io.StringIO(), record=True, color_system=None)
    console.print(page(shown, looks, 90))
    return console.export_text()


def test_the_rate_is_that_of_the_steps_that_were_seen():
    looks = Looks()
    for at in range(5):
        looks.add(report(10 + 2 * at), now=100.0 + at)
    assert looks.steps_per_s == 2.0
    shown = text(report(18), looks)
    assert "18%" in shown
    assert "32.0 samples/s" in shown
    assert "00:41 left" in shown


def test_nothing_is_said_of_a_rate_before_a_second_step():
    looks = Looks()
    for now in (1.0, 2.0, 3.0):
        looks.add(report(4), now)
    assert looks.steps_per_s is None
    assert looks.losses == [3.0]
    assert "samples/s" not in text(report(4), looks)


def test_a_run_that_has_not_begun_is_shown():
    looks = Looks()
    looks.add(report(None, None), 1.0)
    shown = text(report(None, None), looks)
    assert "not begun" in shown
    assert "0%" in shown


def test_old_steps_do_not_count_for_the_rate_and_rare_ones_do():
    looks = Looks()
    looks.add(report(0), 0.0)
    looks.add(report(1), 10 * LATELY_S)
    assert looks.steps_per_s == 1 / (10 * LATELY_S)
    for i in range(1, 5):
        looks.add(report(1 + i), 10 * LATELY_S + i)
    assert looks.steps_per_s == 1.0


def test_steps_that_are_taken_back_are_forgotten():
    looks = Looks()
    for step in range(6):
        looks.add(report(step, float(step)), float(step))
    looks.add(report(3, 9.0), 100.0)
    assert looks.losses == [0.0, 1.0, 2.0, 9.0]
    looks.add(report(4, 8.0), 101.0)
    assert looks.losses[-1] == 8.0
    assert looks.steps_per_s == 1.0, "what was before the loss is too long ago"
