"""The live view: everything that matters is on the screen, at any size, and nothing twice."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from peers.screen import MAX_EVENTS, clock_time, sparkline
from peers.view import REFRESH_S, LiveView, ReplicaView, RunView, StageView, render

READY = ReplicaView("12D3-aaaa", "ready", 41, 0.75, 0.041, 2, "", 0.4)
SILENT = ReplicaView(
    "12D3-bbbb", "silent", 40, 0.25, 1.5, 0, "no answer for 12 s; its work goes to others", 12.0
)
JOINING = ReplicaView("12D3-cccc", "joining", 0, 0.0, None, 0)
VIEW = RunView(
    name="tiny-gpt",
    run_id="3fa9c1d2e4aa77",
    step=50,
    steps=200,
    loss=3.25,
    losses=(5.5, 4.0, 3.25),
    samples_per_s=152.34,
    started_s_ago=100.0,
    phase="collecting: stage 1 has 9 of 16 microbatches",
    stages=(StageView(0, (READY, SILENT)), StageView(1, (JOINING,))),
    events=("a replica joined stage 1",),
    warnings=("stage 0 has one replica that answers; if it fails, the run waits for another",),
)


def shown(view: RunView, *, width: int = 100, height: int | None = None) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True, color_system=None)
    console.print(render(view, height=height))
    return console.export_text().rstrip("\n").split("\n")


def line_with(lines: list[str], word: str) -> str:
    found = [line for line in lines if word in line]
    assert len(found) == 1, f"{word!r} is in {len(found)} lines"
    return found[0]


@pytest.mark.parametrize("width", [80, 100, 132, 200])
def test_shows_all_that_matters_at_any_usual_width(width):
    lines = shown(VIEW, width=width)
    assert max(map(len, lines)) <= width
    assert "25%" in line_with(lines, "step 50 of 200")
    assert "ETA 05:00" in line_with(lines, "step 50 of 200")  # 50 steps took 100 s, 150 are left
    assert "tiny-gpt · 3fa9c1d2e4aa " in lines[0]
    assert "01:40" in lines[0]
    assert "152.3 samples/s" in line_with(lines, "loss 3.2500")
    assert "█" in line_with(lines, "loss 3.2500")
    assert line_with(lines, "12D3-aaaa").split()[-6:] == ["75%", "41", "ms", "2", "400", "ms"]
    assert line_with(lines, "12D3-bbbb").split()[-6:] == ["25%", "1.5", "s", "0", "12", "s"]
    assert line_with(lines, "12D3-cccc").split()[-3:] == ["-", "0", "-"]
    text = " ".join(" ".join(lines).split())
    for sentence in (SILENT.note, VIEW.phase, *VIEW.events, *VIEW.warnings):
        assert sentence in text


def test_replicas_are_grouped_by_stage():
    lines = shown(VIEW)
    assert line_with(lines, "12D3-aaaa").startswith(" 0 ")
    assert line_with(lines, "12D3-bbbb").startswith("     ")
    assert line_with(lines, "12D3-cccc").startswith(" 1 ")


def test_the_note_stands_below_its_replica():
    lines = shown(VIEW)
    assert lines.index(line_with(lines, SILENT.note)) == 1 + lines.index(
        line_with(lines, "12D3-bbbb")
    )


def test_a_stage_without_replicas_says_so():
    lines = shown(replace(VIEW, stages=(StageView(3, ()),)))
    assert line_with(lines, "nobody serves this stage").startswith(" 3 ")


def test_before_the_first_step_nothing_is_made_up():
    lines = shown(replace(VIEW, step=0, loss=None, losses=()))
    assert "ETA --:--" in line_with(lines, "step 0 of 200")
    assert "loss -" in line_with(lines, "samples/s")


def test_after_the_last_step_it_is_done():
    assert "100%   done" in line_with(shown(replace(VIEW, step=200)), "step 200 of 200")


def test_fits_the_height_and_keeps_the_newest_events():
    view = replace(VIEW, events=tuple(f"event {i}" for i in range(20)))
    assert [line for line in shown(view) if "event" in line] == [
        f" · event {i}" for i in range(20 - MAX_EVENTS, 20)
    ]
    for height in range(1, 30):
        assert len(shown(view, height=height)) <= height
    lines = shown(view, height=14)
    assert line_with(lines, "12D3-bbbb")
    assert lines[-1] == " · event 19"


def test_a_long_event_is_folded_and_not_cut():
    why = "stage 0 does 66.2 samples/s, stage 1 does 178 samples/s and could spare one of three"
    move = f"wbvFmx (stage 1) moves to stage 0 after this step: {why}"
    view = replace(VIEW, events=("before", move, "after"))
    lines = shown(view, width=80)
    at = lines.index(line_with(lines, "moves to stage 0"))
    assert " ".join(" ".join(lines[at : at + 2]).split()) == f"· {move}"
    assert lines[at + 2] == " · after"
    for height in range(8, 30):
        lines = shown(view, width=80, height=height)
        assert len(lines) <= height
        text = " ".join(" ".join(lines).split())
        assert ("moves to" in text) == (why in text), "an event is there whole or not at all"


def test_many_replicas_become_one_line_a_stage_with_those_in_trouble():
    crowd = tuple(replace(READY, name=f"12D3-{i:04}") for i in range(30))
    lines = shown(replace(VIEW, stages=(StageView(0, (*crowd, SILENT)),)), width=80, height=24)
    assert line_with(lines, "30 ready, 1 silent").startswith(" 0 ")
    assert SILENT.note in line_with(lines, "12D3-bbbb")
    assert not any("12D3-0007" in line for line in lines)
    assert any(VIEW.events[0] in line for line in lines)


def test_what_does_not_fit_is_counted():
    stages = tuple(StageView(i, (READY,)) for i in range(40))
    lines = shown(replace(VIEW, stages=stages), height=24)
    shown_stages = sum("1 ready" in line for line in lines)
    assert line_with(lines, f"{40 - shown_stages} more lines")


def test_many_warnings_are_counted():
    lines = shown(replace(VIEW, warnings=tuple(f"trouble {i}" for i in range(9))))
    assert [line for line in lines if "trouble" in line] == [f" ! trouble {i}" for i in range(5, 9)]
    assert line_with(lines, "and 5 more warnings")


def test_text_from_the_network_neither_steers_the_terminal_nor_counts_as_markup():
    evil = "[red]x[/red] \x1b[2J\x07\u202e\nend"
    view = replace(
        VIEW,
        name=evil,
        phase=evil,
        events=(evil,),
        warnings=(evil, ""),
        stages=(StageView(0, (replace(READY, name=evil, state="\x1b[2J", note=evil),)),),
    )
    for height in (None, 12):
        text = "\n".join(shown(view, height=height))
        assert not set(text) & set("\x1b\x07\u202e")
        assert "[red]x[/red]" in text


def test_sparkline():
    assert sparkline([1.0, 2.0, 8.0], 10) == "▁▂█"
    assert sparkline([3.0, 3.0], 10) == "▁▁"
    assert sparkline([1.0, math.nan, 2.0, math.inf], 10) == "▁ █ "
    assert sparkline([math.nan] * 3, 2) == "  "
    assert sparkline([], 10) == ""
    assert sparkline([0.0] * 50 + [1.0] * 50, 10) == "▁▁▁▁▁█████"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "00:00"), (59.9, "00:59"), (61, "01:01"), (3600 * 12, "12:00:00")]
)
def test_clock_time(seconds, text):
    assert clock_time(seconds) == text


def piped(*views: RunView, file: io.StringIO | None = None) -> list[str]:
    file = file or io.StringIO()
    with LiveView(Console(file=file, width=80)) as live:
        for view in views:
            live.update(view)
    return file.getvalue().splitlines()


def test_a_pipe_gets_one_line_a_step_and_everything_else_once():
    first = replace(VIEW, step=0, loss=None, events=("a joined", "b joined"))
    after = replace(VIEW, step=1, loss=5.25, events=("b joined", "c joined"), started_s_ago=7.0)
    warning = f"warning: {VIEW.warnings[0]}"
    assert piped(first, first, after, after) == [
        "a joined",
        "b joined",
        warning,
        VIEW.phase,
        "c joined",
        "step 1/200  loss 5.2500  152.3 samples/s  00:07",
    ]


def test_a_pipe_repeats_no_phase_for_its_figures_alone():
    waiting = replace(VIEW, step=0, events=(), warnings=(), phase="stage 1 has 0 of 2")
    assert piped(waiting, replace(waiting, phase="stage 1 has 1 of 2")) == ["stage 1 has 0 of 2"]


def test_a_pipe_hears_of_a_warning_when_it_appears_but_not_as_it_ages():
    calm = replace(VIEW, events=(), warnings=(), phase="")
    silent = [replace(calm, warnings=(f"b is silent for {s} s",)) for s in (3, 4)]
    other = replace(calm, warnings=("stage 2 is empty",))
    lines = [x for x in piped(calm, *silent, calm, silent[0], other) if "warning" in x]
    assert lines == [
        "warning: b is silent for 3 s",
        "warning: b is silent for 3 s",
        "warning: stage 2 is empty",
    ]


def test_a_pipe_gets_long_lines_whole_and_control_characters_not_at_all():
    event = "x" * 300 + " [bold]"
    view = replace(VIEW, events=(event, "\x1b[2J"), warnings=(), phase="", step=0)
    assert piped(view) == [event, "?[2J"]


def test_a_pipe_that_cannot_encode_gets_question_marks():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    with LiveView(Console(file=file, width=80)) as live:
        live.update(replace(VIEW, events=("12D3…ab",), warnings=(), phase="", step=0))
    file.flush()
    assert raw.getvalue() == b"12D3?ab\n"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_redrawn_at_most_at_the_refresh_rate_and_keeps_the_last_view():
    now = [0.0]
    file = Terminal()
    console = Console(
        file=file, width=80, height=24, force_terminal=True, _environ={"TERM": "xterm"}
    )
    with LiveView(console, clock=lambda: now[0]) as live:
        live.update(replace(VIEW, step=1))
        live.update(replace(VIEW, step=2))
        assert "of 200" in file.getvalue()
        assert "2 of 200" not in plain(file)
        now[0] += REFRESH_S
        live.update(replace(VIEW, step=3))
        assert "3 of 200" in plain(file)
        live.update(replace(VIEW, step=4))
        assert "4 of 200" not in plain(file)
    assert "4 of 200" in plain(file)


def plain(file: io.StringIO) -> str:
    """Without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def test_a_view_that_was_never_updated_can_be_left():
    file = Terminal()
    with LiveView(Console(file=file, force_terminal=True, _environ={"TERM": "xterm"})):
        pass
    assert "of" not in plain(file)


@pytest.mark.parametrize("height", [None, 16])
def test_those_that_are_lost_take_one_line_a_stage(height):
    many = tuple(f"lost{i:02}" for i in range(40))
    stages = (StageView(0, (READY,), ("aaaaaa", "bbbbbb")), StageView(1, (), many))
    lines = shown(replace(VIEW, stages=stages, events=(), warnings=()), width=80, height=height)
    assert "2 lost: aaaaaa, bbbbbb" in line_with(lines, "2 lost")
    assert "40 lost: lost00, lost01" in line_with(lines, "40 lost")
    assert line_with(lines, "40 lost").endswith("…")
    assert "nobody serves this stage" in line_with(lines, "nobody")
    assert max(map(len, lines)) <= 80


def test_a_note_that_is_folded_names_its_replica_once():
    trouble = replace(SILENT, note="word " * 40)
    stages = (StageView(0, (READY,) * 12 + (trouble,)),)
    lines = shown(replace(VIEW, stages=stages, events=(), warnings=()), width=60, height=20)
    assert sum("12D3-bbbb" in line for line in lines) == 1
    assert sum("word" in line for line in lines) > 2
