"""The serving side of a transport on streams that others opened: one call at a time on each.

Runs on asyncio and on trio.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter

import anyio

from peers import wire
from peers.streams import Stream, StreamCut, Tuning, receive_frame, send_frame
from peers.transport import Frame, Handler, answer, refusal
from swarm.errors import BadFrame
from swarm.types import PeerId

logger = logging.getLogger(__name__)

PROTOCOL = f"/swarm/call/{wire.VERSION}"
"""The name under which peers open streams for calls."""


class StreamServer:
    """Answers calls with ``handler``; refuses streams beyond the bounds, ends those that stall."""

    def __init__(self, limits: wire.Limits, tuning: Tuning) -> None:
        self.limits = limits
        self.handler: Handler | None = None
        self._tuning = tuning
        self._streams: dict[Stream, anyio.CancelScope] = {}
        self._per_peer: Counter[PeerId] = Counter()

    def is_full(self) -> bool:
        """Whether no stream can be served more; said in the log, since one is refused then."""
        if len(self._streams) < self._tuning.inbound_streams:
            return False
        logger.warning("stream refused: %d are open, the most allowed", len(self._streams))
        return True

    async def serve(self, stream: Stream) -> None:
        """Answer the calls on ``stream`` until it ends; the caller closes it."""
        if self.is_full():
            return
        if self._per_peer[stream.peer] >= self._tuning.inbound_streams_per_peer:
            logger.warning("stream refused: %s has too many", stream.peer)
            return
        self._per_peer[stream.peer] += 1
        scope = self._streams[stream] = anyio.CancelScope()
        try:
            with scope, contextlib.suppress(StreamCut):
                while await self._serve_call(stream):
                    pass
        finally:
            del self._streams[stream]
            self._per_peer[stream.peer] -= 1
            if not self._per_peer[stream.peer]:
                del self._per_peer[stream.peer]

    async def end_stalled(self) -> None:
        """Forever: end the streams on which no byte came or went for long, inside a message."""
        limit_s = self._tuning.progress_s
        while True:
            await anyio.sleep(limit_s / 4)
            for stream, scope in self._streams.items():
                if stream.underway and anyio.current_time() - stream.progress_at > limit_s:
                    logger.debug("stream of %s ended: stalled in a message", stream.peer)
                    scope.cancel()

    async def _serve_call(self, stream: Stream) -> bool:
        """Serve one call; whether another may follow on this stream."""
        assert self.handler is not None
        try:
            request = await receive_frame(stream, self.limits)
        except BadFrame as error:
            await self._refuse(stream, error)
            return False
        if request is None:
            return False
        reply = await answer(self.handler, stream.peer, request)
        del request
        try:
            await send_frame(stream, reply, self.limits)
        except BadFrame as error:
            await send_frame(stream, refusal(f"internal error: reply: {error}"), self.limits)
        return True

    async def _refuse(self, stream: Stream, error: BadFrame) -> None:
        header = {**refusal(str(error)).header, "closing": True}
        await send_frame(stream, Frame(header), self.limits)
        # Its sender may still be writing, and would not get to see the refusal.
        scrap = memoryview(bytearray(1 << 16))
        with anyio.move_on_after(self._tuning.discard_s):
            while await stream.fill(scrap) == scrap.nbytes:
                pass
        stream.underway = False  # so that it is closed in order: the refusal may not be read yet
