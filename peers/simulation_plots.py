"""The pictures of a simulation: throughput, replicas and moves, what was sent again, bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.plots import GREY, SPEED, dress
from swarm.sim.report import HOUR_S, points, share_of_optimum
from swarm.sim.world import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AGAIN, _SENT, _RECEIVED = "#d9541e", "#1f5fa8", "#8a5cb0"
GIGABYTE = 1e9
NAMED_STAGES = 10
"""Of more stages than this the legend would hide the lines."""

MARKED_MOVES = 80
"""So many moves are marked where they went; more are too many to tell apart, and are lines."""


def plot_simulation(outcome: Outcome, directory: Path) -> list[Path]:
    """Draw PNGs into ``directory``, which exists: ``throughput.png`` over time with replicas and
    moves below (1000 x 900 pixels), and ``bytes.png`` by peer (1000 x 450). Returns their paths.
    """
    over_time, by_peer = directory / "throughput.png", directory / "bytes.png"
    figure = _figure(9, f"{outcome.world.name}: {_headline(outcome)}")
    speed, replicas, again = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.6))
    _draw_throughput(speed, outcome)
    _draw_replicas(replicas, outcome)
    _draw_again(again, outcome)
    hours = outcome.world.duration_s / HOUR_S
    again.set_xlim(0, hours)
    again.set_xlabel("hours of virtual time")
    figure.align_ylabels()
    figure.savefig(over_time, format="png")

    figure = _figure(4.5, f"{outcome.world.name}: bytes per peer")
    _draw_bytes(figure.subplots(), outcome)
    figure.savefig(by_peer, format="png")
    return [over_time, by_peer]


def _figure(height: float, title: str) -> Figure:
    # Imported here: it costs half a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=15, fontweight="bold")
    return figure


def _headline(outcome: Outcome) -> str:
    share = share_of_optimum(outcome.samples)
    return "nothing to compare" if share is None else f"{share:.1%} of the optimum"


def _draw_throughput(axes: Axes, outcome: Outcome) -> None:
    hours, done, best = points(outcome.samples)
    if hours:
        axes.fill_between(hours, best, color="#e8ebef", step=None, linewidth=0)
        axes.plot(hours, best, color=GREY, linewidth=1, label="best assignment")
        axes.plot(hours, done, color=SPEED, linewidth=1.6, label="done")
        axes.legend(frameon=False, loc="lower right", ncols=2)
    dress(axes, "samples per second", empty=not hours)
    axes.set_ylim(bottom=0, top=max([*best, *done], default=0) * 1.08 or None)


def _draw_replicas(axes: Axes, outcome: Outcome) -> None:
    from matplotlib import colormaps

    hours, _, _ = points(outcome.samples)
    stages = len(outcome.world.stages)
    colors = [colormaps["viridis"](0.9 * s / max(1, stages - 1)) for s in range(stages)]
    for stage, color in enumerate(colors):
        counts = [sample.peers[stage] for sample in outcome.samples]
        axes.step(hours, counts, where="post", color=color, linewidth=1.3, label=f"stage {stage}")
    _mark_moves(axes, outcome, colors)
    dress(axes, "replicas", empty=not hours)
    most = max((max(sample.peers) for sample in outcome.samples), default=0)
    axes.set_ylim(bottom=0, top=1.25 * most or None)  # with room for the legend
    if hours and stages <= NAMED_STAGES:
        axes.legend(frameon=False, loc="upper right", ncols=min(5, stages + 1))


def _mark_moves(axes: Axes, outcome: Outcome, colors: list[Any]) -> None:
    """Each move in the colour of where it went, on the lower edge."""
    moves = outcome.moves
    if not moves:
        return
    hours = [move.at_s / HOUR_S for move in moves]
    where = [colors[move.target] for move in moves]
    few = len(moves) <= MARKED_MOVES
    axes.scatter(
        hours,
        [0.03] * len(moves),
        c=where,
        marker="^" if few else "|",
        s=46 if few else 30,
        linewidths=0.5 if few else 0.8,
        edgecolors="white" if few else None,
        transform=axes.get_xaxis_transform(),
        zorder=3,
        label=f"{len(moves)} moves, in the colour of the new stage",
    )


def _draw_again(axes: Axes, outcome: Outcome) -> None:
    hours, _, _ = points(outcome.samples)
    total, sums = 0, []
    for sample in outcome.samples:
        total += sample.resent
        sums.append(total)
    if hours:
        axes.fill_between(hours, sums, color=_AGAIN, alpha=0.25, linewidth=0, step="post")
        axes.step(hours, sums, where="post", color=_AGAIN, linewidth=1.4)
    dress(axes, "sent again", empty=not hours)
    axes.set_ylim(bottom=0, top=max(sums, default=0) * 1.15 or 1)


def _draw_bytes(axes: Axes, outcome: Outcome) -> None:
    """Peers in the order of what they sent and received: how much, and how unequal."""
    for label, color, values in (
        ("received", _RECEIVED, outcome.received_bytes),
        ("sent", _SENT, outcome.sent_bytes),
    ):
        falling = sorted((value / GIGABYTE for value in values.values()), reverse=True)
        if not falling:
            continue
        ranks = [rank + 0.5 for rank in range(len(falling))]
        marker: dict[str, Any] = {"marker": "o", "markersize": 4} if len(falling) <= 40 else {}
        axes.plot(ranks, falling, color=color, linewidth=1.6, label=label, **marker)
        axes.fill_between(ranks, falling, color=color, alpha=0.08, linewidth=0)
        axes.set_xlim(0, len(falling))
    dress(axes, "GB", empty=not outcome.sent_bytes)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("peers, those with most first")
    if outcome.sent_bytes:
        axes.legend(frameon=False, loc="upper right")
