"""Pieces of flat vectors and their digests."""

from __future__ import annotations

import hashlib

import pytest
import torch

from peers.sources import Copy, cut, digest, digests
from swarm.types import FRESH


@pytest.mark.parametrize(
    ("length", "size", "expected"),
    [
        (0, 4, []),
        (1, 4, [(0, 1)]),
        (4, 4, [(0, 4)]),
        (9, 4, [(0, 4), (4, 8), (8, 9)]),
    ],
)
def test_vectors_are_cut_into_fixed_pieces(length: int, size: int, expected: list) -> None:
    assert [(place.start, place.stop) for place in cut(length, size)] == expected


def test_a_digest_is_sha256_of_all_vectors_one_after_the_other() -> None:
    piece = [torch.tensor([1.0, -0.0]), torch.tensor([float("nan"), 2.0])]
    expected = hashlib.sha256(b"".join(part.numpy().tobytes() for part in piece)).digest()
    assert digest(piece) == expected


def test_digests_tell_bits_apart_and_name_the_piece() -> None:
    vectors = [torch.zeros(10), torch.ones(10)]
    before = digests(vectors, 4)
    assert (before.dtype, before.shape) == (torch.uint8, (3, 32))
    assert bytes(before[2].tolist()) == digest([vector[8:] for vector in vectors])
    vectors[0][5] = -0.0
    changed = (digests(vectors, 4) != before).any(dim=1)
    assert changed.tolist() == [False, True, False]


def test_a_copy_gives_its_pieces_in_the_order_of_its_vectors() -> None:
    vectors = {"weights": torch.arange(6.0), "exp_avg": -torch.arange(6.0)}
    copy = Copy(FRESH, 0, (), vectors)
    assert copy.length == 6
    first, second = copy.piece(2, 4)
    assert (first.tolist(), second.tolist()) == ([2.0, 3.0], [-2.0, -3.0])
