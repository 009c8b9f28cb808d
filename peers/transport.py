"""The transport seam: how one peer calls another.

Everything between peers is a *call*: one request frame, one reply frame. Implementations:
``peers.memory`` (the in-process twin), ``peers.p2pd`` (hivemind's libp2p daemon) and
``peers.pylibp2p`` (no daemon), which speak with each other; and ``peers.faults`` wraps any of them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from swarm.types import PeerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: a small msgpack-able header and raw bytes.

    ``payload`` is a list of buffers that are sent one after the other without being joined
    (scatter). A received frame has at most one buffer: writable, its start aligned to 64 bytes,
    owned by the receiver. Senders must not change the buffers until the call has returned.
    """

    header: Mapping[str, Any]
    payload: Sequence[memoryview] = field(default=())

    @property
    def payload_bytes(self) -> int:
        return sum(part.nbytes for part in self.payload)


Handler = Callable[[PeerId, Frame], Awaitable[Frame]]
"""Gets the *authenticated* sender and its request, returns the reply.

Handlers of different calls run concurrently. They do not raise; if one does all the same, the
transport answers ``{"kind": "refused", "reason": "internal error: ..."}`` and lives on.
"""


MAX_REASON = 500
"""Characters of a reason; a message with a longer one does not validate."""


def refusal(reason: str) -> Frame:
    """The reply that says no, and why."""
    return Frame({"kind": "refused", "reason": reason[:MAX_REASON]})


async def answer(handler: Handler, sender: PeerId, request: Frame) -> Frame:
    """The handler's reply, or a refusal if it raised: no message may end a server."""
    try:
        return await handler(sender, request)
    except Exception as error:
        reason = f"internal error: {type(error).__name__}: {error}"
        logger.error("a call from %s was refused: %s", sender, reason)
        logger.debug("where it came from", exc_info=error)
        return refusal(reason)


class Transport(Protocol):
    """Calls peers by id and serves calls. Five methods; see each for its contract."""

    @property
    def peer(self) -> PeerId:
        """Our own id."""
        ...

    async def serve(self, handler: Handler) -> None:
        """Answer incoming calls with ``handler`` from now on. Returns at once.

        Called again, it replaces the handler.

        Frames whose header or payload is above the limits given at construction are refused
        before memory is taken, and the connection they came on is closed.
        """
        ...

    async def call(self, peer: PeerId, request: Frame, *, timeout_s: float) -> Frame:
        """Send ``request`` to ``peer`` and return its reply.

        Any number of calls may be under way, to one peer too; they do not wait for each other
        beyond a bounded pool of streams.

        Raises:
            NotConnected: no connection could be opened; the peer surely did not get it.
            CallLost: time ran out, or the connection broke, after sending began.
            BadFrame: the reply was not a valid frame (the connection is closed).
        Cancelling the call leaves the transport usable.
        """
        ...

    async def connect(self, address: str) -> PeerId:
        """Make the peer at ``address`` (a multiaddr with ``/p2p/ID``) reachable by its id.

        Raises:
            BootstrapError: with the address and what failed.
        """
        ...

    async def close(self) -> None:
        """Stop serving, end calls under way with ``CallLost`` or ``NotConnected``, free all."""
        ...


class TransportKind(StrEnum):
    """What ``--transport`` takes."""

    AUTO = "auto"
    P2PD = "p2pd"
    PYLIBP2P = "pylibp2p"
