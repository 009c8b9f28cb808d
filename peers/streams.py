"""Frames on streams, of whatever kind: scatter writes, reads into aligned memory.

A stream carries one call at a time and is never half-closed; whatever goes wrong in a call ends
its stream. The end of a stream inside a message is how a dead peer shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from peers import wire
from peers.transport import Frame
from swarm.types import PeerId

PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Tuning:
    """Bounds of a transport on streams; the defaults suit a node.

    Args:
        streams_per_peer: open to one peer at most; a call beyond waits for one.
        inbound_streams: served at once; those beyond are refused.
        inbound_streams_per_peer: the same for one peer.
        idle_s: seconds after which a stream that we opened and do not use is closed.
        progress_s: seconds without a byte inside a message after which a caller is dropped.
        discard_s: seconds for which the rest of a refused frame is read and thrown away.
        startup_s: seconds that p2pd may take to start.
    """

    streams_per_peer: int = 16
    inbound_streams: int = 512
    inbound_streams_per_peer: int = 64
    idle_s: float = 60.0
    progress_s: float = 30.0
    discard_s: float = 5.0
    startup_s: float = 60.0


class StreamCut(Exception):
    """The stream ended inside a message, or could not be written."""


class WriteCut(StreamCut):
    """A write failed after ``sent`` bytes were taken by the system."""

    def __init__(self, reason: str, sent: int) -> None:
        super().__init__(reason)
        self.sent = sent


class Stream(Protocol):
    """A stream of bytes both ways with ``peer``; one task at a time may read or write.

    An operation that was cancelled leaves it unusable: ``close`` it then.
    """

    peer: PeerId
    progress_at: float
    """When the last byte came or went, by ``anyio.current_time()``."""
    underway: bool
    """Whether a message has begun to come or go and is not complete."""
    broken: bool
    """Whether a write failed: what came before may be read, nothing more can be sent."""

    async def fill(self, view: memoryview) -> int:
        """Read until ``view`` is full or the stream ends; returns the number of bytes read.

        Raises:
            StreamCut: the stream was cut, not ended.
        """
        ...

    async def read(self, nbytes: int) -> bytearray:
        """Exactly ``nbytes`` bytes. Raises StreamCut if the stream ends before."""
        ...

    async def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Write all ``buffers`` (flat bytes), not joined.

        Raises:
            WriteCut: the other side is gone; ``sent`` has how many bytes went before.
        """
        ...

    def is_silent(self) -> bool:
        """Whether nothing waits to be read: neither bytes nor the end of the stream."""
        ...

    def close(self) -> None:
        """End the stream both ways, at once. Again does nothing."""
        ...


async def send_frame(stream: Stream, frame: Frame, limits: wire.Limits) -> None:
    """Raises BadFrame (nothing was sent) or WriteCut."""
    await stream.write([wire.encode_head(frame, limits), *wire.payload_parts(frame)])


async def receive_frame(stream: Stream, limits: wire.Limits) -> Frame | None:
    """The next frame, or None if the stream ended between two frames.

    Raises:
        BadFrame: as ``peers.wire`` says; nothing more can be read from the stream.
        StreamCut: the stream ended inside the frame.
    """
    prefix = bytearray(wire.PREFIX_BYTES)
    filled = await stream.fill(memoryview(prefix))
    if filled == 0:
        return None
    if filled < wire.PREFIX_BYTES:
        raise StreamCut(f"cut: the stream ended after {filled} bytes of a prefix")
    lengths = wire.decode_prefix(prefix, limits)
    header = wire.decode_header(await stream.read(lengths.header_bytes))
    if lengths.payload_bytes == 0:
        stream.underway = False
        return Frame(header)
    payload = wire.aligned_buffer(lengths.payload_bytes)
    filled = await stream.fill(payload)
    if filled < lengths.payload_bytes:
        raise StreamCut(f"cut: {filled} of {lengths.payload_bytes} payload bytes came")
    stream.underway = False
    return Frame(header, (payload,))


def delimited(message: bytes) -> bytes:
    """``message`` with its length before it, as a varint."""
    out = bytearray()
    length = len(message)
    while length > 0x7F:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    return bytes(out) + message


async def read_delimited(stream: Stream, limit: int) -> bytes:
    """The next message of a stream, its length before it. Raises StreamCut; also if too long."""
    length = shift = 0
    while True:
        (byte,) = await stream.read(1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if length > limit or shift > 63:
            raise StreamCut(f"cut: a message of more than {limit} bytes")
        if byte < 0x80:
            break
    message = bytearray()
    while len(message) < length:  # memory is taken as bytes come, not as they are announced
        message += await stream.read(min(length - len(message), PIECE_BYTES))
    return bytes(message)
