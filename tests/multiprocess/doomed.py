"""Runs ``swarm`` and kills the process with SIGKILL at an exact moment.

    python doomed.py MOMENT N COMMAND...

MOMENT ``computed``: a node's N-th forward pass has been computed and nothing of it told yet.
Otherwise the name of a message (forward, prepare, decide): a trainer's N-th of them has been
answered, and no later one has been sent.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count

import anyio


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_forward(n: int) -> None:
    from peers.stage import StageOwner

    forward, numbers = StageOwner.forward, count(1)

    def doomed(self, *args, **kwargs):
        passed = forward(self, *args, **kwargs)
        if next(numbers) == n:
            die()
        return passed

    StageOwner.forward = doomed  # type: ignore[method-assign]


def die_after_message(kind: str, n: int) -> None:
    from peers.rpc import Caller

    call, numbers = Caller.call, count(1)

    async def doomed(self, peer, message, *args, **kwargs):
        number = next(numbers) if message.kind == kind else 0
        if number > n:
            await anyio.sleep_forever()
        answer = await call(self, peer, message, *args, **kwargs)
        if number == n:
            die()
        return answer

    Caller.call = doomed  # type: ignore[method-assign]


def main() -> None:
    moment, n, *words = sys.argv[1:]
    if moment == "computed":
        die_after_forward(int(n))
    else:
        die_after_message(moment, int(n))
    from peers.cli import app

    app(words, prog_name="swarm")


if __name__ == "__main__":
    main()
