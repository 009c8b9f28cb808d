"""The numbers of one round of averaging: parts go out, the sum is put together and looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peers.messages import TensorMeta
from peers.tensors import pack
from swarm.codecs import get_codec
from swarm.model.look import Look

Packed = tuple[list[TensorMeta], list[memoryview]]


class Summing:
    """Everything that takes time in a round. One call at a time, off the event loop.

    Args:
        pieces: the pieces of the vector, in order.
        gradient: our own, unchanged throughout; ``total``: where the sum is put together.
        codec: of parts and sums.
        look: takes the digest and the squares of a piece of the sum.

    With a lossy codec every sum becomes what its receivers decode, so that all hold equal bits.
    ``residual`` (None: nothing) is then added to whatever is encoded, and ``lost`` takes in what
    encoding it loses; see ``peers.residual``. ``lost`` None: the codec loses nothing.
    """

    def __init__(
        self,
        pieces: Sequence[slice],
        gradient: Tensor,
        total: Tensor,
        codec: str,
        look: Callable[[Tensor], Look],
    ) -> None:
        self.pieces = pieces
        self.looks: dict[int, Look] = {}
        """Of the pieces whose sum is here, by number."""
        self.residual: Tensor | None = None
        self.lost: Tensor | None = None
        self._unseen: list[int] = []
        self._gradient, self._total = gradient, total
        self._codec, self._look = codec, look

    def part(self, piece: int) -> Packed:
        """Our own part of a piece that another sums."""
        where = self.pieces[piece]
        own = self._gradient[where]
        if self.lost is None:
            return pack([(own, self._codec)])
        if self.residual is not None:
            own = own + self.residual[where]
        packed, decoded = self._encode(own)
        torch.sub(own, decoded, out=self.lost[where])
        return packed

    def add(self, piece: int, parts: Sequence[Tensor | None]) -> Packed:
        """Sum a piece of ours over ``parts``, in order; None stands for our own part.

        Returns the sum as it is sent; without a codec, from ``total``'s own memory. The others wait
        for it, so it is looked at later, when it is on its way.
        """
        where = self.pieces[piece]
        total = self._total[where]
        given = [self._gradient[where] if part is None else part for part in parts]
        if len(given) == 1:
            total.copy_(given[0])
        else:
            torch.add(given[0], given[1], out=total)
        for part in given[2:]:
            total.add_(part)
        self._unseen.append(piece)
        if self.lost is None:
            return pack([(total, self._codec)])
        return self._add_lossy(total, where)

    def _add_lossy(self, total: Tensor, where: slice) -> Packed:
        assert self.lost is not None
        if self.residual is not None:
            total.add_(self.residual[where])
        packed, decoded = self._encode(total)
        torch.sub(total, decoded, out=self.lost[where])
        total.copy_(decoded)
        return packed

    def look_at_all(self) -> bool:
        """Look at whatever has not been looked at: the whole sum is here."""
        while self._unseen:
            self._look_at(self._unseen.pop())
        return True

    def put(self, piece: int, tensor: Tensor) -> None:
        """The sum of a piece has come. What is here already stays: it has been looked at.

        For each that comes, one of our own is looked at: they are as many, and by now on their way.
        """
        if piece in self.looks:
            return
        self.sum_of(piece).copy_(tensor)
        self._look_at(piece)
        if self._unseen:
            self._look_at(self._unseen.pop())

    def _look_at(self, piece: int) -> None:
        self.looks[piece] = self._look(self.sum_of(piece))

    def send_nothing(self, pieces: Sequence[int]) -> None:
        """We hold nothing, so we send no parts of these pieces: what was lost before stays so."""
        if self.lost is not None:
            for piece in pieces:
                where = self.pieces[piece]
                if self.residual is None:
                    self.lost[where].zero_()
                else:
                    self.lost[where].copy_(self.residual[where])

    def give_back(self) -> bool:
        """Alone: the sum is our gradient and all that was lost before; nothing is lost by it."""
        assert self.residual is not None
        torch.add(self._gradient, self.residual, out=self._total)
        return True

    def sum_of(self, piece: int) -> Tensor:
        """The sum of a piece, which is here."""
        return self._total[self.pieces[piece]]

    def _encode(self, values: Tensor) -> tuple[Packed, Tensor]:
        """As it is sent, and as it is decoded."""
        packed = pack([(values, self._codec)])
        return packed, get_codec(self._codec).decode(packed[1][0], tuple(values.shape))
