"""Trio in a thread of its own, beside the asyncio loop of this process.

py-libp2p needs trio. In trio's guest mode, on the loop's own thread, the network would stand still
whenever the loop computes: a call of 1 MiB took 18 s there, and 0.1 s with a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import trio

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Stopped(Exception):
    """What was to run in the other loop did not, or not to its end: ``str(error)`` says why."""


class TrioThread:
    """Runs coroutine functions in trio, from asyncio; and the other way round.

    Made by ``start``, on the loop that its calls come from. ``stop`` cancels what runs there.
    """

    nursery: trio.Nursery
    """Of what runs until ``stop``; to be used in trio only. Nothing in it may raise."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._token: trio.lowlevel.TrioToken
        self._thread: threading.Thread
        self._tasks: set[asyncio.Future[Any]] = set()
        self._stopping = False
        self._why = ""

    @classmethod
    async def start(cls, name: str) -> TrioThread:
        """Raises Stopped: trio does not start, for want of files, say."""
        thread = cls()
        # A daemon: an interpreter whose loop is gone shall not wait for it.
        thread._thread = threading.Thread(target=thread._main, name=name, daemon=True)
        thread._thread.start()
        try:
            await _first_of(thread._ready, thread._ended)
        except asyncio.CancelledError:
            if thread._ready.done():
                await thread.stop()
            else:
                thread._thread.join()  # it has nothing more to do
            raise
        if not thread._ready.done():
            thread._thread.join()
            raise Stopped(thread._why)
        return thread

    async def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """``await function(*args)`` in trio. A cancel reaches it there, and is waited for.

        Raises:
            Stopped: the thread has ended, before or meanwhile.
        """
        done: asyncio.Future[T] = self._loop.create_future()
        scope = trio.CancelScope()

        async def task() -> None:
            try:
                with scope:
                    result = await function(*args)
                    self._tell(done.set_result, result)
                if scope.cancelled_caught:
                    self._tell(done.cancel)
            except trio.Cancelled:
                self._tell(done.set_exception, Stopped("the thread has ended"))
                raise
            except Exception as error:  # noqa: BLE001  # raised where it is waited for
                self._tell(done.set_exception, error)

        def start() -> None:
            try:
                self.nursery.start_soon(task)
            except RuntimeError:  # its nursery is closed
                self._tell(done.set_exception, Stopped("the thread has ended"))

        try:
            self._token.run_sync_soon(start)
        except trio.RunFinishedError as error:
            raise Stopped("the thread has ended") from error
        # What is queued for trio when it ends is dropped, so that ``done`` may never be set.

        def cancel() -> None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(scope.cancel)

        try:
            await _first_of(done, self._ended, on_cancel=cancel)
        except asyncio.CancelledError:
            if done.done() and not done.cancelled():
                done.exception()  # was looked at
            raise
        if not done.done():
            raise Stopped("the thread has ended")
        return done.result()

    async def run_in_loop(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """``await function(*args)`` in the asyncio loop, from trio. A cancel reaches it there.

        Raises:
            Stopped: it was cancelled by somebody in the loop, or the loop has ended. (Asyncio's own
                exception for that would end all of trio.)
        """
        ended = trio.Event()
        started: list[asyncio.Future[T]] = []

        def start() -> None:
            task = asyncio.ensure_future(function(*args), loop=self._loop)
            started.append(task)
            self._tasks.add(task)
            task.add_done_callback(finish)

        def finish(task: asyncio.Future[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # was looked at
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(ended.set)

        def cancel() -> None:
            for task in started:
                task.cancel()

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError as error:
            raise Stopped("the event loop of this process has ended") from error
        try:
            await ended.wait()
        except trio.Cancelled:
            self._tell(cancel)
            raise
        try:
            return started[0].result()
        except asyncio.CancelledError as error:
            raise Stopped("it was cancelled in the event loop") from error

    async def gone(self) -> str:
        """Returns, with the reason, once the thread has ended without being asked to."""
        while True:
            await asyncio.wait([self._ended])
            if not self._stopping:
                return self._why
            await asyncio.sleep(3600)

    async def stop(self) -> None:
        """End all that runs there, here too, and the thread. Again does nothing."""
        self._stopping = True
        with anyio.CancelScope(shield=True):
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(lambda: self.nursery.cancel_scope.cancel())
            await asyncio.wait([self._ended])
            self._thread.join()  # it has nothing more to do
            others = self._tasks - {asyncio.current_task()}
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    def _main(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:
            self._why = f"the network thread ended: {error!r}"
            logger.error("%s", self._why, exc_info=error)
        finally:
            self._tell(self._ended.set_result, None)

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self.nursery:
            self._tell(self._ready.set_result, None)
            await trio.sleep_forever()

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        """Call ``function`` in the loop; nobody is there to hear once it is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)


async def _first_of(
    *futures: asyncio.Future[Any], on_cancel: Callable[[], object] = lambda: None
) -> None:
    """Wait until one is done, through cancels; raises CancelledError then, if there was one."""
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        on_cancel()
        with anyio.CancelScope(shield=True):
            while not any(future.done() for future in futures):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        raise
