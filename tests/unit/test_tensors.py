"""Tensors in a payload: bit for bit, aligned, and only what is expected."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.messages import TensorMeta
from peers.tensors import ALIGN, RAW, Expected, pack, unpack
from swarm.errors import BadInput, BadMessage


def joined(payload: list[memoryview]) -> list[memoryview]:
    """As a frame arrives: one writable buffer, or none."""
    data = bytearray(b"".join(payload))
    return [memoryview(data)] if data else []


TENSORS = [
    (torch.arange(7, dtype=torch.float32), "fp32"),
    (torch.tensor([[1, -2], [3, 2**62]]), RAW),
    (torch.zeros(0, 5), "fp32"),
    (torch.tensor(3.5), "fp32"),
    (torch.arange(200, dtype=torch.uint8), RAW),
    (torch.tensor([float("nan"), float("inf"), -0.0]), RAW),
]


def expected_of(tensor: torch.Tensor, codec: str) -> Expected:
    return Expected(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), codec)


def test_lossless_tensors_come_out_bit_for_bit() -> None:
    metas, payload = pack(TENSORS)
    found = unpack(metas, joined(payload), [expected_of(*pair) for pair in TENSORS])
    for got, (tensor, _) in zip(found, TENSORS, strict=True):
        assert got.shape == tensor.shape
        assert got.dtype == tensor.dtype
        assert got.numpy().tobytes() == tensor.numpy().tobytes()


def test_each_tensor_starts_aligned_and_is_not_copied() -> None:
    first = torch.arange(5, dtype=torch.float32)
    _, payload = pack([(first, "fp32"), (first, RAW)])
    assert sum(part.nbytes for part in payload) == 2 * ALIGN
    first[0] = 42.0
    (data,) = joined(payload)
    assert torch.frombuffer(data[ALIGN : ALIGN + 4], dtype=torch.float32)[0] == 42.0


def meta(**changes: object) -> TensorMeta:
    plain = {"codec": "fp32", "dtype": "float32", "shape": [4], "nbytes": 16}
    return TensorMeta.model_validate(plain | changes)


WANTED = [Expected((4,), "float32", "fp32")]


@pytest.mark.parametrize(
    ("metas", "nbytes", "reason"),
    [
        ([], 0, "0 tensors, expected 1"),
        ([meta(), meta()], 128, "2 tensors, expected 1"),
        ([meta(shape=[5], nbytes=20)], 64, r"\[5\]"),
        ([meta(shape=[2, 2])], 64, r"\[2, 2\]"),
        ([meta(dtype="int64")], 64, "int64"),
        ([meta(codec="bf16")], 64, "bf16"),
        ([meta()], 0, "cut"),
        ([meta()], 15, "cut"),
        ([meta(nbytes=1 << 40)], 64, "cut"),
        ([meta()], 128, "128 bytes, 64 were announced"),
        ([meta(nbytes=12)], 64, "bytes"),
    ],
)
def test_what_is_not_expected_is_refused(metas, nbytes: int, reason: str) -> None:
    payload = [memoryview(bytearray(nbytes))] if nbytes else []
    with pytest.raises(BadMessage, match=reason):
        unpack(metas, payload, WANTED)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["fp32", "bf16", "int8", RAW]),
    st.integers(0, 300),
    st.integers(0, 300),
    st.binary(max_size=400),
)
def test_no_payload_raises_anything_but_bad_input(
    codec: str, values: int, nbytes: int, payload: bytes
) -> None:
    want = Expected((values,), "float32", codec)
    given_meta = meta(codec=codec, shape=[values], nbytes=nbytes)
    data = [memoryview(bytearray(payload))] if payload else []
    try:
        (tensor,) = unpack([given_meta], data, [want])
    except BadInput:
        return
    assert tensor.shape == (values,)
    assert tensor.dtype == torch.float32
