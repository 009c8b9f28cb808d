import hashlib
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from swarm.codecs import CODECS, get_codec, roundtrip
from swarm.errors import BadMessage, ConfigError

NAMES = ["fp32", "bf16", "int8"]
SHAPES = [(), (1,), (255,), (256,), (257,), (3, 5, 7), (2, 0, 3), (1024 * 256,), (2049, 257)]
NAN, INF = float("nan"), float("inf")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def received(data: memoryview) -> memoryview:
    """What a transport hands over: writable memory of its own."""
    return memoryview(bytearray(data))


def int8_by_the_book(values: np.ndarray) -> bytes:
    """The layout and the arithmetic of the int8 codec, block by block in numpy."""
    scales, levels = [], []
    for first in range(0, len(values), 256):
        block = values[first : first + 256]
        absmax = np.abs(block).max()
        scales.append(absmax / np.float32(127))
        levels.append(np.rint(block * (np.float32(127) / absmax)).astype(np.int8))
    return np.array(scales, "<f4").tobytes() + np.concatenate(levels).tobytes()


def test_the_registry_has_the_three_codecs_under_their_names():
    assert list(CODECS) == NAMES
    assert [get_codec(name).name for name in NAMES] == NAMES
    assert [name for name in NAMES if get_codec(name).lossless] == ["fp32"]


def test_an_unknown_codec_names_those_that_exist():
    with pytest.raises(ConfigError, match=r"^codec: got 'zip'; allowed: fp32, bf16, int8$"):
        get_codec("zip")


def test_a_big_endian_machine_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ConfigError, match="'big'; allowed: little"):
        get_codec("fp32")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_size_shape_and_dtype_survive(name, shape):
    codec = get_codec(name)
    tensor = normal(*shape)
    data = codec.encode(tensor)
    assert (data.format, data.ndim) == ("B", 1)
    assert len(data) == codec.nbytes(tensor.numel())
    decoded = codec.decode(received(data), shape)
    assert decoded.shape == tensor.shape
    assert decoded.dtype == torch.float32
    assert decoded.is_contiguous()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("fp32", {0: 0, 1: 4, 257: 1028}),
        ("bf16", {0: 0, 1: 2, 257: 514}),
        ("int8", {0: 0, 1: 5, 256: 260, 257: 265}),
    ],
)
def test_the_sizes_are_those_of_the_layout(name, sizes):
    assert {count: get_codec(name).nbytes(count) for count in sizes} == sizes


@pytest.mark.parametrize("name", NAMES)
def test_encoding_leaves_the_tensor_as_it_was_and_repeats_itself(name):
    codec = get_codec(name)
    tensor = normal(1000)
    before = tensor.clone()
    assert bytes(codec.encode(tensor)) == bytes(codec.encode(before))
    assert torch.equal(tensor, before)


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("fp32", "9b02f109a598f61fb3d4472debaf18c5a5498f3f5ba92103de06594c35b5ead8"),
        ("bf16", "550e69a810d22ed307d30b02e3a15efdc16d8a4c7497e316f7b5c745a37c8550"),
        ("int8", "eb580cbfb7038ec6d0a59d4337dab17731a40df412fac73c9ee124e92aaa0c14"),
    ],
)
def test_the_bytes_of_a_fixed_input_are_pinned(name, sha256):
    # Integers and powers of two only, so that the input itself is the same everywhere.
    values = (np.arange(300_000, dtype=np.int64) * 7919 % 65537 - 32768).astype(np.float32)
    values *= 2.0 ** (np.arange(300_000) % 13 - 6).astype(np.float32)
    data = get_codec(name).encode(torch.from_numpy(values))
    assert hashlib.sha256(data).hexdigest() == sha256


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_is_encoded_without_its_history(name):
    codec = get_codec(name)
    parameter = torch.nn.Parameter(normal(300))
    assert bytes(codec.encode(parameter)) == bytes(codec.encode(parameter.detach()))


