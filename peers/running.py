"""How a command runs: an event loop, signals that end it in order, errors as one line."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from peers.logs import formatter
from swarm.errors import SwarmError, UserError

log = logging.getLogger("swarm")

T = TypeVar("T")

INTERRUPTED = 130
FAILED = 1
CANNOT_START = 2


PARENT_VARIABLE = "SWARM_PARENT_PID"
"""A process that finds this in its environment ends when that parent is gone."""


class Interrupted(Exception):
    """The user, or the system, asked the process to end."""


class Leave:
    """Who is to hear of the first signal, so that it can end in good order by itself."""

    def __init__(self) -> None:
        self.hear: Callable[[], None] | None = None


def run_command(main: Callable[[], Awaitable[T]], leave: Leave | None = None) -> T:
    """Run ``main`` on asyncio; SIGINT and SIGTERM cancel it, a second one ends at once.

    If somebody hears of them through ``leave``, the first one is told there, the second cancels,
    and the third ends at once.

    Exits with 2 for what the user can mend at the start, 1 for a run that failed, 130 when
    interrupted; always with one line on standard error, never a traceback for what is expected.
    """
    try:
        return anyio.run(_guarded, main, leave or Leave(), backend="asyncio")
    except Interrupted:
        sys.stderr.write("stopped\n")
        raise SystemExit(INTERRUPTED) from None
    except BaseException as error:
        expected = expected_error(error, SwarmError) or expected_error(error, OSError)
        if expected is None:
            raise
        sys.stderr.write(f"error: {expected}\n")
        code = CANNOT_START if isinstance(expected, UserError) else FAILED
        raise SystemExit(code) from None


async def _guarded(main: Callable[[], Awaitable[T]], leave: Leave) -> T:
    result: list[T] = []
    signals = 0
    cancelled = False

    async with anyio.create_task_group() as tasks:

        def on_signal() -> None:
            nonlocal signals, cancelled
            signals += 1
            if signals == 1 and leave.hear is not None:
                leave.hear()
            elif not cancelled:
                cancelled = True
                tasks.cancel_scope.cancel()
            else:
                os._exit(INTERRUPTED)

        async def watch_parent() -> None:
            parent = os.environ.get(PARENT_VARIABLE, "")
            while parent.isdigit():
                await anyio.sleep(1)
                if os.getppid() != int(parent):
                    leave.hear = None  # nobody is left to finish anything for
                    on_signal()
                    return

        loop = asyncio.get_running_loop()
        # hivemind leaves tasks whose connection broke; asyncio would print each with a traceback.
        loop.set_exception_handler(lambda _, context: log.debug("left behind: %s", context))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        tasks.start_soon(watch_parent)
        result.append(await main())
        tasks.cancel_scope.cancel()
    if cancelled or not result:
        raise Interrupted
    return result[0]


def expected_error(error: BaseException, kind: type[Exception] = SwarmError) -> Exception | None:
    """The first error of ``kind`` in ``error`` or the groups that it is made of.

    An OSError (a full disk, no more descriptors) is nothing that a traceback would help with.
    """
    if isinstance(error, kind):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            found = expected_error(inner, kind)
            if found is not None:
                return found
    return None


def set_up_logging() -> None:
    """One line an event on standard error; other libraries only when something is wrong.

    ``SWARM_LOG_LEVEL=debug`` in the environment shows more. See ``peers.logs`` for its form.
    """
    level = os.environ.get("SWARM_LOG_LEVEL", "info").upper()
    level = level if level in logging.getLevelNamesMapping() else "INFO"
    handler = logging.StreamHandler()
    handler.setFormatter(formatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("swarm", "peers", "dht"):
        logging.getLogger(name).setLevel(level)
    # It warns of a child whose start was cancelled, though it has ended that child itself.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
