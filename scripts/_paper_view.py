"""How the tables of ``paper_tables.py`` look on a screen and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

COLOURS = ("#1f5fa8", "#d9541e", "#2a8a5c", "#8a4fa3", "#b58900", "#5b6470")


@dataclass(slots=True)
class Table:
    """``rows``: a label and a text for each column. ``figures``: the same as numbers, for JSON."""

    title: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    pictures: list[Path] = field(default_factory=list)


def show(table: Table, console: Console) -> None:
    grid = RichTable(title=table.title, title_style="bold", title_justify="left")
    for n, column in enumerate(table.columns):
        grid.add_column(column, justify="right" if n else "left", no_wrap=n == 0)
    for row in table.rows:
        if any(row):
            grid.add_row(*row)
        else:
            grid.add_section()
    console.print()
    console.print(grid)
    for note in table.notes:
        console.print(f"  {note}", style="dim", highlight=False)
    for picture in table.pictures:
        console.print(f"  picture: {picture}", highlight=False)


def percent(share: float) -> str:
    """Three figures: 99.2 %, 4.88 %."""
    points = 100 * share
    return f"{points:.2f} %" if points < 9.995 else f"{points:.1f} %"


def spread(values: Sequence[float], digits: int = 1, unit: str = "") -> str:
    """Mean and standard deviation of what some seeds gave."""
    if not values:
        return "-"
    around = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{around}{unit}"


Curve = tuple[Sequence[float], Sequence[float]]


def draw(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Curve]],
    *,
    x: str,
    y: str,
    top: float | None = None,
) -> None:
    """One panel beside the other, each with its named curves; PNG, 400 pixels a panel wide.

    A name that ends in an asterisk is drawn grey, dashed or dotted: something to compare with.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(max(8.0, 4 * len(panels)), 4.2), dpi=100, layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    for number, (name, curves) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), number + 1)
        axes.set_title(name, fontsize=11)
        dashes = iter(("--", ":") * 2)
        for (label, (xs, ys)), colour in zip(curves.items(), COLOURS * 4, strict=False):
            beside = label.endswith("*")
            axes.plot(
                xs,
                ys,
                color=COLOURS[-1] if beside else colour,
                linestyle=next(dashes) if beside else "-",
                marker="o" if len(xs) <= 12 and not beside else None,
                markersize=4,
                linewidth=1.5,
                label=label.rstrip("*"),
            )
        axes.set_xlabel(x)
        axes.set_ylim(0, top)
        axes.grid(color="#e3e6ea", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if number == 0:
            axes.set_ylabel(y)
        if number == len(panels) - 1:
            axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, format="png")
