"""What a stage's state is copied from: a live replica, a copy set aside, a checkpoint's file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarm.core.totals import Totals
from swarm.types import Mark

DIGEST_BYTES = 32

PIECE = 1 << 18
"""Values of each vector that are asked for at once, where nobody steps them meanwhile."""

RUN = 16
"""Pieces whose sums are asked for at once."""


class Source(Protocol):
    """The state of one stage at one mark: flat float32 vectors, all of one ``length``."""

    @property
    def length(self) -> int: ...

    def piece(self, start: int, stop: int) -> list[Tensor]:
        """That part of each vector: the weights, then the optimizer's. May take a while."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A copy in memory. It is a ``Source``."""

    mark: Mark
    applied: int
    totals: Totals
    vectors: Mapping[str, Tensor]

    @property
    def length(self) -> int:
        return self.vectors["weights"].numel()

    def piece(self, start: int, stop: int) -> list[Tensor]:
        return [vector[start:stop] for vector in self.vectors.values()]


def cut(length: int, size: int) -> list[slice]:
    """The fixed pieces of vectors of ``length`` values, ``size`` each but for the last."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def digests(vectors: list[Tensor], size: int) -> Tensor:
    """SHA-256 of each piece over all ``vectors``: uint8, (pieces, 32)."""
    length = vectors[0].numel()
    found = [digest([vector[place] for vector in vectors]) for place in cut(length, size)]
    return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8).view(-1, DIGEST_BYTES)


def digest(piece: list[Tensor]) -> bytes:
    """SHA-256 of one piece: all its vectors, one after the other."""
    sha = hashlib.sha256()
    for part in piece:
        sha.update(memoryview(part.cpu().numpy()).cast("B"))  # type: ignore[arg-type]
    return sha.digest()
