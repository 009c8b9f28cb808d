import resource
import struct
import types
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers import wire
from peers.transport import Frame
from swarm.errors import BadFrame

LIMITS = wire.Limits(header_bytes=200, payload_bytes=1000)


def prefix(magic=wire.MAGIC, version=wire.VERSION, header=0, payload=0):
    return struct.pack("<4sBIQ", magic, version, header, payload)


def decode(data: bytes, limits: wire.Limits) -> tuple[dict, bytes]:
    """What a receiver does with the bytes of one whole frame."""
    lengths = wire.decode_prefix(data[: wire.PREFIX_BYTES], limits)
    header_end = wire.PREFIX_BYTES + lengths.header_bytes
    payload = data[header_end:]
    assert len(payload) == lengths.payload_bytes
    return wire.decode_header(data[wire.PREFIX_BYTES : header_end]), payload


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=10), values), st.lists(st.binary(max_size=50), max_size=4))
def test_round_trip(header, buffers):
    frame = Frame(header, [memoryview(part) for part in buffers])
    head = wire.encode_head(frame, wire.DEFAULT_LIMITS)
    data = head + b"".join(wire.payload_parts(frame))
    assert decode(data, wire.DEFAULT_LIMITS) == (header, b"".join(buffers))


@given(st.binary(min_size=wire.PREFIX_BYTES, max_size=wire.PREFIX_BYTES) | st.binary(max_size=40))
def test_any_bytes_are_a_prefix_within_limits_or_bad_frame(data):
    try:
        lengths = wire.decode_prefix(data, LIMITS)
    except BadFrame:
        return
    assert lengths.header_bytes <= LIMITS.header_bytes
    assert lengths.payload_bytes <= LIMITS.payload_bytes


@given(st.binary(max_size=100) | values.map(msgpack.packb))
def test_any_bytes_are_a_string_keyed_map_or_bad_frame(data):
    try:
        header = wire.decode_header(data)
    except BadFrame:
        return
    assert all(isinstance(key, str) for key in header)
    again = wire.encode_head(Frame(header), wire.DEFAULT_LIMITS)[wire.PREFIX_BYTES :]
    # msgpack text is compared because NaN is not equal to itself
    assert msgpack.packb(wire.decode_header(again)) == msgpack.packb(header)


def test_sixteen_levels_pass_and_the_seventeenth_does_not():
    fits: object = 1
    for _ in range(wire.MAX_DEPTH - 1):
        fits = [fits]
    assert wire.decode_header(msgpack.packb({"a": fits})) == {"a": fits}
    with pytest.raises(BadFrame, match="nested deeper than 16 levels"):
        wire.decode_header(msgpack.packb({"a": [fits]}))
    with pytest.raises(BadFrame, match="nested deeper than 16 levels"):
        wire.encode_head(Frame({"a": [fits]}), LIMITS)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut: a prefix has 17 bytes, got 0"),
        (prefix(magic=b"HTTP"), "not a swarm peer: message starts with b'HTTP', not b'SWRM'"),
        (prefix(version=3), "wire version: got 3, this peer speaks 2; upgrade this peer"),
        (prefix(version=0), "wire version: got 0, this peer speaks 2; the other peer must upgrade"),
        (prefix(header=201), "header too long: 201 bytes given, 200 allowed"),
        (prefix(payload=2**64 - 1), f"payload too long: {2**64 - 1} bytes given, 1000 allowed"),
    ],
)
def test_bad_prefix_says_why(data, reason):
    with pytest.raises(BadFrame) as caught:
        wire.decode_prefix(data, LIMITS)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not valid msgpack"),
        (b"\xc1", "not valid msgpack: FormatError"),
        (b"\x80\x80", "not valid msgpack: .*extra data"),
        (b"\x81\xa1\xff\x01", "not valid msgpack: 'utf-8' codec"),
        (b"\xdf\xff\xff\xff\xff", "not valid msgpack: 4294967295 exceeds"),
        (b"\x91" * 2000 + b"\xc0", "nested deeper than 16 levels"),
        (msgpack.packb([1]), "a map is needed, got list"),
        (msgpack.packb({1: 2}), "int is not allowed for map key"),
        (msgpack.packb({b"a": 2}), "keys must be strings, got b'a'"),
        (msgpack.packb({"a": [{b"b": 2}]}), "keys must be strings, got b'b'"),
        (msgpack.packb({"a": msgpack.ExtType(1, b"x")}), "exceeds max_ext_len"),
        (msgpack.packb({"a": msgpack.ExtType(1, b"")}), "ExtType cannot be sent"),
        (msgpack.packb({"a": msgpack.Timestamp(1)}), "exceeds max_ext_len"),
    ],
)
def test_bad_header_says_why(data, reason):
    with pytest.raises(BadFrame, match=reason):
        wire.decode_header(data)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": object()}, "header: object cannot be sent"),
        ({"a": 2**64}, "header: .*"),
        ({"a": "\ud800"}, "header: .*surrogates"),
        ({1: 2}, "header: keys must be strings, got 1"),
        ({"a": "x" * 200}, "header too long: 205 bytes given, 200 allowed"),
    ],
)
def test_what_no_receiver_would_take_is_not_encoded(header, reason):
    with pytest.raises(BadFrame, match=reason):
        wire.encode_head(Frame(header), LIMITS)


def test_payload_above_the_limit_is_not_encoded():
    with pytest.raises(BadFrame, match="payload too long: 1001 bytes given, 1000 allowed"):
        wire.encode_head(Frame({}, [memoryview(bytes(1001))]), LIMITS)


def test_headers_may_be_any_mapping_and_tuples_arrive_as_lists():
    header = types.MappingProxyType({"a": (1, 2)})
    head = wire.encode_head(Frame(header), LIMITS)
    assert wire.decode_header(head[wire.PREFIX_BYTES :]) == {"a": [1, 2]}


def test_payload_parts_are_flat_views_of_the_same_memory():
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    frame = Frame({}, [memoryview(matrix), memoryview(np.empty((0, 3)))])
    (part,) = wire.payload_parts(frame)
    matrix[0, 0] = 9
    assert part.nbytes == 24
    assert bytes(part) == matrix.tobytes()


def test_payload_that_is_not_contiguous_is_refused():
    matrix = np.zeros((4, 4))
    with pytest.raises(BadFrame, match="not contiguous"):
        wire.payload_parts(Frame({}, [memoryview(matrix[:, 0])]))


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 1 << 20])
def test_aligned_buffer_is_writable_and_aligned(nbytes):
    buffer = wire.aligned_buffer(nbytes)
    assert buffer.nbytes == nbytes
    assert not buffer.readonly
    if nbytes:
        assert np.frombuffer(buffer, dtype=np.uint8).ctypes.data % wire.ALIGNMENT == 0
        buffer[:] = bytes(nbytes)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_claimed_length_takes_no_memory_in_advance():
    before = resident_bytes()
    buffers = [wire.aligned_buffer(256 << 20) for _ in range(4)]
    grown = resident_bytes() - before
    assert sum(buffer.nbytes for buffer in buffers) == 1 << 30
    assert grown < 64 << 20
