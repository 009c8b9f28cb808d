"""A replica in a process of its own, whose gradient is made up; and the floor under averaging.

``python -m scripts._averaging_member FOLDER`` serves over p2pd. A frame of kind ``bench`` from the
lead (``scripts._averaging_lead``) has it hold a gradient, or move as many bytes as a round does
over the same streams in the same pieces, without adding, keeping or looking at them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
from anyio.abc import TaskGroup

from peers.averaging import SENDS_AT_ONCE, cut_pieces, owners_of
from peers.executor import ThreadExecutor
from peers.p2pd import P2pdTransport
from peers.replica import ReplicaServer
from peers.rpc import Caller
from peers.stage import StageOwner
from peers.tensors import RAW, pack
from peers.transport import Frame
from scripts._averaging_group import say
from swarm.codecs import get_codec
from swarm.manifest import Manifest
from swarm.model.registry import model_spec
from swarm.types import Attempt, PeerId, Replica, Stamp, Term

CALL_LIMIT_S = 60.0


class Member:
    """Serves one run at a time; ``m`` is the microbatch that it holds in every step."""

    def __init__(self, transport: P2pdTransport, tasks: TaskGroup) -> None:
        self._transport, self._tasks = transport, tasks
        self._server: ReplicaServer | None = None
        self._lane: anyio.CancelScope | None = None
        self._gradient = torch.empty(0)
        self._m = 0

    async def begin(self, manifest: Manifest, m: int, boot: str) -> None:
        """Be the replica of the run's only stage."""
        if self._lane is not None:
            self._lane.cancel()
        stage = StageOwner(manifest, model_spec(manifest), 0)
        self._server = ReplicaServer(
            manifest,
            stage,
            me=Replica(self._transport.peer, boot),
            caller=Caller(self._transport, timeout_s=CALL_LIMIT_S),
            executor=ThreadExecutor(1),
            tasks=self._tasks,
            rng=random.Random(m),
        )
        self._m = m
        generator = torch.Generator().manual_seed(m)
        self._gradient = torch.randn(stage.model.length, generator=generator) * 1e-3
        if stage.model.accumulators.dtype == torch.int64:
            self._gradient = (self._gradient * manifest.reproducible.scale).to(torch.int64)
        self._lane = anyio.CancelScope()
        self._tasks.start_soon(self._run, self._server, self._lane)

    async def _run(self, server: ReplicaServer, scope: anyio.CancelScope) -> None:
        with scope:
            await server.run()

    async def handle(self, sender: PeerId, frame: Frame) -> Frame:
        match frame.header:
            case {"kind": "bench", "do": "take"}:
                return Frame({"kind": "ok"})
            case {"kind": "bench", "do": "move", "members": members, "codec": codec}:
                await self._move([Replica(*member) for member in members], codec)
                return Frame({"kind": "ok"})
            case {"kind": "bench", "do": "hold", "stamp": [number, boot, n]}:
                await self._hold(Stamp(Term(number, boot), n))
                return Frame({"kind": "ok"})
        assert self._server is not None
        return await self._server.handle(sender, frame)

    async def _hold(self, stamp: Stamp) -> None:
        """As if a microbatch had been counted."""
        assert self._server is not None
        stage = self._server.host.stage

        def hold() -> None:
            assert stage.mark is not None
            stage.model.accumulators.copy_(self._gradient)
            stage.ledger.count(Attempt(stamp, stage.mark, self._m, frozenset({0})))

        await self._server.lane.control("hold", hold)

    async def _move(self, members: Sequence[Replica], codec: str) -> None:
        """A part of each piece to its owner, and a sum of each own piece to all the others."""
        me = self._transport.peer
        pieces = cut_pieces(len(self._gradient), len(members))
        limiter = anyio.CapacityLimiter(SENDS_AT_ONCE)
        async with anyio.create_task_group() as tasks:
            for piece, owner in zip(pieces, owners_of(len(pieces), members), strict=True):
                others = [member.peer for member in members if member.peer != me]
                for peer in others if owner.peer == me else [owner.peer]:
                    tasks.start_soon(self._send, peer, self._payload(piece, codec), limiter)

    def _payload(self, piece: slice, codec: str) -> list[memoryview]:
        """What the piece's encoded form takes, of any content."""
        _, payload = pack([(self._gradient[piece], RAW)])
        if codec == "fp32":  # or integers, which travel as they are
            return payload
        nbytes = get_codec(codec).nbytes(piece.stop - piece.start)
        return [payload[0][:nbytes]]

    async def _send(
        self, peer: PeerId, payload: list[memoryview], limiter: anyio.CapacityLimiter
    ) -> None:
        async with limiter:
            frame = Frame({"kind": "bench", "do": "take"}, payload)
            await self._transport.call(peer, frame, timeout_s=CALL_LIMIT_S)


async def obey(member: Member, transport: P2pdTransport, order: dict[str, Any]) -> dict[str, Any]:
    match order:
        case {"do": "connect", "addresses": addresses}:
            for address in addresses:
                if address not in transport.addresses():
                    await transport.connect(address)
            return {}
        case {"do": "begin", "manifest": tree, "order": peers}:
            manifest = Manifest.from_tree(tree)
            await member.begin(manifest, peers.index(transport.peer), "aa")
            return {}
    raise ValueError(f"not an order: {order}")


async def main(folder: Path) -> None:
    transport = await P2pdTransport.create(identity_path=folder / f"{os.getpid()}.key")
    loop = asyncio.get_running_loop()
    async with anyio.create_task_group() as tasks:
        member = Member(transport, tasks)
        await transport.serve(member.handle)
        say({"address": transport.addresses()[0], "peer": transport.peer})
        read = partial(loop.run_in_executor, None, sys.stdin.readline)
        while line := await read():
            say(await obey(member, transport, json.loads(line)))
        tasks.cancel_scope.cancel()
    await transport.close()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
