"""The picture of a run: loss and throughput over its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOSS, _EVAL = "#1f5fa8", "#d9541e"
SPEED, GREY = "#2a8a5c", "#5b6470"

Points = list[tuple[float, float]]
"""(step, value) pairs, finite, in the order of the metrics."""


def plot_run(metrics: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw loss (with evaluations) above and samples per second below; PNG, 1000 x 700 pixels.

    ``metrics`` are the lines of ``metrics.jsonl``: ``step``, ``loss``, ``samples``, ``seconds``
    and sometimes ``eval_loss``. What is missing, null or not finite is left out.
    """
    # Imported here: it costs half a second, which every node would pay at its start.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 7), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    loss_axes, speed_axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    figure.suptitle(title, fontsize=15, fontweight="bold")

    losses = series(metrics, "loss")
    evaluations = series(metrics, "eval_loss")
    _draw_line(loss_axes, losses, _LOSS, "training loss")
    _draw_evaluations(loss_axes, evaluations)
    if losses and not evaluations:
        _write_value(loss_axes, losses[-1], _LOSS)
    dress(loss_axes, "loss", empty=not (losses or evaluations))
    if loss_axes.get_legend_handles_labels()[0]:
        loss_axes.legend(frameon=False, loc="upper right")

    speeds = throughput(metrics)
    _draw_line(speed_axes, speeds, SPEED, "samples per second")
    _draw_median(speed_axes, speeds)
    dress(speed_axes, "samples per second", empty=not speeds)
    speed_axes.set_ylim(bottom=0)
    speed_axes.set_xlabel("step")
    speed_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels()
    figure.savefig(path, format="png")


def series(metrics: Sequence[Mapping[str, Any]], key: str) -> Points:
    """The finite values of ``key``, each with its step."""
    return [(m["step"], m[key]) for m in metrics if _is_number(m.get(key)) and "step" in m]


def throughput(metrics: Sequence[Mapping[str, Any]]) -> Points:
    """Samples per second of each step that took some time."""
    return [
        (m["step"], m["samples"] / m["seconds"])
        for m in metrics
        if "step" in m
        and _is_number(m.get("samples"))
        and _is_number(m.get("seconds"))
        and m["seconds"] > 0
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _draw_line(axes: Axes, points: Points, color: str, label: str) -> None:
    """A line that breaks where steps are missing; points are marked while they are few."""
    if not points:
        return
    xs, ys = [points[0][0]], [points[0][1]]
    usual_gap = min((b[0] - a[0] for a, b in pairwise(points)), default=1)
    for (before, _), (x, y) in pairwise(points):
        if x - before > usual_gap:
            xs.append((before + x) / 2)
            ys.append(math.nan)
        xs.append(x)
        ys.append(y)
    marker = {"marker": "o", "markersize": 4} if len(points) <= 40 else {}
    axes.plot(xs, ys, color=color, linewidth=1.6, label=label, **marker)  # type: ignore[arg-type]


def _draw_evaluations(axes: Axes, points: Points) -> None:
    if not points:
        return
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, color=_EVAL, marker="D", markersize=5, linestyle=":", label="evaluation loss")
    _write_value(axes, points[-1], _EVAL)


def _write_value(axes: Axes, point: tuple[float, float], color: str) -> None:
    """The last value in figures, above its point."""
    where = {"xytext": (0, 9), "textcoords": "offset points", "ha": "right"}
    axes.annotate(f"{point[1]:.3f}", point, color=color, fontweight="bold", **where)  # type: ignore[arg-type]


def _draw_median(axes: Axes, points: Points) -> None:
    if len(points) < 3:
        return
    median = sorted(y for _, y in points)[len(points) // 2]
    axes.axhline(
        median, color=GREY, linewidth=1, linestyle="--", zorder=1, label=f"median {median:.3g}"
    )
    axes.legend(frameon=False, loc="lower right")


def dress(axes: Axes, label: str, *, empty: bool) -> None:
    """The looks that all plots share; ``empty``: say so."""
    axes.set_ylabel(label, fontsize=11)
    axes.grid(color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#b5bcc6")
    if empty:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=GREY)
