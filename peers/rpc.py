"""Typed calls over a transport: messages in, messages out; hops; retries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from peers.messages import AnyReply, Message, parse_reply
from peers.messages import Busy as BusyReply
from peers.messages import Ok as OkReply
from peers.messages import Refused as RefusedReply
from peers.messages import header as header_of
from peers.transport import Frame, Transport
from swarm.core.hop import Delivered, Hop, Outcome, Pause, Push, Tell
from swarm.errors import BadInput, CallLost, NotConnected, TransportError
from swarm.types import PeerId, Replica


@dataclass(frozen=True, slots=True)
class Answer:
    """A validated reply and its payload."""

    message: AnyReply
    payload: Sequence[memoryview]


class Caller:
    """Calls peers with messages. ``timeout_s`` of a call grows with its payload."""

    BYTES_PER_S = 1 << 20
    """The slowest link that a call's time limit allows for: 8 Mb/s."""

    def __init__(self, transport: Transport, *, timeout_s: float) -> None:
        self._transport = transport
        self.timeout_s = timeout_s

    @property
    def peer(self) -> PeerId:
        return self._transport.peer

    async def call(
        self,
        peer: PeerId,
        message: Message,
        payload: Sequence[memoryview] = (),
        *,
        timeout_s: float | None = None,
    ) -> Answer:
        """Raises TransportError, or BadInput if the reply does not validate."""
        frame = Frame(header_of(message), payload)
        limit_s = (timeout_s or self.timeout_s) + frame.payload_bytes / self.BYTES_PER_S
        reply = await self._transport.call(peer, frame, timeout_s=limit_s)
        return Answer(parse_reply(reply.header), reply.payload)

    async def insist(
        self, peer: PeerId, message: Message, *, tries: int = 3, pause_s: float = 0.3
    ) -> AnyReply:
        """Call up to ``tries`` times; for messages that may be repeated. Raises like ``call``."""
        for _ in range(tries - 1):
            try:
                return (await self.call(peer, message)).message
            except NotConnected:
                await anyio.sleep(pause_s)
            except TransportError:
                continue
        return (await self.call(peer, message)).message

    async def push(
        self, peer: PeerId, message: Message, payload: Sequence[memoryview]
    ) -> tuple[Outcome, str]:
        """One call of a hop, told in the hop's terms."""
        try:
            answer = await self.call(peer, message, payload)
        except NotConnected as error:
            return Outcome.UNREACHABLE, str(error)
        except CallLost as error:
            return Outcome.LOST, str(error)
        except (TransportError, BadInput) as error:
            return Outcome.LOST, str(error)
        match answer.message:
            case OkReply():
                return Outcome.ACCEPTED, ""
            case BusyReply(reason=reason):
                return Outcome.BUSY, reason
            case RefusedReply(reason=reason):
                return Outcome.REFUSED, reason
            case other:
                return Outcome.LOST, f"answered {other.kind} to a push"


async def run_hop(
    hop: Hop, send: Callable[[Replica, int], Awaitable[tuple[Outcome, str]]]
) -> Delivered | Tell:
    """Carry out ``hop`` with ``send(replica, tries)``."""
    move = hop.start(anyio.current_time())
    while True:
        match move:
            case Push(replica=replica, tries=tries):
                outcome, reason = await send(replica, tries)
                move = hop.answered(outcome, reason, anyio.current_time())
            case Pause(until=until):
                await anyio.sleep_until(until)
                move = hop.resume(anyio.current_time())
            case Delivered() | Tell():
                return move
