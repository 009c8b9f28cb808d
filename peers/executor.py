"""Where computing happens: a thread of its own in production, inline in the harness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread
import torch

T = TypeVar("T")


class Executor(Protocol):
    """Runs functions off the event loop. ``lane`` is the device's: the caller awaits each call
    before the next. ``side`` runs beside it: encoding and decoding."""

    async def lane(self, work: str, function: Callable[[], T]) -> T:
        """Run ``function``; ``work`` names what it is ("forward", "backward", "apply", ...)."""
        ...

    async def side(self, function: Callable[[], T]) -> T:
        """Run ``function`` beside the lane."""
        ...


class Blocking(Protocol):
    """Runs what waits for the disk. In the harness at once, else in a thread."""

    async def __call__(self, function: Callable[[], T]) -> T: ...


async def in_thread(function: Callable[[], T]) -> T:
    """Run ``function`` in a worker thread."""
    return await anyio.to_thread.run_sync(function)


class ThreadExecutor:
    """One compute thread and one codec thread, both with ``threads`` torch threads."""

    def __init__(self, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self._lane = anyio.CapacityLimiter(1)
        self._side = anyio.CapacityLimiter(1)

    async def lane(self, work: str, function: Callable[[], T]) -> T:
        del work
        return await anyio.to_thread.run_sync(function, limiter=self._lane)

    async def side(self, function: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(function, limiter=self._side)


class InlineExecutor:
    """Computes at once, and lets virtual time pass for it: ``cost_s(work)`` seconds.

    With trio's MockClock an hour of computing takes no time; the order of events follows from
    the costs alone.
    """

    def __init__(self, cost_s: Callable[[str], float]) -> None:
        self.cost_s = cost_s

    async def lane(self, work: str, function: Callable[[], T]) -> T:
        await anyio.sleep(self.cost_s(work))
        return function()

    async def side(self, function: Callable[[], T]) -> T:
        await anyio.lowlevel.checkpoint()
        return function()
