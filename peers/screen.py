"""The layout of the live view: one ``RunView`` as lines for a terminal.

Texts may come from the network: they are never read as markup, and characters that could steer
the terminal are replaced.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from peers.runview import ReplicaView, RunView, StageView

MAX_WIDTH = 132
MAX_WARNINGS = 4
MAX_EVENTS = 6
_BLOCKS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {
    "ready": "green",
    "announced": "cyan",
    "applying": "cyan",
    "joining": "cyan",
    "draining": "yellow",
}
_BAD_STATE_STYLE = "bold red"


def render(view: RunView, *, height: int | None = None) -> RenderableType:
    """The whole view, as wide as the console and at most ``height`` lines high.

    Where the replicas do not fit, each stage becomes one line, followed by the replicas that
    have a note.
    """
    return _Screen(view, height)


@dataclass(frozen=True, slots=True)
class _Screen:
    view: RunView
    height: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MAX_WIDTH)
        yield from _layout(self.view, console, width, self.height or 10**6)


def _layout(view: RunView, console: Console, width: int, height: int) -> list[Text]:
    warnings = _warning_lines(view.warnings, console, width)
    top = _header(view, width)
    room = height - len(top) - len(warnings) - 1
    rows = _replica_rows(view.stages, width)
    wanted_by_events = min(len(view.events), 2) + 1
    if len(rows) > room - wanted_by_events:
        rows = _stage_rows(view.stages, width)
    if len(rows) > room:
        hidden = len(rows) - max(room - 1, 0)
        rows = [*rows[: len(rows) - hidden], Text(f"  … {hidden} more lines", "dim")]
    blocks = [top, [_column_heads(width), *rows], warnings]
    events = _event_lines(view.events, width, room - len(rows))
    spare = room - len(rows) - len(events) - len(blocks)
    gap = [Text()] if spare >= 0 else []
    lines = [line for block in blocks if block for line in (*block, *gap)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return [*lines, *_event_lines(view.events, width, height - len(lines))][:height]


def _header(view: RunView, width: int) -> list[Text]:
    inner = width - 4
    title = f" swarm · {clean(view.name)} · {clean(view.run_id)[:12]} "
    elapsed = f" {clock_time(view.started_s_ago)} "
    rule = "─" * max(width - 4 - len(title) - len(elapsed), 1)
    top = Text.assemble(
        ("╭─", "cyan"), (title, "bold"), (rule, "cyan"), (elapsed, ""), ("─╮", "cyan")
    )
    lines = [_progress(view, inner), _loss(view, inner)]
    if view.phase:
        lines.append(Text(clean(view.phase), "italic"))
    boxed = []
    for line in lines:
        line.truncate(inner, overflow="ellipsis", pad=True)
        boxed.append(Text.assemble(("│ ", "cyan"), line, (" │", "cyan")))
    return [top, *boxed, Text("╰" + "─" * (width - 2) + "╯", "cyan")]


def _progress(view: RunView, width: int) -> Text:
    done = min(max(view.step / view.steps, 0.0), 1.0) if view.steps else 0.0
    left = Text.assemble("step ", (f"{view.step}", "bold"), f" of {view.steps}  ")
    right = Text(f"  {done:4.0%}   {_remaining(view)}")
    room = max(width - len(left) - len(right), 4)
    full = round(done * room)
    return Text.assemble(left, ("━" * full, "green"), ("─" * (room - full), "dim"), right)


def _remaining(view: RunView) -> str:
    if view.step >= view.steps:
        return "done"
    if view.step < 1:
        return "ETA --:--"
    return f"ETA {clock_time(view.started_s_ago / view.step * (view.steps - view.step))}"


def _loss(view: RunView, width: int) -> Text:
    value = "-" if view.loss is None else f"{view.loss:.4f}"
    left = Text.assemble("loss ", (value, "bold"), "  ")
    right = Text.assemble("  ", (f"{view.samples_per_s:.1f}", "bold"), " samples/s")
    room = max(width - len(left) - len(right), 1)
    return Text.assemble(left, (sparkline(view.losses, room).ljust(room), "magenta"), right)


def sparkline(values: Sequence[float], width: int) -> str:
    """At most ``width`` blocks, the highest value a full one; what is not finite is a blank."""
    values = list(values)
    if len(values) > width:
        size = len(values) / width
        chunks = (values[int(i * size) : int((i + 1) * size)] for i in range(width))
        values = [_mean_of_finite(chunk) for chunk in chunks]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, span = min(finite), max(finite) - min(finite)
    top = len(_BLOCKS) - 1
    levels = (round((v - low) / span * top) if span else 0 for v in finite)
    return "".join(_BLOCKS[next(levels)] if math.isfinite(v) else " " for v in values)


def _mean_of_finite(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _bar_width(width: int) -> int:
    return min(max(width - 70, 4), 30)


def _column_heads(width: int) -> Text:
    share = f"{'share':<{_bar_width(width) + 5}}"
    return Text(
        f" {'stage':<6}{'replica':<12}{'state':<10}{'step':>6}  {share}"
        f"{'per mb':>9}{'queue':>7}{'last work':>11}",
        "dim",
    )


def _replica_rows(stages: Sequence[StageView], width: int) -> list[Text]:
    rows = []
    for stage in stages:
        if not stage.replicas:
            rows.append(_stage_cell(stage.stage).append("nobody serves this stage", "bold red"))
        for i, replica in enumerate(stage.replicas):
            rows += _replica_row(replica, _stage_cell(stage.stage if i == 0 else None), width)
        rows += _lost_rows(stage, width)
    return rows


def _lost_rows(stage: StageView, width: int) -> list[Text]:
    """One line, with as many names as fit: a swarm that lives long loses many."""
    if not stage.lost:
        return []
    names = ", ".join(map(clean, stage.lost))
    row = Text(f"       {len(stage.lost)} lost: {names}", "dim")
    row.truncate(width, overflow="ellipsis")
    return [row]


def _stage_cell(stage: int | None) -> Text:
    return Text(f" {'' if stage is None else stage:<6}", "bold")


def _state_style(state: str) -> str:
    return _STATE_STYLES.get(state.lower(), _BAD_STATE_STYLE)


def _replica_row(replica: ReplicaView, stage_cell: Text, width: int) -> list[Text]:
    bar_width = _bar_width(width)
    full = round(min(max(replica.share, 0.0), 1.0) * bar_width)
    row = stage_cell.append(f"{clean(replica.name)[:11]:<12}", "default not bold")
    row.append(f"{clean(replica.state)[:9]:<10}", _state_style(replica.state))
    row.append(f"{replica.mark_step:>6}  ", "not bold")
    row.append("█" * full, "blue").append("░" * (bar_width - full), "dim")
    row.append(f"{replica.share:5.0%}", "not bold")
    row.append(f"{_duration(replica.mean_time_s):>9}", "not bold")
    row.append(f"{replica.queue:>7}", "not bold")
    row.append(f"{_duration(replica.last_work_s_ago):>11}", "not bold")
    return [row, *_note_rows(replica, width)]


def _note_rows(replica: ReplicaView, width: int, name: str = "") -> list[Text]:
    if not replica.note:
        return []
    prefix = f"       └ {name}"
    style = "yellow" if replica.state.lower() in _STATE_STYLES else "red"
    first, *rest = _fold(clean(replica.note), width - len(prefix))
    return [Text(prefix + first, style), *(Text(" " * len(prefix) + r, style) for r in rest)]


def _stage_rows(stages: Sequence[StageView], width: int) -> list[Text]:
    """One line a stage, and the replicas in trouble."""
    rows = []
    for stage in stages:
        if not stage.replicas:
            rows += _replica_rows([stage], width)
            continue
        states = Counter(clean(replica.state.lower()) for replica in stage.replicas)
        times = [r.mean_time_s for r in stage.replicas if r.mean_time_s is not None]
        mean = f", {_duration(sum(times) / len(times))} per microbatch" if times else ""
        words = ", ".join(f"{count} {state}" for state, count in states.most_common())
        words += f", {len(stage.lost)} lost" if stage.lost else ""
        style = "default" if set(states) <= set(_STATE_STYLES) else "yellow"
        rows.append(_stage_cell(stage.stage).append(f"{words}{mean}", style))
        for replica in stage.replicas:
            rows += _note_rows(replica, width, f"{clean(replica.name)[:11]}: ")
    return rows


def _warning_lines(warnings: Sequence[str], console: Console, width: int) -> list[Text]:
    lines = []
    for warning in list(warnings)[-MAX_WARNINGS:]:
        first, *rest = _fold(clean(warning), width - 3)
        lines += [Text(f" ! {first}", "bold yellow"), *(Text(f"   {r}", "yellow") for r in rest)]
    if len(warnings) > MAX_WARNINGS:
        lines.append(Text(f"   and {len(warnings) - MAX_WARNINGS} more warnings", "yellow"))
    return lines


def _event_lines(events: Sequence[str], width: int, room: int) -> list[Text]:
    """The newest, as many as fit whole; the very last one at least in part."""
    lines: list[Text] = []
    for event in reversed(list(events)[-MAX_EVENTS:]):
        first, *rest = _fold(clean(event), width - 3)
        folded = [Text(f" · {first}", "dim"), *(Text(f"   {r}", "dim") for r in rest)]
        if lines and len(lines) + len(folded) > room:
            break
        lines = [*folded[: max(room, 0)], *lines]
    return lines


def _fold(text: str, width: int) -> list[str]:
    """Break at spaces into lines of at most ``width``, and inside words that are longer."""
    return textwrap.wrap(text, max(width, 1)) or [""]


def clean(text: str) -> str:
    """Make text from anywhere safe for a terminal: no control or steering characters."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def clock_time(seconds: float) -> str:
    """``mm:ss``, with hours when there are any."""
    minutes, rest = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
