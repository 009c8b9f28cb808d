"""The parts of py-libp2p that we use, made safe. The only module that imports it. Needs trio.

Used are its keys, its noise handshake, its protocol negotiation, its yamux, and the messages of
identify and of the Kademlia lookup. Its ``Swarm`` and ``Host`` are not: in version 0.8.1 each
inbound connection keeps a task and one of a few hundred slots until the host ends; of a peer's TCP
addresses only one is dialled; a failed dial bars the peer for 60 s; an exception in the handler of
a stream ends the accept loop of its connection; and the security protocols accepted include
``plaintext``, under which anybody may claim any peer id.

What is mended here, in subclasses of yamux's two classes:

- A cancelled write left half a frame on the wire, which broke the connection. One task of the
  connection writes frames whole, whatever becomes of those who sent them.
- Whoever was cancelled while opening a stream left it behind with its slot, one of 256.
- What came on a stream after its reset was kept for a minute and more. It is dropped.
- Two sides that each answer a ping could wait for each other for good, none of them reading. The
  reading task queues what it sends, and goes on.
- A writer without credit looked every 10 ms and gave up after 5 s. It waits for an event.
- A reader gave up to 16 MiB of credit on each stream: now ``MAX_WINDOW_BYTES``, by half windows.
- A peer that sent beyond its credit was let go on. Its connection is ended.
- A peer that falls silent (a cable cut, a frozen process) was never noticed. A ping without an
  answer ends the connection, and so does a write that the system takes no byte of.
- A frame that came in more than 101 pieces was taken for the end of the connection.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import re
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import trio

import dht.protobufs  # noqa: F401  # before libp2p: see there

# isort: split
from libp2p.abc import IMultiselectCommunicator
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.exceptions import BaseLibp2pError
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError, IncompleteReadError
from libp2p.kad_dht.pb.kademlia_pb2 import Message as KadMessage
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import MULTISELECT_PROTOCOL_ID, Multiselect
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux import yamux
from libp2p.utils import encode_delim
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from peers.streams import StreamCut, WriteCut
from swarm.types import PeerId

__all__ = ["ID", "Connection", "Identify", "KadMessage", "Keys", "Refused", "Stream"]

VERSION = "0.8.1"
"""The one that was read and mended; another needs another look."""

UPGRADE_S = 10
"""How long a handshake, or the negotiation of one stream, may take."""
SILENCE_LIMIT_S = 30.0
STALL_LIMIT_S = 30.0
MAX_WINDOW_BYTES = 2 << 20
"""What a peer may send on one stream before we have read it: the bound of a stalled reader."""
MAX_FRAME_BYTES = 65519 - yamux.HEADER_SIZE
"""Of payload: with yamux's header just one noise message."""
QUEUED_FRAMES = 4
QUEUED_ANSWERS = 4096
"""Frames of at most ``SMALL_BYTES`` wait in line, but not for those that wait to stand in it."""
SMALL_BYTES = 1024
MAX_WORD_BYTES = 1024
MAX_STREAMS = 256
"""That one connection may have open towards us."""
LINGER_S = 10.0
"""How long a peer may take to read the last reply on a stream."""
_READ_BYTES = 1 << 18

logger = logging.getLogger(__name__)
logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # it prints an error whenever a peer leaves


class Refused(Exception):
    """A connection or a stream that did not come about; ``str(error)`` says why."""


def check_version() -> None:
    """Raise ImportError if another py-libp2p is installed than the one mended here."""
    found = importlib.metadata.version("libp2p")
    if found != VERSION:
        raise ImportError(
            f"libp2p {found} is installed, libp2p {VERSION} is needed; "
            f"pip install libp2p=={VERSION}"
        )


class Keys:
    """Who we are towards others: made of the 32-byte seed of an Ed25519 key."""

    def __init__(self, seed: bytes) -> None:
        pair = create_new_key_pair(seed)
        self.public_bytes: bytes = pair.public_key.serialize()
        self.peer: PeerId = ID.from_pubkey(pair.public_key).to_base58()
        self.noise = Noise(pair, create_noise_key_pair().private_key)


