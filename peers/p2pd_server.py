"""Where p2pd brings the streams that other peers opened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import anyio

from dht.hivemind_p2p import PeerID, p2pd_pb2
from peers import wire
from peers.p2pd_daemon import MAX_REPLY_BYTES, Daemon
from peers.p2pd_streams import SocketStream
from peers.stream_server import PROTOCOL, StreamServer
from peers.streams import StreamCut, Tuning, read_delimited
from peers.transport import Handler

logger = logging.getLogger(__name__)

BACKLOG = 128
ACCEPT_PAUSE_S = 0.2


class P2pdServer:
    """Serves the streams that p2pd connects to our socket."""

    def __init__(self, daemon: Daemon, limits: wire.Limits, tuning: Tuning) -> None:
        self.streams = StreamServer(limits, tuning)
        self._daemon = daemon
        self._tuning = tuning
        self._tasks: set[asyncio.Task[None]] = set()
        self._own_tasks: list[asyncio.Task[None]] = []
        self._listener: socket.socket | None = None

    async def start(self, handler: Handler) -> None:
        """Listen on a socket in the daemon's folder and have p2pd bring streams there.

        Once it listens, only the handler is replaced.
        """
        self.streams.handler = handler
        if self._listener is not None:
            return
        path = str(self._daemon.folder / "streams.sock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._own_tasks = [
            asyncio.create_task(self._accept(self._listener)),
            asyncio.create_task(self.streams.end_stalled()),
        ]
        await self._daemon.register(PROTOCOL, path)

    async def stop(self) -> None:
        """End all streams and the handlers that run for them."""
        tasks = [*self._own_tasks, *self._tasks]
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
            if self.streams.is_full():
                sock.close()
                continue
            task = asyncio.create_task(self._serve(SocketStream(sock)))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a stream ended: %s: %s", type(error).__name__, error)

    async def _serve(self, stream: SocketStream) -> None:
        with contextlib.closing(stream), contextlib.suppress(StreamCut):
            with anyio.move_on_after(self._tuning.progress_s) as limit:
                info = p2pd_pb2.StreamInfo.FromString(await read_delimited(stream, MAX_REPLY_BYTES))
            if limit.cancelled_caught:
                return
            stream.peer = PeerID(info.peer).to_base58()
            stream.underway = False
            await self.streams.serve(stream)
