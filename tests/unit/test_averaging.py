"""Pieces of a vector among members: all of it, once, in the order of the members."""

from __future__ import annotations

import pytest
import torch

from peers.averaging import PIECES_PER_MEMBER, _add, cut_pieces, owners_of
from peers.stage import PIECE
from peers.tensors import RAW, Expected, unpack
from swarm.types import Replica

MEMBERS = [Replica(f"peer{n}", "aa") for n in range(5)]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 1000, PIECE, 5 * PIECE + 3])
@pytest.mark.parametrize("members", [1, 2, 3, 5])
def test_pieces_cover_the_vector_once(length: int, members: int) -> None:
    pieces = cut_pieces(length, members)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == length
    assert all(piece.start < piece.stop for piece in pieces)
    if members > 1:
        assert all(piece.stop - piece.start <= PIECE for piece in pieces)
    owners = owners_of(len(pieces), MEMBERS[:members])
    assert owners == sorted(owners)
    counts = [owners.count(member) for member in MEMBERS[:members]]
    assert max(counts) - min(counts) <= 1


def test_a_long_vector_gives_each_member_several_pieces() -> None:
    assert len(cut_pieces(10 * PIECE, 2)) >= 2 * PIECES_PER_MEMBER


def received(metas, payload, codec: str, dtype: str, length: int) -> torch.Tensor:
    data = [memoryview(bytearray(b"".join(payload)))]
    return unpack(metas, data, [Expected((length,), dtype, codec)])[0]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_the_owner_keeps_exactly_what_the_others_decode(codec: str) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(100, generator=generator) for _ in range(3)]
    kept = [part.clone() for part in parts]
    total = torch.empty(100)
    metas, payload = _add(total, parts, codec)
    assert torch.equal(received(metas, payload, codec, "float32", 100), total)
    assert all(torch.equal(part, before) for part, before in zip(parts, kept, strict=True))
    exact = (kept[0] + kept[1]) + kept[2]
    if codec == "fp32":
        assert torch.equal(total, exact)
    else:
        assert torch.allclose(total, exact, atol=float(exact.abs().max()) / 100)


def test_integers_are_summed_exactly_in_any_order() -> None:
    parts = [torch.tensor([2**61, -5, 7]), torch.tensor([-(2**60), 5, 1]), torch.tensor([1, 1, 1])]
    found = []
    for order in ([0, 1, 2], [2, 1, 0]):
        total = torch.empty(3, dtype=torch.int64)
        metas, payload = _add(total, [parts[i] for i in order], RAW)
        assert torch.equal(received(metas, payload, RAW, "int64", 3), total)
        found.append(total)
    assert torch.equal(found[0], found[1])
    assert found[0].tolist() == [2**61 - 2**60 + 1, 1, 9]