class _Wire(ReadWriteCloser):
    """A TCP stream whose ``read(n)`` gives n bytes, with few system calls."""

    def __init__(self, tcp: trio.SocketStream) -> None:
        self._tcp = tcp
        self._buffer = bytearray()
        self.heard_at = trio.current_time()
        """When the last byte came."""

    async def read(self, n: int | None = None) -> bytes:
        wanted = n or 1
        while len(self._buffer) < wanted:
            try:
                chunk = await self._tcp.receive_some(_READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ConnectionClosedError(str(error), transport="tcp") from error
            if not chunk:
                raise IncompleteReadError(
                    "the connection was closed",
                    expected_bytes=wanted,
                    received_bytes=len(self._buffer),
                )
            self._buffer += chunk
            self.heard_at = trio.current_time()
        data = bytes(memoryview(self._buffer)[:n])
        del self._buffer[: len(data)]
        return data

    async def write(self, data: bytes) -> None:
        try:
            await self._tcp.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(str(error), transport="tcp") from error

    async def close(self) -> None:
        await self._tcp.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


class _Words(IMultiselectCommunicator):
    """The words of a negotiation, of bounded length."""

    def __init__(self, read_writer: Any) -> None:
        self._read_writer = read_writer

    async def write(self, msg_str: str) -> None:
        try:
            await self._read_writer.write(encode_delim(msg_str.encode()))
        except BaseLibp2pError as error:
            raise MultiselectCommunicatorError(str(error)) from error

    async def read(self) -> str:
        try:
            word = await read_varint_prefixed_bytes_limited(self._read_writer, MAX_WORD_BYTES)
            return word.decode().removesuffix("\n")
        except (BaseLibp2pError, UnicodeDecodeError) as error:
            raise MultiselectCommunicatorError(str(error)) from error

    async def select(self, protocol: str) -> None:
        """Ask for ``protocol``, in one round trip. Raises Refused."""
        handshake = encode_delim(MULTISELECT_PROTOCOL_ID.encode())
        await self._read_writer.write(handshake + encode_delim(protocol.encode()))
        greeting, answer = await self.read(), await self.read()
        if greeting != MULTISELECT_PROTOCOL_ID or answer != protocol:
            raise Refused(f"the peer does not serve {protocol}")

    async def offer(self, protocols: Iterable[str]) -> str:
        """Let the other side choose one of ``protocols``."""
        offered: dict[Any, Any] = dict.fromkeys(protocols)
        chosen, _ = await Multiselect(offered).negotiate(self, UPGRADE_S)
        return str(chosen)


class _Stream(yamux.YamuxStream):
    """A yamux stream whose writers wait for an event, and whose reader gives bounded credit."""

    def __init__(self, stream_id: int, conn: yamux.Yamux, is_initiator: bool) -> None:
        self.changed = trio.Event()
        super().__init__(stream_id, conn, is_initiator)

    @property
    def send_window(self) -> int:
        return self._send_window

    @send_window.setter
    def send_window(self, value: int) -> None:
        self._send_window = value
        self.changed.set()

    @property
    def recv_window(self) -> int:
        return self._recv_window

    @recv_window.setter
    def recv_window(self, value: int) -> None:
        self._recv_window = value
        if value < 0:  # yamux would warn, and go on to take whatever comes
            self.conn.event_shutting_down.set()

    @property
    def reset_received(self) -> bool:
        return self._reset_received

    @reset_received.setter
    def reset_received(self, value: bool) -> None:
        self._reset_received = value
        if value and (buffer := self.conn.stream_buffers.get(self.stream_id)):
            buffer.clear()  # else it would be kept for a reader that may never come

    @property
    def closed(self) -> bool:
        return self._closed

    @closed.setter
    def closed(self, value: bool) -> None:
        self._closed = value
        self.changed.set()

    async def room(self) -> int:
        """How many bytes may be sent now: at least one, or 0 once nothing can be sent any more."""
        while not (self._closed or self.send_closed):
            if self._send_window > 0:
                return self._send_window
            self.changed = trio.Event()
            await self.changed.wait()
        return 0

    async def write(self, data: bytes) -> None:
        while data:
            count = min(await self.room(), MAX_FRAME_BYTES, len(data))
            if count == 0:
                raise yamux.MuxedStreamReset("the stream has ended")
            await self.send([data[:count]], count)
            data = data[count:]

    async def send(self, parts: Sequence[bytes | memoryview], count: int) -> None:
        """One frame of ``count`` bytes in all, for which there is room."""
        self._send_window -= count
        header = struct.pack(
            yamux.YAMUX_HEADER_FORMAT, 0, yamux.TYPE_DATA, 0, self.stream_id, count
        )
        await self.conn._write_frame(b"".join((header, *parts)))

    async def reset(self) -> None:
        try:
            await super().reset()
        finally:
            with trio.CancelScope(shield=True):
                await self.conn.forget(self)  # type: ignore[attr-defined]

    async def _auto_tune_and_send_window_update(self, *, bytes_read: int = 0) -> None:
        """Give back what was read once it is half a window, and twice that if it went quickly.

        As go-yamux does: a window that is used up within four round trips is too small.
        """
        self._pending_recv_release += bytes_read
        if self._pending_recv_release < self.target_recv_window // 2:
            return
        credit, self._pending_recv_release = self._pending_recv_release, 0
        now = trio.current_time()
        if now - self.epoch_start < 4 * self._effective_rtt():
            grown = min(2 * self.target_recv_window, MAX_WINDOW_BYTES)
            credit += grown - self.target_recv_window
            self.target_recv_window = grown
        self.epoch_start = now
        self.recv_window += credit
        await self.send_window_update(credit)


class _Muxer(yamux.Yamux):
    """A yamux connection with a task that writes, and an end to silence."""

    def __init__(self, secured: Any, peer: ID, wire: _Wire) -> None:
        super().__init__(secured, peer, is_initiator=secured.is_initiator)
        self.wire = wire
        self._frames: deque[bytes] = deque()
        self._has_frames = trio.Event()
        self._waiting = trio.lowlevel.ParkingLot()
        self._reading_task: trio.lowlevel.Task | None = None

    @property
    def inbound(self) -> int:
        """How many streams there are that the peer opened."""
        return len(self.streams) - (self.stream_backlog_limit - self.stream_backlog_semaphore.value)

    async def open_stream(self) -> _Stream:
        """A new stream. Raises MuxedStreamError or ConnectionClosedError."""
        await self.stream_backlog_semaphore.acquire()
        if self.event_shutting_down.is_set():
            self.stream_backlog_semaphore.release()
            raise yamux.MuxedStreamError("the connection has ended")
        stream = _Stream(self.next_stream_id, self, is_initiator=True)
        self.next_stream_id += 2
        stream._owns_backlog_slot = True
        self.streams[stream.stream_id] = stream
        self.stream_buffers[stream.stream_id] = bytearray()
        self.stream_events[stream.stream_id] = trio.Event()
        syn = (0, yamux.TYPE_WINDOW_UPDATE, yamux.FLAG_SYN, stream.stream_id, 0)
        try:
            await self._write_frame(struct.pack(yamux.YAMUX_HEADER_FORMAT, *syn))
        except BaseException:
            with trio.CancelScope(shield=True):
                await self.forget(stream)
            raise
        return stream

    async def forget(self, stream: _Stream) -> None:
        """Free the slot of a stream that has ended both ways, and what came and was not read."""
        async with self.streams_lock:
            if self.streams.get(stream.stream_id, stream) is stream:
                self.stream_buffers.pop(stream.stream_id, None)
                self._finalize_stream_locked(stream, fully_closed=True)

    async def _write_frame(self, data: bytes) -> None:
        """Queue a frame. Raises ConnectionClosedError once the connection has ended."""
        if trio.lowlevel.current_task() is self._reading_task:
            if len(self._frames) > QUEUED_ANSWERS:
                self.event_shutting_down.set()
                raise ConnectionClosedError("the peer asks, and reads no answer", transport="tcp")
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
            most = QUEUED_ANSWERS // 2 if len(data) <= SMALL_BYTES else QUEUED_FRAMES
            while len(self._frames) >= most and not self.event_shutting_down.is_set():
                await self._waiting.park()
        if self.event_shutting_down.is_set():
            raise ConnectionClosedError("the connection has ended", transport="tcp")
        self._frames.append(data)
        self._has_frames.set()

    async def _write_queued(self) -> None:
        try:
            while True:
                if not self._frames:
                    self._has_frames = trio.Event()
                    await self._has_frames.wait()
                with trio.fail_after(STALL_LIMIT_S):
                    await self.secured_conn.write(self._next_frames())
        except (BaseLibp2pError, OSError, trio.TooSlowError):
            await self._cleanup_on_error()

    def _next_frames(self) -> bytes:
        """One frame, and those after it that fit into the same noise message."""
        batch = [self._frames.popleft()]
        left = MAX_FRAME_BYTES + yamux.HEADER_SIZE - len(batch[0])
        while self._frames and len(self._frames[0]) <= left:
            batch.append(self._frames.popleft())
            left -= len(batch[-1])
        self._waiting.unpark(count=len(batch))
        return batch[0] if len(batch) == 1 else b"".join(batch)

    async def _handle_incoming_with_ready_signal(
        self, task_status: Any = trio.TASK_STATUS_IGNORED
    ) -> None:
        assert self._nursery is not None
        self._reading_task = trio.lowlevel.current_task()
        self._nursery.start_soon(self._write_queued)
        await super()._handle_incoming_with_ready_signal(task_status)

    async def _measure_rtt_loop(self) -> None:
        """Ping the peer now and then, and end the connection if it is silent for long."""
        while True:
            self._ping_id += 1
            self._ping_event = trio.Event()
            self._ping_sent_time = trio.current_time()
            ping = (0, yamux.TYPE_PING, yamux.FLAG_SYN, 0, self._ping_id)
            with trio.move_on_after(SILENCE_LIMIT_S) as limit:
                try:
                    await self._write_frame(struct.pack(yamux.YAMUX_HEADER_FORMAT, *ping))
                except ConnectionClosedError:
                    return
                await self._ping_event.wait()
            silence_s = trio.current_time() - self.wire.heard_at
            if limit.cancelled_caught and silence_s >= SILENCE_LIMIT_S:
                await self._cleanup_on_error()
                return
            await trio.sleep(SILENCE_LIMIT_S / 3)

    async def _cleanup_on_error(self) -> None:
        streams: list[Any] = list(self.streams.values())
        await super()._cleanup_on_error()
        for stream in streams:
            stream.changed.set()
        self._waiting.unpark_all()


yamux.YamuxStream = _Stream  # type: ignore[misc]  # Yamux makes its streams under this name
yamux.MAX_WINDOW_SIZE = MAX_WINDOW_BYTES  # and takes no longer frames than this


class Stream:
    """One stream of a connection, as ``peers.streams.Stream`` says. Needs trio."""

    def __init__(
        self, muxed: _Stream, peer: PeerId, nursery: trio.Nursery, *, is_ours: bool
    ) -> None:
        self.peer = peer
        self._is_ours = is_ours
        self.progress_at = trio.current_time()
        self.underway = False
        self.broken = False
        self._muxed = muxed
        self._muxer = muxed.conn
        self._nursery = nursery
        self._is_open = True

    async def fill(self, view: memoryview) -> int:
        filled, total = 0, view.nbytes
        muxed, muxer = self._muxed, self._muxer
        while filled < total:
            buffer = muxer.stream_buffers.get(muxed.stream_id)
            if buffer:
                count = min(len(buffer), total - filled)
                with memoryview(buffer) as source:
                    view[filled : filled + count] = source[:count]
                del buffer[:count]
                filled += count
                self.underway = True
                self.progress_at = trio.current_time()
                with contextlib.suppress(BaseLibp2pError):  # what has come can still be read
                    await muxed._auto_tune_and_send_window_update(bytes_read=count)
            elif muxed.reset_received:
                raise StreamCut("cut: the stream was reset")
            elif buffer is None or muxed.recv_closed or muxed.closed:
                break
            else:
                await muxer.stream_events[muxed.stream_id].wait()
                if muxed.stream_id in muxer.stream_events:
                    muxer.stream_events[muxed.stream_id] = trio.Event()
        return filled

    async def read(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        filled = await self.fill(memoryview(data))
        if filled < nbytes:
            raise StreamCut(f"cut: the stream ended after {filled} of {nbytes} bytes")
        return data

    async def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        pending = deque(memoryview(buffer) for buffer in buffers)
        sent = 0
        self.underway = True
        self.progress_at = trio.current_time()
        while pending:
            room = min(await self._muxed.room(), MAX_FRAME_BYTES)
            if room == 0:
                raise WriteCut("cut: the stream was closed by the other side", sent)
            parts = _take(pending, room)
            count = sum(part.nbytes for part in parts)
            try:
                await self._muxed.send(parts, count)
            except BaseLibp2pError as error:
                raise WriteCut(f"cut: {error}", sent) from error
            sent += count
            self.progress_at = trio.current_time()
        self.underway = False

    def is_silent(self) -> bool:
        muxed = self._muxed
        buffer = self._muxer.stream_buffers.get(muxed.stream_id)
        return buffer is not None and not (buffer or muxed.recv_closed or muxed.closed)

    def close(self) -> None:
        """Both ways; the peer is told in the background.

        Who answered on a stream lets the peer read to the end. In all other cases the stream is
        reset, which stops what is under way.
        """
        if self._is_open:
            self._is_open = False
            is_complete = not (self._is_ours or self.underway or self.broken)
            # A nursery that is closed has no peers left to tell.
            with contextlib.suppress(RuntimeError):
                self._nursery.start_soon(self._finish if is_complete else self._reset)

    async def _finish(self) -> None:
        scrap = memoryview(bytearray(1 << 12))
        with trio.move_on_after(LINGER_S), contextlib.suppress(BaseLibp2pError, StreamCut):
            await self._muxed.close()
            while await self.fill(scrap):
                pass
        await self._reset()

    async def _reset(self) -> None:
        with contextlib.suppress(BaseLibp2pError):
            await self._muxed.reset()


def _take(pending: deque[memoryview], room: int) -> list[memoryview]:
    """Up to ``room`` bytes from the front of ``pending``, which loses them."""
    parts = []
    while pending and room:
        first = pending.popleft()
        if first.nbytes > room:
            pending.appendleft(first[room:])
            first = first[:room]
        parts.append(first)
        room -= first.nbytes
    return parts


StreamHandler = Callable[[Stream], Awaitable[None]]


class Connection:
    """A secured connection to ``peer``. Made by ``secure``; ``run`` must be under way to use it."""

    def __init__(self, muxer: _Muxer, peer: PeerId, nursery: trio.Nursery) -> None:
        self.peer = peer
        self._muxer = muxer
        self._nursery = nursery
        self._doubted_at = float("-inf")

    @classmethod
    async def secure(
        cls, tcp: trio.SocketStream, keys: Keys, nursery: trio.Nursery, peer: PeerId | None = None
    ) -> Connection:
        """Shake hands on ``tcp``: with ``peer`` if we dialled it, or as the side that was dialled.

        Raises:
            Refused: with what went wrong; ``tcp`` is closed. Streams need ``nursery`` to end.
        """
        bare = _Wire(tcp)
        wire = RawConnection(bare, peer is not None)
        try:
            with trio.fail_after(UPGRADE_S):
                secured: Any
                if peer is not None:
                    await _Words(wire).select(NOISE)
                    secured = await keys.noise.secure_outbound(wire, ID.from_base58(peer))
                    await _Words(secured).select(yamux.PROTOCOL_ID)
                else:
                    await _Words(wire).offer([NOISE])
                    secured = await keys.noise.secure_inbound(wire)
                    await _Words(secured).offer([yamux.PROTOCOL_ID])
            muxer = _Muxer(secured, secured.get_remote_peer(), bare)
            return cls(muxer, secured.get_remote_peer().to_base58(), nursery)
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(tcp)
            if isinstance(error, trio.TooSlowError):
                raise Refused(f"no handshake within {UPGRADE_S:g} s") from error
            if isinstance(error, PeerIDMismatchesPubkey):
                found = re.search(r"remote_peer_id_from_pubkey=(\w+)", str(error))
                who = f"another peer, {found[1]}," if found else "another peer"
                raise Refused(f"{who} answers") from error
            if isinstance(error, Exception):  # of the libraries below: whatever was sent to them
                raise Refused(str(error) or type(error).__name__) from error
            raise

    @property
    def is_open(self) -> bool:
        return not self._muxer.event_shutting_down.is_set()

    @property
    def answers(self) -> bool:
        """Whether it is open, and something has come since a stream was opened in vain."""
        return self.is_open and self._muxer.wire.heard_at > self._doubted_at

    @property
    def is_unused(self) -> bool:
        """Whether there is no stream on it."""
        return not self._muxer.streams

    async def run(self, handlers: dict[str, StreamHandler]) -> None:
        """Take the streams that the peer opens, until the connection ends.

        A handler is not cancelled then: it finds its stream cut.
        """
        async with trio.open_nursery() as tasks:
            tasks.start_soon(self._muxer.start)
            try:
                while True:
                    muxed: Any = await self._muxer.accept_stream()
                    if self._muxer.inbound > MAX_STREAMS:
                        await muxed.reset()  # here, so that whoever opens faster has to wait
                    else:
                        self._nursery.start_soon(self._serve, muxed, handlers)
            except BaseLibp2pError:
                pass
            finally:
                with trio.CancelScope(shield=True):
                    await self._muxer._cleanup_on_error()
            tasks.cancel_scope.cancel()

    async def open_stream(self, protocol: str) -> Stream:
        """Raises Refused: nobody got anything."""
        muxed: Any = None
        began_at = trio.current_time()
        try:
            with trio.fail_after(UPGRADE_S):
                await self._muxer.event_started.wait()
                muxed = await self._muxer.open_stream()
                stream = Stream(muxed, self.peer, self._nursery, is_ours=True)
                await _Words(muxed).select(protocol)
            return stream
        except BaseException as error:
            if muxed is not None:
                self._nursery.start_soon(muxed.reset)
            if isinstance(error, trio.TooSlowError):
                self._doubted_at = began_at
                raise Refused(f"no answer within {UPGRADE_S:g} s") from error
            if isinstance(error, BaseLibp2pError):
                raise Refused(str(error) or type(error).__name__) from error
            raise

    async def close(self) -> None:
        await self._muxer._cleanup_on_error()

    async def _serve(self, muxed: _Stream, handlers: dict[str, StreamHandler]) -> None:
        stream = Stream(muxed, self.peer, self._nursery, is_ours=False)
        try:
            with trio.fail_after(UPGRADE_S):
                protocol = await _Words(muxed).offer(handlers)
            if handler := handlers.get(protocol):  # it may have been withdrawn meanwhile
                await handler(stream)
        except (BaseLibp2pError, trio.TooSlowError, StreamCut):
            pass
        except Exception as error:  # one bad stream must not end the others
            logger.error("a stream of %s ended: %s: %s", self.peer, type(error).__name__, error)
            logger.debug("where it came from", exc_info=error)
        finally:
            stream.close()
