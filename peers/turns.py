"""Pushes to a peer wait for their turn, first come, first served; see ``swarm.core.link``."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio

from swarm.core.hop import Outcome
from swarm.core.link import Link
from swarm.types import PeerId

UNANSWERED = (Outcome.LOST, Outcome.UNREACHABLE)
"""Outcomes of a push that nobody has answered."""


@dataclass(slots=True)
class _Queue:
    """To one peer: its link, and who waits."""

    link: Link = field(default_factory=Link)
    waiting: deque[anyio.Event] = field(default_factory=deque)

    def wake(self) -> None:
        """Whoever is first may look whether its turn has come."""
        if self.waiting and self.link.may_start():
            self.waiting[0].set()


class Turns:
    """Of one sender, by the peer that is sent to."""

    MOST = 256
    """Peers that are remembered: what was measured on the way to others is found anew."""

    def __init__(self) -> None:
        self._queues: dict[PeerId, _Queue] = {}

    async def take(
        self, peer: PeerId, nbytes: int, send: Callable[[], Awaitable[tuple[Outcome, str]]]
    ) -> tuple[Outcome, str]:
        """``send``, once it is the turn of ``nbytes`` to ``peer``; what it returns."""
        queue = self._queue(peer)
        if queue.waiting or not queue.link.may_start():
            await self._wait(queue)
        turn = queue.link.start(nbytes, anyio.current_time())
        queue.wake()
        arrived = False
        try:
            outcome = await send()
            arrived = outcome[0] not in UNANSWERED
            return outcome
        finally:
            queue.link.end(turn, anyio.current_time(), arrived=arrived)
            queue.wake()

    async def _wait(self, queue: _Queue) -> None:
        mine = anyio.Event()
        queue.waiting.append(mine)
        try:
            await mine.wait()
        except BaseException:
            queue.waiting.remove(mine)
            queue.wake()
            raise
        queue.waiting.remove(mine)  # the next is woken once we have started

    def _queue(self, peer: PeerId) -> _Queue:
        queue = self._queues.pop(peer, None) or _Queue()
        self._queues[peer] = queue
        if len(self._queues) > self.MOST:
            del self._queues[next(iter(self._queues))]
        return queue
