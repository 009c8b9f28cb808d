"""Curves for others: what is written, and that a writer which fails harms nobody."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from peers.showing import Showing, Shown
from peers.status import Monitor
from peers.steps import StepDone
from peers.writers import Guarded, TensorBoard, figures
from swarm.errors import UserError
from swarm.manifest import default_manifest

DONE = StepDone(7, 3.5, 64, 2.0, 0.001, 1.25, False, 3, ({"a": 1, "b": 2}, {"c": 3}), {})


def test_the_figures_are_those_of_the_step():
    assert figures(DONE) == {
        "loss": 3.5,
        "lr": 0.001,
        "norm": 1.25,
        "samples_per_s": 32.0,
        "resent": 3.0,
        "skipped": 0.0,
        "replicas": 3.0,
    }
    assert figures(replace(DONE, eval_loss=4.0))["eval_loss"] == 4.0
    unknown = replace(DONE, seconds=float("nan"), loss=float("inf"))
    assert not {"samples_per_s", "loss"} & set(figures(unknown))


class Fake:
    """In the place of wandb, or of TensorBoard's writer."""

    def __init__(self, *given: Any, **known: Any) -> None:
        self.given, self.known = given, known
        self.told: list[tuple[Mapping[str, float], int]] = []
        self.ended = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.told.append((values, step))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.append(({name: value}, step))

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        self.ended = True

    close = finish


def test_weights_and_biases_get_every_step_and_the_manifest(monkeypatch):
    made: list[Fake] = []

    def init(**known: Any) -> Fake:
        made.append(Fake(**known))
        return made[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monitor = Monitor()
    with Showing(Shown(wandb="my-project"), default_manifest()) as showing:
        showing.on(monitor)
        monitor.step_done(DONE)
    (run,) = made
    assert run.known["project"] == "my-project"
    assert run.known["config"]["model"]["kind"] == "gpt"
    assert run.told == [(figures(DONE), 7)]
    assert run.ended


def test_tensorboard_gets_every_figure(monkeypatch, tmp_path):
    fake = SimpleNamespace(SummaryWriter=Fake)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    writer = TensorBoard(tmp_path)
    writer.write(7, figures(DONE))
    written = writer._writer
    assert written.given == (str(tmp_path),)
    assert {name: value for one, _ in written.told for name, value in one.items()} == figures(DONE)
    writer.close()
    assert written.ended


@pytest.mark.parametrize(
    ("module", "shown", "words"),
    [
        (
            "torch.utils.tensorboard",
            Shown(tensorboard="x"),
            r"--tensorboard .*swarm\[tensorboard\]",
        ),
        ("wandb", Shown(wandb="x"), r"--wandb .*swarm\[wandb\]"),
    ],
)
def test_a_library_that_is_missing_is_named(monkeypatch, module: str, shown: Shown, words: str):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=words):
        Showing(shown, None)


def test_a_writer_that_fails_is_told_once_and_left_alone(caplog):
    calls: list[int] = []

    class Full:
        def write(self, step: int, figures: Mapping[str, float]) -> None:
            calls.append(step)
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise AssertionError("it was left alone")

    guarded = Guarded("TensorBoard", Full())
    with caplog.at_level(logging.ERROR):
        guarded(DONE)
        guarded(DONE)
        guarded.close()
    assert calls == [7]
    assert [record.message for record in caplog.records] == [
        "TensorBoard fails, and is left alone from now on: [Errno 28] No space left on device"
    ]


def test_nothing_is_written_where_nothing_was_asked_for():
    monitor = Monitor()
    with Showing(Shown(), None) as showing:
        showing.on(monitor)
    assert monitor.listeners == []
    assert monitor.servers == []
