"""The run as the dashboard shows it: one JSON document, and the points of its curves.

The document (durations in seconds; null: not known):

    name, run     of the run
    step, steps   done, and how many the run has
    loss          of the last step
    samples_per_s over the last steps
    elapsed_s     since this trainer began
    eta_s         until the last step, at that speed
    phase         what the trainer does now, in words
    warnings      [text]: what a person should look at
    events        [{"at": seconds since 1970, "text"}], oldest first
    stages        [{"stage", "lost": [name], "replicas": [{"name", "peer", "address", "state",
                  "step", "share", "samples_per_s", "mean_time_s", "queue", "last_work_s",
                  "note"}]}]: as in the live view (``peers.runview``)
    points        [[step, loss, evaluation loss, samples per second]]: those that are new
    reset         true: the points are all there are, those known before are void
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from peers.runview import ReplicaView, RunView, StageView

MOST = 2000
"""Points that a page gets at a time, evenly taken of those there are."""


@dataclass(frozen=True, slots=True)
class Point:
    """One step of the curves. ``samples_per_s`` None: another trainer has timed it."""

    step: int
    loss: float
    eval_loss: float | None
    samples_per_s: float | None

    def row(self) -> list[float | None]:
        return [
            self.step,
            number(self.loss),
            number(self.eval_loss),
            number(self.samples_per_s),
        ]


class Curve:
    """The steps of a run, in order, each once: what is done again replaces what was."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.rewinds = 0
        """How often points were taken back: then a page begins anew."""

    def add(self, point: Point) -> None:
        self.rewind(point.step)
        self.points.append(point)

    def rewind(self, step: int) -> None:
        """Steps from ``step`` on are void."""
        if self.points and self.points[-1].step >= step:
            self.points = [point for point in self.points if point.step < step]
            self.rewinds += 1

    def load(self, metrics: Iterable[Mapping[str, Any]]) -> None:
        """Of a run directory that is gone on with: see ``peers.steps.StepDone``."""
        for line in metrics:
            seconds = line.get("seconds")
            rate = line["samples"] / seconds if seconds else None
            self.add(Point(line["step"], line["loss"], line.get("eval_loss"), rate))

    def since(self, step: int) -> list[Point]:
        """Those after ``step``, at most ``MOST`` of them, the last one always."""
        first = len(self.points)
        while first > 0 and self.points[first - 1].step > step:
            first -= 1
        return thin(self.points[first:])


def thin(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """At most ``most``, evenly taken, with the first and the last."""
    if len(points) <= most:
        return list(points)
    step = (len(points) - 1) / (most - 1)
    return [points[round(i * step)] for i in range(most)]


class Reader:
    """One page that is open: what it knows already."""

    def __init__(self, curve: Curve) -> None:
        self._curve = curve
        self._rewinds = -1
        self._step = -1

    def news(self) -> dict[str, Any]:
        """``points`` and ``reset`` of the document, once for each."""
        reset = self._rewinds != self._curve.rewinds
        points = self._curve.since(-1 if reset else self._step)
        self._rewinds = self._curve.rewinds
        self._step = points[-1].step if points else -1 if reset else self._step
        return {"points": [point.row() for point in points], "reset": reset}


def document(
    view: RunView, events: Iterable[tuple[float, str]], samples_in_step: int
) -> dict[str, Any]:
    """The whole of it but for the points."""
    left = max(0, view.steps - view.step) * samples_in_step
    return {
        "name": view.name,
        "run": view.run_id,
        "step": view.step,
        "steps": view.steps,
        "loss": number(view.loss),
        "samples_per_s": number(view.samples_per_s),
        "elapsed_s": number(view.started_s_ago),
        "eta_s": number(left / view.samples_per_s) if view.samples_per_s else None,
        "phase": view.phase,
        "warnings": list(view.warnings),
        "events": [{"at": round(at, 1), "text": text} for at, text in events],
        "stages": [_stage(stage) for stage in view.stages],
    }


def _stage(stage: StageView) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "lost": list(stage.lost),
        "replicas": [_replica(replica) for replica in stage.replicas],
    }


def _replica(replica: ReplicaView) -> dict[str, Any]:
    return {
        "name": replica.name,
        "peer": replica.peer,
        "address": replica.address,
        "state": replica.state,
        "step": replica.mark_step,
        "share": number(replica.share),
        "samples_per_s": number(replica.samples_per_s),
        "mean_time_s": number(replica.mean_time_s),
        "queue": replica.queue,
        "last_work_s": number(replica.last_work_s_ago),
        "note": replica.note,
    }


def number(value: float | None) -> float | None:
    """For JSON, which has no NaN: five digits are more than anybody sees."""
    if value is None or not isfinite(value):
        return None
    return float(f"{value:.6g}")
