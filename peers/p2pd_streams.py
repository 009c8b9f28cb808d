"""Streams over the unix sockets that p2pd hands out. Needs asyncio.

p2pd gives every libp2p stream to us as a unix socket. asyncio's StreamReader and StreamWriter would
copy each payload twice more, so the sockets are read and written directly from the event loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from peers.streams import StreamCut, WriteCut
from swarm.types import PeerId

SOCKET_BUFFER_BYTES = 1 << 20
MAX_SCATTER = 64
"""Buffers per system call; the kernel takes up to 1024."""


class SocketStream:
    """A non-blocking stream socket of ``peer`` with exact reads and scatter writes.

    One task at a time may read or write. ``close`` before the socket is garbage: an operation that
    was cancelled leaves the stream unusable.
    """

    def __init__(self, sock: socket.socket, peer: PeerId = "") -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self.peer = peer
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self.progress_at = self._loop.time()
        """When the last byte came or went, by the loop's clock."""
        self.underway = False
        """Whether a message has begun to come or go and is not complete."""
        self.broken = False
        """Whether a write failed: what came before may be read, nothing more can be sent."""

    @classmethod
    async def dial(cls, path: str) -> SocketStream:
        """A stream to the unix socket at ``path``. Raises StreamCut if nobody listens."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream = cls(sock)
        try:
            await stream._loop.sock_connect(sock, path)
        except OSError as error:
            stream.close()
            raise StreamCut(f"does not answer: {error.strerror}") from error
        except BaseException:
            stream.close()
            raise
        return stream

    async def fill(self, view: memoryview) -> int:
        """Read until ``view`` is full or the stream ends; returns the number of bytes read."""
        filled, total = 0, view.nbytes

        def pull() -> bool:
            nonlocal filled
            got = self._sock.recv_into(view[filled:])
            filled += got
            self.underway = True
            return filled == total or got == 0

        if total:
            await self._repeat(pull, self._loop.add_reader, self._loop.remove_reader)
        return filled

    async def read(self, nbytes: int) -> bytearray:
        """Exactly ``nbytes`` bytes. Raises StreamCut if the stream ends before."""
        data = bytearray(nbytes)
        filled = await self.fill(memoryview(data))
        if filled < nbytes:
            raise StreamCut(f"cut: the stream ended after {filled} of {nbytes} bytes")
        return data

    async def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Write all ``buffers`` (flat bytes), not joined.

        Raises:
            WriteCut: the other side is gone; ``sent`` has how many bytes went before.
        """
        pending = [memoryview(buffer) for buffer in buffers]
        sent = 0
        self.underway = True
        self.progress_at = self._loop.time()

        def push() -> bool:
            nonlocal sent
            count = self._sock.sendmsg(pending[:MAX_SCATTER])
            sent += count
            while pending and count >= pending[0].nbytes:
                count -= pending.pop(0).nbytes
            if count:
                pending[0] = pending[0][count:]
            return not pending

        try:
            await self._repeat(push, self._loop.add_writer, self._loop.remove_writer)
        except StreamCut as cut:
            raise WriteCut(str(cut), sent) from cut
        self.underway = False

    def is_silent(self) -> bool:
        """Whether nothing waits to be read: neither bytes nor the end of the stream."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            # Else the loop would go on watching a file number that others get next.
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    async def _repeat(
        self,
        step: Callable[[], bool],
        watch: Callable[..., object],
        unwatch: Callable[..., object],
    ) -> None:
        """Call ``step`` whenever the socket is ready, until it returns True."""
        try:
            if step():
                self.progress_at = self._loop.time()
                return
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            raise StreamCut(f"cut: {error.strerror}") from error
        finished = self._loop.create_future()

        def on_ready() -> None:
            if finished.done():
                return
            try:
                if step():
                    finished.set_result(None)
                self.progress_at = self._loop.time()
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                finished.set_exception(StreamCut(f"cut: {error.strerror}"))

        # By number: where a number is new, the loop writes an error message with the name of what
        # it was given, and that of a socket costs as much as all the rest.
        watch(self._sock.fileno(), on_ready)
        try:
            await finished
        finally:
            if self._sock.fileno() >= 0:
                unwatch(self._sock.fileno())
