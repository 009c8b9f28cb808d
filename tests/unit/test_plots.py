"""The plot of a run: the right points, and a picture whatever is missing."""

from __future__ import annotations

import math

import pytest
from PIL import Image

from peers.plots import plot_run, series, throughput


def line(step: int, **changes: object) -> dict[str, object]:
    return {"step": step, "loss": 5.0 - step / 10, "samples": 128, "seconds": 0.5} | changes


def test_series_leaves_out_what_is_no_finite_number():
    metrics = [
        line(0),
        line(1, loss=None),
        line(2, loss=math.nan),
        line(3, loss="5"),
        line(4, eval_loss=4.5),
        {"loss": 1.0},
    ]
    assert series(metrics, "loss") == [(0, 5.0), (4, 4.6)]
    assert series(metrics, "eval_loss") == [(4, 4.5)]


def test_throughput_is_samples_by_seconds_of_each_step():
    metrics = [line(0), line(1, seconds=0.25), line(2, seconds=0.0), line(3, samples=None), {}]
    assert throughput(metrics) == [(0, 256.0), (1, 512.0)]


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [line(0)],
        [line(0), line(1)],
        [line(0), line(1, loss=None), line(5, loss=math.inf, eval_loss=3.0), line(6, seconds=0)],
        [line(0, loss=None)],
        [{}],
        [line(i, **({"eval_loss": 3.0} if i % 9 == 0 else {})) for i in range(100)],
    ],
)
def test_draws_a_picture_of_the_promised_size(metrics, tmp_path):
    path = tmp_path / "plot.png"
    plot_run(metrics, path, "a run")
    with Image.open(path) as image:
        assert (image.format, image.size) == ("PNG", (1000, 700))
        colours = image.convert("RGB").getcolors(1 << 20)
    assert len(colours) > 10


def test_what_is_drawn_depends_on_the_metrics(tmp_path):
    few, more = tmp_path / "few.png", tmp_path / "more.png"
    plot_run([line(0), line(1)], few, "a run")
    plot_run([line(0), line(1), line(2, eval_loss=4.0)], more, "a run")
    assert few.read_bytes() != more.read_bytes()
