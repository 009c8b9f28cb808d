"""hivemind's ``P2P``, which its DHT speaks through, with p2pd or without. Only this imports it.

``P2P`` itself is a client of p2pd. ``p2p_over`` makes one that needs no p2pd: all that hivemind's
``DHTNode`` uses of it are unary calls, and those are two messages on a fresh stream whose protocol
is the name of the handler, so any libp2p that can exchange two messages will do (``Exchanges``).

A call on the wire, as p2pd writes and reads it: the caller sends a ``PersistentConnectionRequest``
with ``callUnary``, the callee another with ``unaryResponse``, each with its length as a varint
before it. The caller must not half-close the stream in between: p2pd takes that as a cancel.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

import dht.protobufs  # noqa: F401  before hivemind: see there

# isort: split
from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from swarm.types import PeerId

__all__ = [
    "P2P",
    "Exchanges",
    "Multiaddr",
    "NoExchange",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "p2p_over",
    "p2pd_pb2",
]

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 << 20
"""Of a unary request or reply; p2pd has the same limit."""
CALL_ID_BYTES = 16
"""p2pd tells the calls of all its peers apart by these alone: they are random."""
_BAD_MESSAGE = b"the request is no PersistentConnectionRequest with callUnary"

Answer = Callable[[PeerId, bytes], Awaitable[bytes]]
"""Gets the authenticated sender and its message, returns ours. Cancelled if the sender has gone."""
UnaryHandler = Callable[[bytes, PeerID], Awaitable[bytes]]


class NoExchange(Exception):
    """A message found no answer; ``str(error)`` says why."""


class Exchanges(Protocol):
    """What ``p2p_over`` needs of a libp2p: to exchange two messages on a stream of its own.

    Messages have at most ``MAX_MESSAGE_BYTES`` bytes and travel with their length as a varint.
    """

    @property
    def peer(self) -> PeerId:
        """Our own id."""
        ...

    def addresses(self) -> list[str]:
        """Our full multiaddrs with ``/p2p/ID``."""
        ...

    async def exchange(self, peer: PeerId, protocol: str, message: bytes) -> bytes:
        """Send ``message`` to ``peer``, return its answer. Raises NoExchange."""
        ...

    async def on_exchange(self, protocol: str, answer: Answer | None) -> None:
        """Answer messages of ``protocol`` from now on; None: no more."""
        ...


def p2p_over(exchanges: Exchanges) -> P2P:
    """A ``P2P`` that hivemind's ``DHTNode`` can use. ``exchanges`` stays the caller's."""
    p2p = _DaemonlessP2P()
    p2p.peer_id = PeerID.from_base58(exchanges.peer)
    p2p._client = client = _UnaryClient(exchanges)
    p2p._visible_maddrs = client.transports()
    p2p._alive = True
    return p2p


class _DaemonlessP2P(P2P):
    def _terminate(self) -> None:
        """There is no daemon to end and no socket to remove."""
        self._alive = False


class _UnaryClient:
    """Takes the place of ``hivemind.p2p.p2p_daemon_bindings.p2pclient.Client`` for unary calls."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges

    async def add_unary_handler(
        self, proto: str, handler: UnaryHandler, balanced: bool = False
    ) -> None:
        del balanced  # between the clients of one p2pd; here is one client

        async def answer(sender: PeerId, message: bytes) -> bytes:
            return await _answer(handler, sender, message)

        await self._exchanges.on_exchange(proto, answer)

    async def remove_unary_handler(self, proto: str) -> None:
        await self._exchanges.on_exchange(proto, None)

    async def call_unary_handler(self, peer_id: PeerID, proto: str, data: bytes) -> bytes:
        call_id = secrets.token_bytes(CALL_ID_BYTES)
        request = p2pd_pb2.PersistentConnectionRequest(
            callId=call_id,
            callUnary=p2pd_pb2.CallUnaryRequest(peer=peer_id.to_bytes(), proto=proto, data=data),
        ).SerializeToString()
        if len(request) > MAX_MESSAGE_BYTES:
            raise P2PDaemonError(
                f"a request of {len(request)} bytes; allowed are {MAX_MESSAGE_BYTES}"
            )
        try:
            message = await self._exchanges.exchange(peer_id.to_base58(), proto, request)
            reply = p2pd_pb2.PersistentConnectionRequest.FromString(message)
        except (NoExchange, DecodeError) as error:
            raise P2PDaemonError(str(error)) from error
        response = reply.unaryResponse
        if not reply.HasField("unaryResponse") or reply.callId != call_id:
            raise P2PDaemonError("the reply is to something else")
        if response.HasField("error"):
            raise P2PHandlerError(response.error.decode(errors="replace"))
        return response.response

    async def identify(self) -> tuple[PeerID, tuple[Multiaddr, ...]]:
        return PeerID.from_base58(self._exchanges.peer), self.transports()

    def transports(self) -> tuple[Multiaddr, ...]:
        """Our addresses, as hivemind writes them and without ``/p2p/ID``."""
        addresses = self._exchanges.addresses()
        return tuple(Multiaddr(address.rpartition("/p2p/")[0]) for address in addresses)

    async def connect(self, peer_id: PeerID, maddrs: Iterable[Multiaddr]) -> None:
        raise NotImplementedError("connect through the transport that this P2P runs on")

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[_UnaryClient]:
        yield self

    def close(self) -> None:
        """Does nothing: whoever made the exchanges ends them."""


async def _answer(handler: UnaryHandler, sender: PeerId, message: bytes) -> bytes:
    """hivemind's answer to a request, or its error; never one that is too long."""
    request = p2pd_pb2.PersistentConnectionRequest()
    try:
        request.ParseFromString(message)
    except DecodeError:
        return _packed(b"", error=_BAD_MESSAGE)
    if not request.HasField("callUnary"):
        return _packed(request.callId, error=_BAD_MESSAGE)
    try:
        response = await handler(request.callUnary.data, PeerID.from_base58(sender))
    except Exception as error:
        logger.error("a DHT call from %s failed: %s: %s", sender, type(error).__name__, error)
        logger.debug("where it came from", exc_info=error)
        return _packed(request.callId, error=repr(error).encode())
    packed = _packed(request.callId, response=response)
    if len(packed) > MAX_MESSAGE_BYTES:
        return _packed(request.callId, error=b"the response is longer than allowed")
    return packed


def _packed(call_id: bytes, **response: bytes) -> bytes:
    return p2pd_pb2.PersistentConnectionRequest(
        callId=call_id, unaryResponse=p2pd_pb2.CallUnaryResponse(**response)
    ).SerializeToString()