@pytest.mark.parametrize("name", NAMES)
def test_another_dtype_is_refused(name):
    with pytest.raises(TypeError, match=r"float32 tensors, not torch\.float64"):
        get_codec(name).encode(torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("name", NAMES)
def test_data_of_another_size_is_refused(name, off):
    codec = get_codec(name)
    size = codec.nbytes(6)
    with pytest.raises(BadMessage, match=rf"^{name}: {size + off} bytes .*\(2, 3\).* {size}$"):
        codec.decode(memoryview(bytearray(size + off)), (2, 3))


@pytest.mark.parametrize("shape", [(-1,), (-2, -3), (2**40, 2**40, 0), (2**63, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_a_shape_that_no_tensor_has_is_refused(name, shape):
    codec = get_codec(name)
    with pytest.raises(BadMessage, match="no tensor has the shape"):
        codec.decode(memoryview(bytearray(codec.nbytes(6))), shape)


@pytest.mark.parametrize("name", NAMES)
def test_a_huge_shape_is_refused_before_memory_is_taken(name):
    with pytest.raises(BadMessage, match="bytes for the shape"):
        get_codec(name).decode(memoryview(bytearray(8)), (2**30, 2**30))


@pytest.mark.parametrize("name", NAMES)
def test_unaligned_and_read_only_data_decode_alike(name):
    codec = get_codec(name)
    tensor = normal(3, 300)
    data = bytes(codec.encode(tensor))
    expected = codec.decode(received(memoryview(data)), (3, 300))
    unaligned = memoryview(bytearray(b"x" + data))[1:]
    decoded = codec.decode(unaligned, (3, 300))
    assert torch.equal(decoded, expected)
    assert decoded.data_ptr() % 4 == 0
    read_only = codec.decode(memoryview(data), (3, 300))
    assert torch.equal(read_only, expected)
    read_only.zero_()
    assert data == bytes(codec.encode(tensor))


@given(data=st.binary(max_size=600), name=st.sampled_from(NAMES), count=st.integers(0, 600))
def test_any_bytes_decode_or_are_refused(data, name, count):
    codec = get_codec(name)
    if len(data) == codec.nbytes(count):
        assert codec.decode(memoryview(data), (count,)).shape == (count,)
    else:
        with pytest.raises(BadMessage):
            codec.decode(memoryview(data), (count,))


def test_fp32_shares_memory_both_ways():
    codec = get_codec("fp32")
    tensor = normal(4, 4)
    data = codec.encode(tensor)
    tensor[0, 0] = 5.0
    decoded = codec.decode(data, (4, 4))
    assert decoded[0, 0] == 5.0
    assert decoded.data_ptr() == tensor.data_ptr()


def test_fp32_keeps_every_bit():
    bits = torch.tensor([0x7FC00001, -0x400000, 1, -(2**31), 0x7F800000], dtype=torch.int32)
    codec = get_codec("fp32")
    decoded = codec.decode(received(codec.encode(bits.view(torch.float32))), (5,))
    assert torch.equal(decoded.view(torch.int32), bits)


def test_roundtrip_is_the_identity_only_for_a_lossless_codec():
    tensor = normal(2, 300)
    assert roundtrip(get_codec("fp32"), tensor) is tensor
    for name in ("bf16", "int8"):
        codec = get_codec(name)
        seen = roundtrip(codec, tensor)
        assert torch.equal(seen, codec.decode(received(codec.encode(tensor)), (2, 300)))
        assert not torch.equal(seen, tensor)


def test_bf16_rounds_to_nearest_ties_to_even():
    step = 2.0**-7  # between neighbours above 1
    given = torch.tensor([1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, -(1 + step / 2), 0.1])
    expected = [1.0, 1 + 2 * step, 1 + step, -1.0, 0.10009765625]
    assert roundtrip(get_codec("bf16"), given).tolist() == expected


def test_bf16_is_little_endian():
    assert bytes(get_codec("bf16").encode(torch.tensor([1.0, -2.0]))) == b"\x80\x3f\x00\xc0"


def test_bf16_has_one_nan_and_keeps_infinities():
    given = torch.tensor([NAN, INF, -INF, 1.0] * 20)
    given[4] = -given[0]
    data = get_codec("bf16").encode(given)
    assert bytes(data) == b"\xc0\x7f\x80\x7f\x80\xff\x80\x3f" * 20


def test_bf16_of_finite_values_with_an_infinite_sum_is_not_touched():
    assert roundtrip(get_codec("bf16"), torch.full((64,), 2.0**127)).tolist() == [2.0**127] * 64


def test_int8_layout_is_scales_then_values():
    tensor = torch.cat([torch.full((256,), 127.0), torch.tensor([-254.0, 2.0, 0.0])])
    data = bytes(get_codec("int8").encode(tensor))
    assert data[:8] == np.array([1.0, 2.0], "<f4").tobytes()
    assert data[8:] == b"\x7f" * 256 + b"\x81\x01\x00"


@pytest.mark.parametrize("count", [1, 256, 300, 1024 * 256 + 256 + 1])
def test_int8_equals_the_same_arithmetic_in_numpy(count):
    tensor = normal(count) * torch.logspace(-20, 20, count)
    assert bytes(get_codec("int8").encode(tensor)) == int8_by_the_book(tensor.numpy())


@given(
    arrays.arrays(
        np.float32,
        st.integers(1, 600),
        elements=st.floats(-(2.0**120), 2.0**120, width=32),
    )
)
def test_int8_error_is_at_most_half_a_scale_of_the_block(values):
    seen = roundtrip(get_codec("int8"), torch.from_numpy(values)).numpy()
    for first in range(0, len(values), 256):
        block = values[first : first + 256].astype(np.float64)
        half = np.abs(block).max() / 254
        error = np.abs(seen[first : first + 256] - block).max()
        assert error <= half * (1 + 1e-5) + 2.0**-100


def test_int8_zeros_stay_zeros():
    assert roundtrip(get_codec("int8"), torch.zeros(700)).eq(0).all()
    mixed = torch.cat([torch.zeros(256), torch.ones(256)])
    assert torch.equal(roundtrip(get_codec("int8"), mixed), mixed)


@pytest.mark.parametrize("magnitude", [2.0**-149, 2.0**-126, 2.0**-101])
def test_int8_sends_a_tiny_block_as_zeros(magnitude):
    codec = get_codec("int8")
    assert bytes(codec.encode(torch.full((300,), magnitude))) == bytes(codec.nbytes(300))


def test_int8_keeps_a_block_just_above_tiny():
    block = torch.full((256,), 2.0**-100)
    torch.testing.assert_close(roundtrip(get_codec("int8"), block), block, rtol=1e-6, atol=0)


def test_int8_of_the_largest_finite_values_is_finite():
    largest = torch.finfo(torch.float32).max
    seen = roundtrip(get_codec("int8"), torch.tensor([largest, -largest, 0.0]))
    torch.testing.assert_close(seen, torch.tensor([largest, -largest, 0.0]), rtol=0.01, atol=0)


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 255, 300, 699])
def test_int8_marks_just_the_block_that_is_not_finite(place, bad):
    tensor = normal(700)
    healthy = roundtrip(get_codec("int8"), tensor)
    tensor[place] = bad
    seen = roundtrip(get_codec("int8"), tensor)
    for first in range(0, 700, 256):
        block = seen[first : first + 256]
        if first <= place < first + 256:
            assert block.isnan().all()
        else:
            assert torch.equal(block, healthy[first : first + 256])


def test_int8_bytes_of_a_broken_block_are_fixed():
    encode = get_codec("int8").encode
    expected = b"\x00\x00\xc0\x7f" + bytes(256)
    for bad in (NAN, -NAN, INF, -INF):
        tensor = normal(256)
        tensor[7] = bad
        assert bytes(encode(tensor)) == expected
