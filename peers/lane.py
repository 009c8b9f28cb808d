"""The order of work on a replica's device: control first, then what the intake says is next."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from peers.executor import Executor

log = logging.getLogger("swarm.node")

T = TypeVar("T")


@dataclass(slots=True)
class _Control:
    work: str
    function: Callable[[], Any]
    then: Callable[[Any], None] | None
    done: anyio.Event = field(default_factory=anyio.Event)
    result: Any = None
    error: Exception | None = None


class Lane:
    """Runs one thing at a time.

    ``next_pass`` returns the next microbatch's pass as something to await, or None; it is asked
    whenever no control work waits.
    """

    def __init__(
        self, executor: Executor, next_pass: Callable[[], Callable[[], Awaitable[None]] | None]
    ) -> None:
        self._executor = executor
        self._next_pass = next_pass
        self._control: deque[_Control] = deque()
        self._wake = anyio.Event()

    def wake(self) -> None:
        """Something may be there to run."""
        self._wake.set()

    async def control(
        self, work: str, function: Callable[[], T], then: Callable[[T], None] | None = None
    ) -> T:
        """Run ``function`` on the device before any further pass, and return its result.

        ``then(result)`` is called on the event loop before anything else runs on the device.
        Cancelling the caller does not undo it.
        """
        item = _Control(work, function, then)
        self._control.append(item)
        self.wake()
        await item.done.wait()
        if item.error is not None:
            raise item.error
        result: T = item.result
        return result

    async def run(self) -> None:
        """For ever: control, passes, sleep."""
        while True:
            self._wake = anyio.Event()
            while self._control:
                await self._do(self._control.popleft())
            run_pass = self._next_pass()
            if run_pass is None:
                if not self._control:
                    await self._wake.wait()
            else:
                await run_pass()

    async def _do(self, item: _Control) -> None:
        try:
            item.result = await self._executor.lane(item.work, item.function)
            if item.then is not None:
                item.then(item.result)
        except Exception as error:
            log.error("%s failed: %s", item.work, error)
            log.debug("where it came from", exc_info=error)
            item.error = error  # whoever waits for it is told
        finally:
            item.done.set()
