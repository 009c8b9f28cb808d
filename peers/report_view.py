"""A ``Report`` for people: a table that fits 80 columns, and a line for each warning.

Texts come from the network: they are never read as markup, and characters that could steer the
terminal are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peers.report import GONE, SILENT, ReplicaReport, Report, StageReport
from peers.screen import clean

MAX_GONE = 3
"""So many peers that have left are shown of each stage, and the rest as one."""

_STATE_STYLES = {
    "ready": "green",
    "waiting": "cyan",
    "joining": "cyan",
    "draining": "yellow",
    GONE: "dim",
}
_HEADLINES = {
    "waiting": "waiting for replicas",
    "leaderless": "nobody leads it",
    "done": "complete",
}
_PEER_ID = re.compile(r"\b12D3KooW\w{38}(\w{6})\b")
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))


def render(report: Report) -> RenderableType:
    """Lines and a table, for ``Console.print``."""
    return Group(*_head(report), Text(), _table(report), *_foot(report))


def _head(report: Report) -> Iterator[RenderableType]:
    parts = [f"run {report.name} ({report.run_id[:12]})", _step(report)]
    if report.loss is not None:
        parts.append(f"loss {report.loss:.4f}")
    if report.state in _HEADLINES:
        parts.append(_HEADLINES[report.state])
    yield Text(clean(" · ".join(parts)), "bold")
    yield Text(clean(_trainers(report)))
    if report.note:
        yield Text(clean(report.note))


def _step(report: Report) -> str:
    if report.mark is not None:
        return f"step {report.mark.t} of {report.steps}"
    what = "a stage is missing" if report.begun else "not begun"
    return f"{what}, {report.steps} steps"


def _trainers(report: Report) -> str:
    heard = "never heard" if report.quiet_s is None else f"heard {duration(report.quiet_s)} ago"
    named = f"trainer {report.leader[-6:]} (term {report.term})" if report.leader else "no trainer"
    parts = [f"{named}, {heard}"]
    others = [trainer for trainer in report.trainers if trainer.peer != report.leader]
    parts += [f"{trainer.name}: {trainer.state}" for trainer in others]
    return " · ".join(parts)


def _table(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("stage")
    table.add_column("replica", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("step", "share", "samples", "last work", "queue", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in report.stages:
        _add_stage(table, stage)
    return table


def _add_stage(table: Table, stage: StageReport) -> None:
    gone = sorted(stage.of_state(GONE), key=lambda replica: -replica.samples)
    rows = [_cells(replica) for replica in stage.replicas if replica.state != GONE]
    if not rows:
        rows.append([Text("-"), Text("nobody", "bold red")])
    rows += [_cells(replica) for replica in gone[:MAX_GONE]]
    if rest := gone[MAX_GONE:]:
        samples = f"{sum(replica.samples for replica in rest):,}"
        more = (f"{len(rest)} more", GONE, "", "", samples, "", "", "")
        rows.append([Text(cell, "dim") for cell in more])
    for i, row in enumerate(rows):
        table.add_row(Text("" if i else str(stage.stage), "bold"), *row)


def _cells(replica: ReplicaReport) -> list[Text]:
    gone = replica.state == GONE
    last_work = "-" if replica.last_work_s is None else f"{duration(replica.last_work_s)} ago"
    cells = [
        "-" if replica.mark is None else str(replica.mark.t),
        "-" if replica.share is None else f"{replica.share:.0%}",
        f"{replica.samples:,}",
        last_work,
        "-" if replica.queued is None else str(replica.queued),
        _speed(replica.samples_per_s),
    ]
    if gone:
        cells = ["" if cell == "-" else cell for cell in cells]
    return [
        Text(clean(replica.name), "dim" if gone else ""),
        Text(clean(replica.state), _STATE_STYLES.get(replica.state, "bold red")),
        *(Text(cell, "dim" if gone else "") for cell in cells),
    ]


def _speed(samples_per_s: float | None) -> str:
    if samples_per_s is None:
        return "-"
    return f"{samples_per_s:,.0f}/s" if samples_per_s >= 99.95 else f"{samples_per_s:.1f}/s"


def _foot(report: Report) -> Iterator[RenderableType]:
    notes = [
        f"stage {stage.stage}, {replica.name}: {short(replica.why)}"
        for stage in report.stages
        for replica in stage.replicas
        if replica.why and replica.state != SILENT  # a warning says it already
    ]
    counted = {stage.samples for stage in report.stages}
    if len(counted) == 1 and counted != {0}:
        notes.append(f"every stage has counted {counted.pop():,} samples in all")
    if notes:
        yield Text()
    for note in notes:
        yield Text(clean(note))
    if report.warnings:
        yield Text()
    lines = Table.grid(padding=(0, 1, 0, 0))
    for warning in report.warnings:
        lines.add_row(Text("!", "bold yellow"), Text(clean(short(warning)), "yellow"))
    yield lines


def short(text: str) -> str:
    """``text`` with peer ids as short as in the table."""
    return _PEER_ID.sub(r"\1", text)


def duration(seconds: float) -> str:
    """In the largest unit that leaves a whole number, below ten seconds with one decimal."""
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
