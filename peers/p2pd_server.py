"""The serving side of the p2pd transport: streams that other peers opened, one call at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter

import anyio

import dht.protobufs  # noqa: F401  # before hivemind: see there

# isort: split
from hivemind.p2p import PeerID
from hivemind.proto import p2pd_pb2

from peers import wire
from peers.p2pd_daemon import Daemon, read_delimited
from peers.p2pd_streams import SocketStream, StreamCut, Tuning, receive_frame, send_frame
from peers.transport import Frame, Handler, answer, refusal
from swarm.errors import BadFrame
from swarm.types import PeerId

logger = logging.getLogger(__name__)

BACKLOG = 128
ACCEPT_PAUSE_S = 0.2


class StreamServer:
    """Answers calls on the streams that p2pd brings; refuses streams beyond the bounds."""

    PROTOCOL = f"/swarm/call/{wire.VERSION}"

    def __init__(self, daemon: Daemon, limits: wire.Limits, tuning: Tuning) -> None:
        self._daemon = daemon
        self.limits = limits
        self._tuning = tuning
        self._handler: Handler | None = None
        self._streams: dict[asyncio.Task[None], SocketStream] = {}
        self._per_peer: Counter[PeerId] = Counter()
        self._own_tasks: list[asyncio.Task[None]] = []
        self._listener: socket.socket | None = None

    async def start(self, handler: Handler) -> None:
        """Listen on a socket in the daemon's folder and have p2pd bring streams there.

        Once it listens, only the handler is replaced.
        """
        self._handler = handler
        if self._listener is not None:
            return
        path = str(self._daemon.folder / "streams.sock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._own_tasks = [
            asyncio.create_task(self._accept(self._listener)),
            asyncio.create_task(self._end_stalled()),
        ]
        await self._daemon.register(self.PROTOCOL, path)

    async def stop(self) -> None:
        """End all streams and the handlers that run for them."""
        tasks = [*self._own_tasks, *self._streams]
        for task in tasks:
            task.cancel()
        ours = [task for task in tasks if task is not asyncio.current_task()]
        await asyncio.gather(*ours, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # no file number is free, say; one will be
                logger.error("a stream could not be taken: %s", error.strerror)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._streams) >= self._tuning.inbound_streams:
                logger.warning("stream refused: %d are open, the most allowed", len(self._streams))
                sock.close()
                continue
            stream = SocketStream(sock)
            task = asyncio.create_task(self._serve(stream))
            self._streams[task] = stream
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._streams.pop(task).close()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a stream ended: %s: %s", type(error).__name__, error)

    async def _end_stalled(self) -> None:
        limit_s = self._tuning.progress_s
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(limit_s / 4)
            for task, stream in self._streams.items():
                if stream.underway and loop.time() - stream.progress_at > limit_s:
                    logger.debug("stream of %s ended: stalled in a message", stream.peer)
                    task.cancel()

    async def _serve(self, stream: SocketStream) -> None:
        with contextlib.suppress(StreamCut):
            info = p2pd_pb2.StreamInfo.FromString(await read_delimited(stream))
            stream.peer = PeerID(info.peer).to_base58()
            stream.underway = False
            if self._per_peer[stream.peer] >= self._tuning.inbound_streams_per_peer:
                logger.warning("stream refused: %s has too many", stream.peer)
                return
            self._per_peer[stream.peer] += 1
            try:
                while await self._serve_call(stream):
                    pass
            finally:
                self._per_peer[stream.peer] -= 1
                if not self._per_peer[stream.peer]:
                    del self._per_peer[stream.peer]

    async def _serve_call(self, stream: SocketStream) -> bool:
        """Serve one call; whether another may follow on this stream."""
        assert self._handler is not None
        try:
            request = await receive_frame(stream, self.limits)
        except BadFrame as error:
            await self._refuse(stream, error)
            return False
        if request is None:
            return False
        reply = await answer(self._handler, stream.peer, request)
        del request
        try:
            await send_frame(stream, reply, self.limits)
        except BadFrame as error:
            await send_frame(stream, refusal(f"internal error: reply: {error}"), self.limits)
        return True

    async def _refuse(self, stream: SocketStream, error: BadFrame) -> None:
        header = {**refusal(str(error)).header, "closing": True}
        await send_frame(stream, Frame(header), self.limits)
        # Its sender may still be writing, and would not get to see the refusal.
        scrap = memoryview(bytearray(1 << 16))
        with anyio.move_on_after(self._tuning.discard_s):
            while await stream.fill(scrap) == scrap.nbytes:
                pass
