"""Traces of machines alive: both formats, units, scaling, and what is not a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.errors import DataError
from swarm.sim.traces import Trace, Unit, read_trace

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_of_several_counts_at_one_time_the_last_holds(tmp_path):
    trace = read_trace(write(tmp_path, "0,4\n10,4\n10,1\n10,2\n30,2\n30,3\n40,3\n"))
    assert trace.times_s == (0, 10, 30)
    assert trace.alive == (4, 2, 3)
    assert trace.end_s == 40
    assert [trace.at(t) for t in (-1, 0, 9, 10, 29, 30, 100)] == [4, 4, 4, 2, 2, 3, 3]


def test_the_time_before_anybody_is_alive_is_left_out(tmp_path):
    trace = read_trace(write(tmp_path, "0,0\n100,0\n100,4\n150,0\n160,2\n200,2\n"))
    assert trace.times_s == (0, 50, 60)
    assert trace.alive == (4, 0, 2)
    assert trace.end_s == 100


def test_times_with_fractions_are_hours_unless_the_caller_knows_better(tmp_path):
    path = write(tmp_path, "0.000,1\n0.500,1\n0.500,2\n1.000,2\n")
    assert read_trace(path).end_s == 3600
    assert read_trace(path, unit=Unit.SECONDS).end_s == 1
    whole = write(tmp_path, "0,1\n5,2\n10,2\n")
    assert read_trace(whole).end_s == 10
    assert read_trace(whole, unit=Unit.HOURS).end_s == 36000
    long = write(tmp_path, "0.5,1\n5000.5,2\n9000.0,2\n")
    assert read_trace(long).end_s == 8999.5, "a year in hours is not plausible"


def test_a_head_line_with_names_of_columns_is_no_row(tmp_path):
    assert read_trace(write(tmp_path, "time,alive\n0,1\n\n10,2\n20,2\n")).alive == (1, 2)


def test_json_gives_a_count_for_each_tick(tmp_path):
    tree = {"metadata": {"gap_seconds": 300}, "data": [0, 0, 3, 3, 5, 1]}
    trace = read_trace(write(tmp_path, json.dumps(tree), "trace.json"))
    assert trace.times_s == (0, 600, 900)
    assert trace.alive == (3, 5, 1)
    assert trace.end_s == 1200, "the last tick lasts as long as the others"


def test_a_trace_scales_to_any_number_of_peers():
    trace = Trace("t", (0, 10, 20, 30), (4, 2, 1, 3), 40)
    assert trace.scaled(400).alive == (400, 200, 100, 300)
    assert trace.scaled(1).alive == (1, 0, 1)
    assert trace.scaled(1).times_s == (0, 10, 30), "counts that do not change are no changes"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "nobody is ever alive"),
        ("0,0\n10,0\n", "nobody is ever alive"),
        ("0,0\n10,3\n", "ends when the first machine comes"),
        ("0,1\n5\n", "line 2"),
        ("0,1\nx,2\n", "line 2"),
        ("0,1\n5,-2\n", "line 2"),
        ("0,1\nnan,2\n", "line 2"),
        ("0,1\n5,999999999999\n", "line 2"),
        ("0,1\n5,2\n4,3\n", "earlier"),
        ("{}", "gap_seconds"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": 5}, "data": [1, -1]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": 5}, "data": [1, true]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": 5}, "data": []}', "nobody is ever alive"),
        ('{"metadata": {"gap_seconds": 5}, "data"', "gap_seconds"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_the_file(text, named, tmp_path):
    with pytest.raises(DataError) as caught:
        read_trace(write(tmp_path, text))
    assert named in str(caught.value)
    assert "trace.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.skipif(not REAL.is_dir(), reason="the measured traces are not here")
@pytest.mark.parametrize(
    ("start", "peak", "hours"),
    [
        ("aws-g4dn-xlarge", 12, 18.5),
        ("aws-p2-xlarge", 16, 88.7),
        ("aws-v100-us-west-2b", 1, 177.4),
        ("aws-v100x16-us-east-2b", 16, 270.3),
        ("aws-v100x16-us-west-2a", 16, 394.1),
        ("aws-v100x4", 4, 427.6),
    ],
)
def test_measured_traces_are_read(start, peak, hours):
    [path] = [path for path in REAL.iterdir() if path.name.startswith(start)]
    trace = read_trace(path)
    assert trace.peak == peak
    assert trace.end_s / 3600 == pytest.approx(hours, abs=0.1)
    assert trace.alive[0] > 0
