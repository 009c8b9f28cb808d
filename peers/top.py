"""``swarm top``: ``swarm status``, again and again, with the curve of what was seen meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import anyio
from rich.console import Group, RenderableType
from rich.text import Text

from peers.entering import Entry, entered
from peers.finding import learn_run
from peers.lookout import Lookout
from peers.report import Report
from peers.report_view import render
from peers.reporting import make_report
from peers.rpc import Caller
from peers.running import Leave
from peers.screen import clock_time, sparkline
from peers.wire import Limits
from swarm.manifest import CANONICAL_BYTES

SEEN = 500
"""Looks that are remembered."""
LATELY_S = 60.0
"""The rate is that of the steps of so many seconds."""


@dataclass(frozen=True, slots=True)
class Look:
    """When a step was first seen to be done, and its loss."""

    at: float
    step: int
    loss: float | None


class Looks:
    """What was seen of a run since ``swarm top`` began."""

    def __init__(self) -> None:
        self._looks: deque[Look] = deque(maxlen=SEEN)

    def add(self, report: Report, now: float) -> None:
        """A report; one of the step that is known already tells nothing, unless steps were lost."""
        step = None if report.mark is None else report.mark.t
        if step is None:
            return
        if self._looks and self._looks[-1].step > step:
            # Steps were lost; when this one was done for the first time does not count either.
            while self._looks and self._looks[-1].step >= step:
                self._looks.pop()
        if not self._looks or self._looks[-1].step < step:
            self._looks.append(Look(now, step, report.loss))

    @property
    def losses(self) -> list[float]:
        return [look.loss for look in self._looks if look.loss is not None]

    @property
    def steps_per_s(self) -> float | None:
        """Of late; None: too little was seen."""
        if len(self._looks) < 2:
            return None
        last = self._looks[-1]
        first = next(look for look in self._looks if look.at >= last.at - LATELY_S)
        if first is last:
            first = self._looks[-2]
        return (last.step - first.step) / (last.at - first.at)


def page(report: Report, looks: Looks, width: int) -> RenderableType:
    """The report, and a line with progress, rate, what is left, and the losses that were seen."""
    rate, step = looks.steps_per_s, 0 if report.mark is None else report.mark.t
    done = step / report.steps if report.steps else 0.0
    words = [f"{done:4.0%}"]
    if rate is not None and rate > 0:
        left = clock_time(max(0, report.steps - step) / rate)
        words += [f"{rate * report.batch:.1f} samples/s", f"{left} left"]
    line = Text("  ".join(words) + "  ", "bold")
    line.append(sparkline(looks.losses, max(1, min(60, width - len(line)))), "magenta")
    return Group(line, render(report), Text("Ctrl-C leaves", "dim"))


async def watch(
    entry: Entry,
    *,
    run_id: str,
    every_s: float,
    show: Callable[[Report, Looks], None],
    leave: Leave,
) -> None:
    """Look every ``every_s`` seconds and ``show`` it, until somebody wants to ``leave``.

    Raises:
        UserError: the run cannot be found; one line that says what to do.
    """
    async with entered(entry, Limits(payload_bytes=CANONICAL_BYTES)) as swarm:
        manifest = await learn_run(swarm, entry.join, run_id)
        swarm.limit(Limits(manifest.limits.header_bytes, CANONICAL_BYTES))
        caller = Caller(swarm.transport, timeout_s=manifest.periods.call_s)
        lookout, looks, leaving = Lookout(manifest, caller, swarm.directory), Looks(), anyio.Event()
        leave.hear = leaving.set
        while not leaving.is_set():
            report = make_report(await lookout.look(detail=True), manifest)
            looks.add(report, anyio.current_time())
            show(report, looks)
            with anyio.move_on_after(every_s):
                await leaving.wait()
