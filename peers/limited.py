"""A transport that sends no more bytes a second than its owner allows (``--upload-limit``)."""

from __future__ import annotations

import anyio

from peers.transport import Frame, Handler, Transport
from swarm.core.caps import Bucket
from swarm.types import PeerId


class LimitedTransport:
    """``transport``, whose payloads, of calls and of replies, wait for their turn in a bucket.

    The time limit of a call begins when it is sent. What the directory sends is not counted: it
    is some hundred bytes a second.
    """

    def __init__(self, transport: Transport, bytes_per_s: float) -> None:
        self._transport, self._bucket = transport, Bucket(bytes_per_s)

    @property
    def peer(self) -> PeerId:
        return self._transport.peer

    async def serve(self, handler: Handler) -> None:
        async def limited(sender: PeerId, request: Frame) -> Frame:
            reply = await handler(sender, request)
            await self._wait(reply)
            return reply

        await self._transport.serve(limited)

    async def call(self, peer: PeerId, request: Frame, *, timeout_s: float) -> Frame:
        await self._wait(request)
        return await self._transport.call(peer, request, timeout_s=timeout_s)

    async def connect(self, address: str) -> PeerId:
        return await self._transport.connect(address)

    async def close(self) -> None:
        await self._transport.close()

    async def _wait(self, frame: Frame) -> None:
        if frame.payload_bytes:
            await anyio.sleep(self._bucket.wait_s(frame.payload_bytes, anyio.current_time()))
