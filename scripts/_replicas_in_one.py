"""Replicas of each stage that sum their gradients without a network: one process plays them all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from peers.averaging import cut_pieces, owners_of
from peers.residual import Residual
from peers.summing import Summing
from swarm.codecs import get_codec
from swarm.model.look import look_at
from swarm.types import Replica


class ReplicasInOne:
    """A ``swarm.reference.Averaging`` with what the real rounds use: the same cut of the vector,
    the same owners, ``Summing`` and each replica's ``Residual``. So its sums have the bits of a
    round in which all replicas are members and hold something.

    Raises:
        ConfigError: there is no such codec.
        ValueError: fewer than two replicas; one sends nothing.
    """

    def __init__(self, replicas: int, codec: str) -> None:
        if replicas < 2:
            raise ValueError(f"{replicas} replicas do not average: at least 2 are needed")
        self.replicas = replicas
        self._name, self._codec = codec, get_codec(codec)
        self._members = [Replica(f"replica{number}", "") for number in range(replicas)]
        self._residuals: dict[int, list[Residual]] = {}
        self._totals: dict[int, Tensor] = {}

    def sum(self, stage: int, gradients: Sequence[Tensor]) -> Tensor:
        length = gradients[0].numel()
        if stage not in self._totals:
            self._totals[stage] = torch.empty_like(gradients[0])
            self._residuals[stage] = [Residual() for _ in self._members]
        pieces = cut_pieces(length, self.replicas)
        # Each writes the sums of its own pieces alone, so that all can share one total.
        replicas = [
            self._summing(pieces, gradient, self._totals[stage], residual)
            for gradient, residual in zip(gradients, self._residuals[stage], strict=True)
        ]
        for piece, owner in enumerate(owners_of(len(pieces), self._members)):
            mine = self._members.index(owner)
            parts = [
                None if number == mine else self._received(replica, piece)
                for number, replica in enumerate(replicas)
            ]
            replicas[mine].add(piece, parts)
        return self._totals[stage]

    def decided(self, *, applied: bool) -> None:
        for residuals in self._residuals.values():
            for residual in residuals:
                if applied:
                    residual.apply()
                else:
                    residual.end()

    def _summing(
        self, pieces: list[slice], gradient: Tensor, total: Tensor, residual: Residual
    ) -> Summing:
        made = Summing(pieces, gradient, total, self._name, partial(look_at, scale=None))
        if not self._codec.lossless:
            made.residual, made.lost = residual.kept, residual.begin(gradient)
        return made

    def _received(self, sender: Summing, piece: int) -> Tensor:
        where = sender.pieces[piece]
        _, payload = sender.part(piece)
        return self._codec.decode(payload[0], (where.stop - where.start,))
