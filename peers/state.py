"""A stage's state as it crosses the network: in pieces, each copied at one mark."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import torch
from torch import Tensor

from peers import messages as msg
from peers.rpc import Caller
from peers.tensors import RAW, Expected, unpack
from swarm.errors import BadInput, SwarmError, TransportError
from swarm.types import Mark, Replica

PIECE = 1 << 20
"""Values in one piece: 4 MiB."""

AT_ONCE = 4
"""Pieces on their way at one time."""


class StateLost(SwarmError):
    """No replica of the stage could give its state."""


async def fetch_weights(
    caller: Caller,
    run_id: str,
    replicas: Sequence[Replica],
    *,
    mark: Mark,
    length: int,
    progress: Callable[[int], None] = lambda values: None,
) -> Tensor:
    """The flat float32 weights of a stage at ``mark``; each piece from any of ``replicas``.

    ``progress`` is called with the number of values of each piece that has come.

    Raises:
        StateLost: a piece could be had from nobody; says why, for each replica.
    """
    weights = torch.empty(length, dtype=torch.float32)
    limiter = anyio.CapacityLimiter(AT_ONCE)
    failed: list[str] = []

    async def one(number: int, start: int, scope: anyio.CancelScope) -> None:
        async with limiter:
            count = min(PIECE, length - start)
            turn = number % len(replicas)
            reasons = []
            for replica in [*replicas[turn:], *replicas[:turn]]:
                try:
                    piece = await _piece(caller, run_id, replica, mark, start, count)
                except (TransportError, BadInput) as error:
                    reasons.append(f"{replica.peer[-6:]}: {error}")
                    continue
                weights[start : start + count] = piece
                progress(count)
                return
            failed.append("; ".join(reasons))
            scope.cancel()

    async with anyio.create_task_group() as tasks:
        for number, start in enumerate(range(0, length, PIECE)):
            tasks.start_soon(one, number, start, tasks.cancel_scope)
    if failed:
        raise StateLost(f"weights could not be fetched: {failed[0]}")
    return weights


async def _piece(
    caller: Caller, run_id: str, replica: Replica, mark: Mark, start: int, count: int
) -> Tensor:
    question = msg.GetState(run=run_id, to=replica.boot, mark=mark, start=start, count=count)
    answer = await caller.call(replica.peer, question)
    match answer.message:
        case msg.Ok():
            expected = [Expected((count,), "float32", RAW)]
            return unpack(answer.message.tensors, answer.payload, expected)[0]
        case msg.At(mark=other):
            raise BadInput(f"is at step {other.t if other else 'none'}")
        case msg.Refused(reason=reason):
            raise BadInput(reason)
        case message:
            raise BadInput(f"answered {message.kind}")
