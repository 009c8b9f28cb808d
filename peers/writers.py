"""Optional writers of a run's curves: TensorBoard and Weights & Biases (extras of the same names).

Each is told of every step. One that fails is told of in the log once, and not again of any step:
a run does not end for a curve.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from peers.steps import StepDone
from swarm.errors import UserError

logger = logging.getLogger("swarm.writers")


class Writer(Protocol):
    """Takes the figures of a step, by name."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def figures(done: StepDone) -> dict[str, float]:
    """Of a step, by the names of ``metrics.jsonl``; what is not finite is left out."""
    found: dict[str, float | None] = {
        "loss": done.loss,
        "eval_loss": done.eval_loss,
        "lr": done.lr,
        "norm": done.norm,
        "samples_per_s": done.samples / done.seconds if done.seconds else None,
        "resent": done.resent,
        "skipped": float(done.skipped),
        "replicas": float(sum(len(counts) for counts in done.counts)),
    }
    return {name: float(v) for name, v in found.items() if v is not None and isfinite(v)}


class TensorBoard:
    """Event files in ``folder``, for ``tensorboard --logdir``."""

    def __init__(self, folder: Path) -> None:
        try:
            library: Any = import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise missing("--tensorboard", "tensorboard") from error
        self._writer: Any = library.SummaryWriter(str(folder))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of ``project``; login and mode are its own (``wandb login``, ``WANDB_MODE``)."""

    def __init__(self, project: str, config: Mapping[str, Any]) -> None:
        try:
            library: Any = import_module("wandb")
        except ImportError as error:
            raise missing("--wandb", "wandb") from error
        self._run: Any = library.init(project=project, config=dict(config))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def missing(flag: str, extra: str) -> UserError:
    return UserError(f"{flag} needs a library that is not installed: pip install 'swarm[{extra}]'")


class Guarded:
    """Told of steps, it tells ``writer``, until that fails."""

    def __init__(self, name: str, writer: Writer) -> None:
        self._name = name
        self._writer: Writer | None = writer

    def __call__(self, done: StepDone) -> None:
        self._try(lambda writer: writer.write(done.step, figures(done)))

    def close(self) -> None:
        self._try(lambda writer: writer.close())

    def _try(self, act: Callable[[Writer], None]) -> None:
        if self._writer is None:
            return
        try:
            act(self._writer)
        except Exception as error:
            # Another's library, a full disk, a service that is away: none of it is the run's.
            self._writer = None
            logger.error("%s fails, and is left alone from now on: %s", self._name, error)
            logger.debug("where it came from", exc_info=error)
