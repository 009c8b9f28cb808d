"""Framing: how one message becomes bytes, and how bytes from anyone become a message or an error.

    prefix    17 bytes, little-endian: magic "SWRM", u8 version, u32 header and u64 payload length
    header    msgpack map with string keys; no extension types; bounded length and depth
    payload   raw bytes

The prefix is checked against ``Limits`` before any memory is taken for what it announces.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from peers.transport import Frame
from swarm.errors import BadFrame

MAGIC = b"SWRM"
VERSION = 2
ALIGNMENT = 64
MAX_DEPTH = 16
"""How deep maps and lists of a header may be nested; the header itself is level 1."""

_PREFIX = struct.Struct("<4sBIQ")
PREFIX_BYTES = _PREFIX.size
_SCALARS = (str, bytes, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Limits:
    """The longest header and payload, in bytes, that we send or take."""

    header_bytes: int = 1 << 16
    payload_bytes: int = 1 << 30


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Prefix:
    """The lengths, in bytes, of what follows a prefix."""

    header_bytes: int
    payload_bytes: int


def encode_head(frame: Frame, limits: Limits) -> bytes:
    """Prefix and header of ``frame``; ``payload_parts(frame)`` follow it on the wire.

    Raises:
        BadFrame: the header is not what ``decode_header`` accepts, or something is too long.
    """
    _check_map(frame.header)
    try:
        header = msgpack.packb(dict(frame.header), use_bin_type=True)
    except (ValueError, OverflowError) as error:
        raise BadFrame(f"header: {error}") from error
    prefix = Prefix(len(header), frame.payload_bytes)
    _check_lengths(prefix, limits)
    return _PREFIX.pack(MAGIC, VERSION, prefix.header_bytes, prefix.payload_bytes) + header


def payload_parts(frame: Frame) -> list[memoryview]:
    """The non-empty payload buffers as flat bytes, not copied.

    Raises:
        BadFrame: a buffer is not contiguous.
    """
    parts = [part for part in frame.payload if part.nbytes]
    for part in parts:
        if not part.c_contiguous:
            raise BadFrame("payload: a buffer is not contiguous; copy it before sending")
    return [part.cast("B") for part in parts]


def decode_prefix(data: bytes | bytearray | memoryview, limits: Limits) -> Prefix:
    """The lengths announced by a prefix of exactly ``PREFIX_BYTES`` bytes.

    Raises:
        BadFrame: not our protocol, another version, or more than ``limits`` allow.
    """
    if len(data) != PREFIX_BYTES:
        raise BadFrame(f"cut: a prefix has {PREFIX_BYTES} bytes, got {len(data)}")
    magic, version, header_bytes, payload_bytes = _PREFIX.unpack(data)
    if magic != MAGIC:
        raise BadFrame(f"not a swarm peer: message starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        who = "upgrade this peer" if version > VERSION else "the other peer must upgrade"
        raise BadFrame(f"wire version: got {version}, this peer speaks {VERSION}; {who}")
    prefix = Prefix(header_bytes, payload_bytes)
    _check_lengths(prefix, limits)
    return prefix


def decode_header(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The header: a dict with string keys of None, bool, int, float, str, bytes, list, dict.

    Raises:
        BadFrame: not msgpack, not a map, a key that is no string, nested too deep, or a type of
            msgpack's extensions.
    """
    try:
        header = msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)
    except msgpack.StackError as error:
        raise BadFrame(f"header: nested deeper than {MAX_DEPTH} levels") from error
    except (ValueError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise BadFrame(f"header: not valid msgpack: {reason}") from error
    _check_map(header)
    return header


def aligned_buffer(nbytes: int) -> memoryview:
    """A writable buffer of ``nbytes`` uninitialised bytes that starts at a multiple of 64.

    The system commits large buffers page by page as they are written, so a claimed length that
    never comes takes no memory.
    """
    block = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block.data[start : start + nbytes]


def _check_lengths(prefix: Prefix, limits: Limits) -> None:
    for name, given, limit in (
        ("header", prefix.header_bytes, limits.header_bytes),
        ("payload", prefix.payload_bytes, limits.payload_bytes),
    ):
        if given > limit:
            raise BadFrame(f"{name} too long: {given} bytes given, {limit} allowed")


def _check_map(header: object) -> None:
    if not isinstance(header, Mapping):
        raise BadFrame(f"header: a map is needed, got {type(header).__name__}")
    _check_value(header, 1)


def _check_value(value: object, depth: int) -> None:
    if isinstance(value, _SCALARS):
        return
    if depth > MAX_DEPTH:
        raise BadFrame(f"header: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadFrame(f"header: keys must be strings, got {key!r}")
            _check_value(item, depth + 1)
    elif isinstance(value, (list, tuple)) and not isinstance(value, msgpack.ExtType):
        for item in value:
            _check_value(item, depth + 1)
    else:
        raise BadFrame(f"header: {type(value).__name__} cannot be sent")
