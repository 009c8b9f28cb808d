"""Shows a run while it lasts: live in a terminal, line by line in a pipe."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from peers.logs import LogFormat, log_format, tell
from peers.runview import ReplicaView, RunView, StageView
from peers.screen import clean, clock_time, render

__all__ = ["LiveView", "ReplicaView", "RunView", "StageView", "render"]

log = logging.getLogger("swarm.run")

REFRESH_S = 0.25
_FIGURES = re.compile(r"\d+(\.\d+)?")
_DURATIONS = re.compile(r"\d+(\.\d+)? ?(ms|s|min|seconds|minutes)\b")


class LiveView:
    """A context manager; give ``update`` a fresh view a few times a second, and at each step.

    In a terminal the view is redrawn in place, at most every ``REFRESH_S`` seconds and by the
    caller's thread alone; its last state stays on the screen. Elsewhere each step, event, warning
    and kind of phase becomes one plain line.
    """

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(highlight=False)
        self._clock = clock
        as_json = log_format() is LogFormat.JSON
        self._log = JsonLog() if as_json else PlainLog(self._console)
        self._draws = not as_json and _can_draw(self._console)
        self._live: Live | None = None
        self._latest: RunView | None = None
        self._drawn_at = -REFRESH_S

    def __enter__(self) -> LiveView:
        if self._draws:
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._draw()
            self._live.stop()
            self._live = None

    def update(self, view: RunView) -> None:
        """Show ``view``, now or with the next one that is due."""
        self._latest = view
        if self._live is None:
            self._log.update(view)
        elif self._clock() - self._drawn_at >= REFRESH_S:
            self._drawn_at = self._clock()
            self._draw()

    def say(self, line: str) -> None:
        """A line that belongs to no view: nothing is known of a run yet."""
        self._log.say(line)

    def _draw(self) -> None:
        if self._live is not None and self._latest is not None:
            height = max(self._console.height - 1, 1)
            self._live.update(render(self._latest, height=height), refresh=True)


def _can_draw(console: Console) -> bool:
    return (
        console.is_terminal
        and not console.is_dumb_terminal
        and console.encoding.lower().startswith("utf")
    )


class PlainLog:
    """What is new in each view, as lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._step = 0
        self._events: list[str] = []
        self._warnings: set[str] = set()
        self._phases: set[str] = set()

    def update(self, view: RunView) -> None:
        """Print what the last view did not say yet."""
        for event in _after_overlap(self._events, list(view.events)):
            self._print(event)
        self._events = list(view.events)
        self._print_warnings(view.warnings)
        if view.step != self._step:  # after a rollback it is a lower one
            self._print_step(view)
        elif view.phase and _FIGURES.sub("#", view.phase) not in self._phases:
            self._print(view.phase)
            self._phases.add(_FIGURES.sub("#", view.phase))
        self._step = view.step

    def say(self, line: str) -> None:
        self._print(line)

    def _print_step(self, view: RunView) -> None:
        self._print(_step_line(view))

    def _print_warnings(self, warnings: Sequence[str]) -> None:
        """A warning is printed when it appears; that only a duration in it grew is no news."""
        keys = {_DURATIONS.sub("#", warning): warning for warning in warnings}
        for key, warning in keys.items():
            if key not in self._warnings:
                self._print_warning(warning)
        self._warnings = set(keys)

    def _print_warning(self, warning: str) -> None:
        self._print(f"warning: {warning}")

    def _print(self, line: str) -> None:
        encoding = self._console.encoding
        printable = clean(line).encode(encoding, "replace").decode(encoding)
        self._console.print(Text(printable), soft_wrap=True)


class JsonLog(PlainLog):
    """The same news as log lines with fields."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))

    def _print(self, line: str) -> None:
        tell(log, "event", clean(line))

    def _print_warning(self, warning: str) -> None:
        tell(log, "warning", clean(warning))

    def _print_step(self, view: RunView) -> None:
        tell(
            log,
            "step",
            _step_line(view),
            step=view.step,
            steps=view.steps,
            loss=view.loss,
            samples_per_s=round(view.samples_per_s, 3),
        )


def _after_overlap(old: list[str], new: list[str]) -> list[str]:
    """What a sliding window shows that it did not show before."""
    for size in range(min(len(old), len(new)), 0, -1):
        if old[-size:] == new[:size]:
            return new[size:]
    return new


def _step_line(view: RunView) -> str:
    loss = "-" if view.loss is None else f"{view.loss:.4f}"
    return (
        f"step {view.step}/{view.steps}  loss {loss}  {view.samples_per_s:.1f} samples/s"
        f"  {clock_time(view.started_s_ago)}"
    )
