"""How a joiner gets on: told to its owner now and then, and whether its link can keep up."""

from __future__ import annotations

from collections.abc import Callable

import anyio
from rich.filesize import decimal

from swarm.errors import SwarmError

FULL_COPIES = 3
"""So often may the whole state have come in without an end; then the link is too slow."""

SAY_EVERY_S = 3.0


class TooSlow(SwarmError):
    """This machine's link cannot carry one sum a step."""


class Pace:
    """Bytes and decisions since the joiner began.

    Args:
        stage: which. state_bytes, sum_bytes: how long its state and one sum of gradients are.
        say: told in plain words, every ``SAY_EVERY_S`` seconds at most.
    """

    def __init__(
        self, stage: int, state_bytes: int, sum_bytes: int, say: Callable[[str], None]
    ) -> None:
        self._stage, self._state_bytes, self._sum_bytes = stage, state_bytes, sum_bytes
        self._say = say
        self._received = self._copied = self._decisions = 0
        self._began, self._said = anyio.current_time(), float("-inf")

    def copied(self, nbytes: int) -> None:
        """A piece of the state has come."""
        self._copied += nbytes
        self._received += nbytes

    def summed(self, nbytes: int) -> None:
        """A piece of a sum has come."""
        self._received += nbytes

    def decided(self) -> None:
        """The run has made a step."""
        self._decisions += 1

    def forgive(self) -> None:
        """What has been copied so far in vain was not the link's fault."""
        self._copied = 0

    def tell(self, progress: str) -> None:
        """``progress`` in plain words, with how much there is and how fast it comes."""
        now = anyio.current_time()
        if now - self._said < SAY_EVERY_S:
            return
        self._said = now
        rate = self._received / max(1e-9, now - self._began)
        self._say(f"{progress} of {decimal(self._state_bytes)}, {decimal(int(rate))}/s")

    def check(self) -> None:
        """Whether the link carries one sum a step; it is judged late, after much patience.

        Raises:
            TooSlow: it does not; with figures.
        """
        if self._copied <= FULL_COPIES * self._state_bytes or not self._decisions:
            return
        elapsed = anyio.current_time() - self._began
        step_s, carried = elapsed / self._decisions, self._received / elapsed
        needed = self._sum_bytes / step_s
        if carried > 2 * needed:
            self.forgive()  # the link would do: something else has cost the copies
            return
        raise TooSlow(
            f"stage {self._stage} needs {decimal(self._sum_bytes)} in each step of {step_s:.1f} s, "
            f"{decimal(int(needed))}/s and more to catch up, and this link carried "
            f"{decimal(int(carried))}/s: it cannot keep up. Serve a smaller stage (--stage), or "
            "come back with a faster link"
        )
