"""A stage's state as it crosses the network: in pieces, each copied at one mark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import torch
from torch import Tensor

from peers import messages as msg
from peers.rpc import Caller
from peers.sources import DIGEST_BYTES, PIECE, cut, digest
from peers.tensors import RAW, Expected, unpack
from swarm.core.backoff import Backoff
from swarm.core.totals import Totals
from swarm.errors import BadInput, SwarmError, TransportError
from swarm.types import Mark, Replica

AT_ONCE = 4
"""Pieces on their way at one time."""

TRIES = 8
AGAIN = Backoff(first_s=0.1, cap_s=2.0)
"""How often, and after which pauses, all are asked for a piece that nobody gave."""


class StateLost(SwarmError):
    """No replica of the stage could give its state."""


class DonorBusy(BadInput):
    """It would give, but not now."""


@dataclass(frozen=True, slots=True)
class PieceSource:
    """Whom to ask for pieces of a stage, and how."""

    caller: Caller
    run_id: str
    replica: Replica
    stage: int

    def values(self, place: slice) -> dict[str, Any]:
        """What a request for the values at ``place`` says of whom and what it asks."""
        return {
            "run": self.run_id,
            "to": self.replica.boot,
            "stage": self.stage,
            "start": place.start,
            "count": place.stop - place.start,
        }

    async def ask(
        self, question: msg.Message, nbytes: int
    ) -> tuple[msg.Message, Sequence[memoryview]]:
        """``nbytes``: of the payload that is expected; its time limit follows from that.

        Raises TransportError, DonorBusy, or BadInput: it has not what was asked for.
        """
        limit_s = self.caller.timeout_s + AT_ONCE * nbytes / self.caller.BYTES_PER_S
        answer = await self.caller.call(self.replica.peer, question, timeout_s=limit_s)
        match answer.message:
            case msg.At(mark=other):
                raise BadInput(f"is at {'no step' if other is None else f'step {other.t}'}")
            case msg.Busy(reason=reason):
                raise DonorBusy(reason)
            case msg.Refused(reason=reason):
                raise BadInput(reason)
        return answer.message, answer.payload


async def fetch_piece(
    source: PieceSource, place: slice, vectors: int, mark: Mark | None
) -> tuple[Mark, list[Tensor]]:
    """A piece of the state, ``vectors`` float32 tensors, and the mark that it is at.

    ``vectors`` 1: the weights alone. ``mark``: only at this mark.

    Raises:
        TransportError, BadInput: why it cannot be had there.
    """
    count = place.stop - place.start
    question = msg.GetState(**source.values(place), mark=mark, weights_only=vectors == 1)
    message, payload = await source.ask(question, 4 * count * vectors)
    if not isinstance(message, msg.Piece) or mark not in (None, message.mark):
        raise BadInput("another piece than the one that was asked for")
    expected = [Expected((count,), "float32", RAW)] * vectors
    return message.mark, unpack(message.tensors, payload, expected)


async def fetch_sum(source: PieceSource, mark: Mark, place: slice, *, exact: bool) -> Tensor:
    """A piece of the sum that was applied at ``mark``: float32, or int64 if ``exact``.

    Raises:
        TransportError, BadInput: why it cannot be had there.
    """
    count = place.stop - place.start
    question = msg.GetDecidedSum(**source.values(place), mark=mark)
    message, payload = await source.ask(question, (8 if exact else 4) * count)
    if not isinstance(message, msg.Ok):
        raise BadInput(f"answered {getattr(message, 'kind', message)}")
    dtype = "int64" if exact else "float32"
    return unpack(message.tensors, payload, [Expected((count,), dtype, RAW)])[0]


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """Digests of all pieces at a mark, uint8 (pieces, 32), and what else belongs to it."""

    digests: Tensor
    applied: int
    totals: Totals


async def fetch_digests(source: PieceSource, mark: Mark, pieces: int, *, stages: int) -> Told:
    """Of all ``pieces`` at ``mark``, and the totals of a run of so many ``stages``.

    Raises:
        TransportError, BadInput: why they cannot be had there.
    """
    question = msg.GetDigests(
        run=source.run_id, to=source.replica.boot, stage=source.stage, mark=mark
    )
    # All pieces are hashed before the answer goes out, which takes the longer the more there are.
    message, payload = await source.ask(question, 1000 * DIGEST_BYTES * pieces)
    if not isinstance(message, msg.Digests) or message.mark != mark:
        raise BadInput("other digests than those that were asked for")
    if len(message.totals) != stages:
        raise BadInput(f"totals of {len(message.totals)} stages, not {stages}")
    expected = [Expected((pieces, DIGEST_BYTES), "uint8", RAW)]
    found = unpack(message.tensors, payload, expected)[0]
    return Told(found, message.applied, tuple(message.totals))


async def fetch_state(
    sources: Sequence[PieceSource],
    *,
    mark: Mark,
    length: int,
    vectors: int,
    progress: Callable[[int], None] = lambda values: None,
) -> list[Tensor]:
    """The flat float32 vectors of a stage at ``mark``; each piece from any of ``sources``.

    ``progress`` is called with the number of values of each piece that has come.

    Raises:
        StateLost: a piece could be had from nobody; says why, for each replica.
    """
    found = [torch.empty(length, dtype=torch.float32) for _ in range(vectors)]
    limiter = anyio.CapacityLimiter(AT_ONCE)
    failed: list[str] = []

    async def one(number: int, place: slice, scope: anyio.CancelScope) -> None:
        async with limiter:
            try:
                piece = await _from_any(sources, number, place, vectors, mark)
            except StateLost as error:
                failed.append(str(error))
                scope.cancel()
                return
            for vector, part in zip(found, piece, strict=True):
                vector[place] = part
            progress(place.stop - place.start)

    async with anyio.create_task_group() as tasks:
        for number, place in enumerate(cut(length, PIECE)):
            tasks.start_soon(one, number, place, tasks.cancel_scope)
    if failed:
        raise StateLost(f"the state could not be fetched: {failed[0]}")
    return found


async def _from_any(
    sources: Sequence[PieceSource], number: int, place: slice, vectors: int, mark: Mark
) -> list[Tensor]:
    turn = number % max(1, len(sources))
    reasons: list[str] = []
    for tries in range(TRIES):
        reasons, busy = [], False
        for source in [*sources[turn:], *sources[:turn]]:
            try:
                return (await fetch_piece(source, place, vectors, mark))[1]
            except (TransportError, BadInput) as error:
                reasons.append(f"{source.replica.peer[-6:]}: {error}")
                busy |= isinstance(error, DonorBusy)
        if not busy:
            break
        await anyio.sleep(min(AGAIN.cap_s, AGAIN.first_s * 2.0**tries))
    raise StateLost("; ".join(reasons) or "nobody is left to ask")


def differing(vectors: Sequence[Tensor], told: Told, size: int) -> list[int]:
    """The pieces of ``vectors`` whose digests are not those that were told."""
    places = cut(vectors[0].numel(), size)
    return [
        number
        for number, place in enumerate(places)
        if digest([vector[place] for vector in vectors]) != bytes(told.digests[number].tolist())
    ]
