"""The report for people: it fits 80 columns, says all that matters, and obeys nobody's markup."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from peers.report import GONE, ReplicaReport, Report, StageReport, TrainerReport
from peers.report_view import MAX_GONE, duration, render, short
from swarm.types import Mark, Term

MARK = Mark(Term(2, "ab" * 8), 123_456)
LONG = "12D3KooW" + "x" * 38
READY = ReplicaReport(
    *(LONG + "aaaaaa", "aa", "ready", MARK, 0.75, 12_345_678, 0.4),
    **{"queued": 3, "quiet_s": 0.2, "samples_per_s": 12_345.6},
)
SILENT = ReplicaReport(LONG + "bbbbbb", "bb", "silent", why="does not answer: dial failed")
JOINING = ReplicaReport(
    LONG + "cccccc", "cc", "joining", why="downloading the state of stage 1: 40%", queued=0
)


def gone(n: int) -> ReplicaReport:
    return ReplicaReport(f"{LONG}gone{n:02}", "", GONE, samples=10 * n)


REPORT = Report(
    run_id="f732db9a7dad4ac32c7b7b437ed85bd4",
    name="local",
    steps=1_000_000,
    batch=64,
    state="training",
    mark=MARK,
    note="stage 1 is at step 123457, the others at step 123456: applying a decision",
    loss=2.34567,
    leader=LONG + "leader",
    term=2,
    quiet_s=0.3,
    trainers=(
        TrainerReport(LONG + "leader", "training", 2, 123_456, True),
        TrainerReport(LONG + "second", "standby", 0, 0, False),
    ),
    stages=(
        StageReport(0, MARK, 640, (READY, SILENT, *map(gone, range(1, MAX_GONE + 3)))),
        StageReport(1, MARK, 640, (JOINING,)),
        StageReport(2, None, 640, ()),
    ),
    warnings=("stage 2 has no replica [red]at all[/red]\x1b[31m",),
)


def shown(report: Report, *, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True, color_system=None)
    console.print(render(report))
    return console.export_text()


def test_it_fits_80_columns_and_cuts_no_figure() -> None:
    text = shown(REPORT)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for part in ("step 123456 of 1000000", "loss 2.3457", "trainer leader (term 2)", "0.3 s ago"):
        assert part in text
    row = next(line for line in text.splitlines() if "aaaaaa" in line)
    assert row.split() == [
        "0",
        "aaaaaa",
        "ready",
        "123456",
        "75%",
        "12,345,678",
        *["0.4", "s", "ago", "3", "12,346/s"],
    ]


def test_standbys_differences_reasons_and_totals_are_said() -> None:
    text = " ".join(shown(REPORT).split())
    assert "second: standby" in text
    assert REPORT.note in text
    assert "stage 1, cccccc: downloading the state of stage 1: 40%" in text
    assert "every stage has counted 640 samples in all" in text
    assert "2 - nobody" in text


def test_of_many_who_left_those_with_most_are_named() -> None:
    text = shown(REPORT)
    assert "gone05" in text
    assert "gone03" in text
    assert "gone02" not in text
    row = next(line for line in text.splitlines() if "2 more" in line)
    assert row.split() == ["2", "more", "gone", "30"]


def test_a_warning_is_text_and_nothing_else() -> None:
    text = shown(REPORT)
    assert "! stage 2 has no replica [red]at all[/red]?[31m" in text


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("waiting", "waiting for replicas"),
        ("leaderless", "nobody leads it"),
        ("done", "complete"),
    ],
)
def test_the_state_is_in_the_first_line_unless_all_is_well(state: str, words: str) -> None:
    def first(state: str) -> str:
        found = Report(REPORT.run_id, "x", 5, 1, state, None, "", None, "", 0, None, (), ())
        return shown(found).splitlines()[0]

    assert words in first(state)
    assert words not in first("training")
    assert "not begun" in first(state)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (200_000, "2 d"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_peer_ids_are_as_short_as_in_the_table() -> None:
    assert short(f"no stream to {LONG}aaaaaa: time is up") == "no stream to aaaaaa: time is up"
    assert short("12D3KooWshort") == "12D3KooWshort"
