"""Log lines as JSON: one object each, strict, with the fields of what happened."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from peers.logs import FORMAT_VARIABLE, JsonFormatter, LogFormat, log_format, tell
from peers.view import LiveView
from tests.unit.test_view import VIEW


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict]]:
    """What the logger "swarm" writes as JSON, parsed."""
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    found: list[dict] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(  # type: ignore[method-assign]
        json.loads(JsonFormatter().format(record))
    )
    logger = logging.getLogger("swarm")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("text", "found"), [("json", "json"), ("human", "human"), ("xml", "human")]
)
def test_the_format_comes_from_the_environment(monkeypatch, text: str, found: str):
    monkeypatch.setenv(FORMAT_VARIABLE, text)
    assert log_format() is LogFormat(found)
    monkeypatch.delenv(FORMAT_VARIABLE)
    assert log_format() is LogFormat.HUMAN


def test_a_line_has_its_fields_and_no_nan(lines: list[dict]):
    logger = logging.getLogger("swarm.node")
    tell(logger, "state", 'stage 1: "ready"\nnow', loss=math.nan, step=3)
    (line,) = lines
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "swarm.node",
        "event": "state",
        "loss": None,
        "step": 3,
        "message": 'stage 1: "ready"\nnow',
    }


def test_an_exception_is_one_line_too(lines: list[dict]):
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("swarm").exception("it failed: %s", "so")
    (line,) = lines
    assert (line["level"], line["message"]) == ("error", "it failed: so")
    assert "ValueError: broken" in line["traceback"]


def test_a_run_is_told_as_steps_events_and_warnings(lines: list[dict]):
    console = Console(file=io.StringIO())
    with LiveView(console) as view:
        view.update(VIEW)
        view.update(VIEW)
        view.update(replace(VIEW, step=51, loss=3.0, warnings=(), events=(*VIEW.events, "left")))
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    told = [line["event"] for line in lines]
    assert told == ["event", "warning", "step", "event", "event", "step"]  # the phase is one
    step = lines[-1]
    assert (step["step"], step["steps"], step["loss"]) == (51, 200, 3.0)
    assert step["samples_per_s"] == 152.34
    assert lines[1]["message"].startswith("stage 0 has one replica")
