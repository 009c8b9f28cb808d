"""The calling side of a transport on streams: pooled, persistent streams, one call at a time each.

Runs on asyncio and on trio.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio

from peers import wire
from peers.streams import Stream, StreamCut, Tuning, WriteCut, receive_frame
from peers.transport import Frame
from swarm.errors import CallLost, NotConnected
from swarm.types import PeerId

OpenStream = Callable[[PeerId], Awaitable[Stream]]
"""Opens a stream to a peer, dialled if needed. Raises NotConnected: nobody got anything."""


@dataclass(eq=False)
class _Pool:
    """The streams to one peer: idle ones, last used last, and a slot for each in all."""

    slots: anyio.Semaphore
    idle: list[Stream] = field(default_factory=list)
    users: int = 0

    def take(self) -> Stream | None:
        """An idle stream whose other side is still there."""
        while self.idle:
            stream = self.idle.pop()
            if stream.is_silent():
                return stream
            stream.close()
        return None

    def close_idle(self, before: float) -> None:
        """Close the streams that were last used before this time of ``anyio.current_time()``."""
        for stream in [stream for stream in self.idle if stream.progress_at < before]:
            self.idle.remove(stream)
            stream.close()


@dataclass(eq=False)
class _Call:
    scope: anyio.CancelScope
    sending: bool = False
    """Whether the peer may have got something."""


class StreamClient:
    """Calls peers on streams that ``open_stream`` opens and that are kept for later calls."""

    def __init__(self, open_stream: OpenStream, limits: wire.Limits, tuning: Tuning) -> None:
        self.limits = limits
        self._open_stream = open_stream
        self._tuning = tuning
        self._pools: dict[PeerId, _Pool] = {}
        self._calls: set[_Call] = set()
        self._closed = False
        self._all_ended: anyio.Event | None = None

    async def call(self, peer: PeerId, request: Frame, *, timeout_s: float) -> Frame:
        """See ``peers.transport.Transport.call``."""
        buffers: list[bytes | memoryview] = [wire.encode_head(request, self.limits)]
        buffers += wire.payload_parts(request)
        if self._closed:
            raise NotConnected("this transport is closed")
        pool = self._pools.get(peer)
        if pool is None:
            slots = anyio.Semaphore(self._tuning.streams_per_peer, fast_acquire=True)
            pool = self._pools[peer] = _Pool(slots)
        pool.users += 1
        call = _Call(anyio.CancelScope(deadline=anyio.current_time() + timeout_s))
        self._calls.add(call)
        try:
            with call.scope:
                async with pool.slots:
                    return await self._exchange(peer, pool, buffers, call)
        finally:
            pool.users -= 1
            self._calls.discard(call)
            if self._all_ended is not None and not self._calls:
                self._all_ended.set()
        why = "this transport was closed" if self._closed else f"time is up ({timeout_s:g} s)"
        if call.sending:
            raise CallLost(f"no reply from {peer}: {why}")
        raise NotConnected(f"no stream to {peer}: {why}")

    async def close(self) -> None:
        """End the calls under way and wait for them; refuse others; close all idle streams."""
        self._closed = True
        for call in self._calls:
            call.scope.cancel()
        for pool in self._pools.values():
            pool.close_idle(before=float("inf"))
        if self._calls:
            self._all_ended = anyio.Event()
            await self._all_ended.wait()

    async def keep_house(self) -> None:
        """Close pooled streams that nobody has used for a while, and forget empty pools."""
        while True:
            await anyio.sleep(self._tuning.idle_s / 4)
            for peer, pool in list(self._pools.items()):
                pool.close_idle(before=anyio.current_time() - self._tuning.idle_s)
                if not pool.idle and not pool.users:
                    del self._pools[peer]

    async def _exchange(
        self, peer: PeerId, pool: _Pool, buffers: list[bytes | memoryview], call: _Call
    ) -> Frame:
        stream = await self._send(peer, pool, buffers, call)
        reusable = False
        try:
            reply = await receive_frame(stream, self.limits)
            if reply is None:
                raise CallLost(f"no reply from {peer}: the stream was closed")
            reusable = not (stream.broken or reply.header.get("closing") or self._closed)
            return reply
        except StreamCut as cut:
            raise CallLost(f"no reply from {peer}: {cut}") from cut
        finally:
            if reusable:
                pool.idle.append(stream)
            else:
                stream.close()

    async def _send(
        self, peer: PeerId, pool: _Pool, buffers: list[bytes | memoryview], call: _Call
    ) -> Stream:
        """Send a request; returns the stream on which the reply will come, if any comes."""
        while True:
            stream = pool.take()
            is_new = stream is None
            if stream is None:
                stream = await self._open_stream(peer)
            call.sending = True
            try:
                await stream.write(buffers)
            except WriteCut as cut:
                if cut.sent == 0:
                    call.sending = False
                    stream.close()
                    if is_new:
                        raise NotConnected(f"no stream to {peer}: {cut}") from cut
                    continue
                stream.broken = True  # a refusal may have come before the end
            except BaseException:
                stream.close()
                raise
            return stream
