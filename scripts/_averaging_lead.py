"""Plays the trainer of replicas that average: prepare, votes, decision, all of them applied.

``python -m scripts._averaging_lead FOLDER`` is a process with a p2pd of its own, as a trainer is.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from peers import messages as msg
from peers.p2pd import P2pdTransport
from peers.rpc import Caller
from peers.transport import Frame, refusal
from scripts._averaging_group import say
from swarm.core.step import Decision
from swarm.core.update import global_norm, make_update
from swarm.manifest import Manifest
from swarm.types import FRESH, Mark, PeerId, Replica, Stamp, Term

CALL_LIMIT_S = 60.0
TERM = Term(1, "aa")


class Lead:
    """One run of one stage, all of whose replicas hold one microbatch each, and all live."""

    def __init__(self, transport: P2pdTransport) -> None:
        self._transport = transport
        self._caller = Caller(transport, timeout_s=CALL_LIMIT_S)
        self._members: list[Replica] = []
        self._mark = FRESH
        self._n = 0
        self._votes: dict[PeerId, msg.Vote] = {}
        self._voted = anyio.Event()

    async def begin(self, manifest: Manifest, peers: Sequence[PeerId]) -> None:
        self._manifest, self._mark = manifest, FRESH
        self._members = [Replica(peer, "aa") for peer in peers]
        await self._each(self._reset)

    async def _reset(self, member: Replica) -> None:
        message = msg.Reset(
            run=self._manifest.run_id,
            to=member.boot,
            stamp=self._stamp(),
            mark=FRESH,
            begin=True,
        )
        await self._expect(member, message, msg.At)

    async def hold(self) -> None:
        """Have each hold a gradient."""
        await self._each(self._tell_to_hold)

    async def average(self) -> dict[str, float]:
        """Seconds from the first prepare until all have applied, and how they were spent."""
        stamp = self._stamp()
        self._votes, self._voted = {}, anyio.Event()
        began = time.perf_counter()
        await self._each(partial(self._prepare, stamp))
        prepared = time.perf_counter()
        with anyio.fail_after(CALL_LIMIT_S):
            await self._voted.wait()
        voted = time.perf_counter()
        decision = self._decision(stamp)
        await self._each(partial(self._decide, decision))
        applied = time.perf_counter()
        self._mark = decision.to
        return {
            "seconds": applied - began,
            "prepare_s": prepared - began,
            "sum_s": voted - prepared,
            "decide_s": applied - voted,
        }

    async def move(self, codec: str) -> dict[str, float]:
        """Seconds until all have moved the bytes of a round."""
        members = [[member.peer, member.boot] for member in self._members]
        header = {"kind": "bench", "do": "move", "members": members, "codec": codec}
        began = time.perf_counter()
        await self._each(partial(self._bench, header))
        return {"seconds": time.perf_counter() - began}

    async def _tell_to_hold(self, member: Replica) -> None:
        header = {"kind": "bench", "do": "hold", "stamp": [*self._term, self._stamp().n]}
        await self._bench(header, member)

    async def _bench(self, header: dict[str, Any], member: Replica) -> None:
        reply = await self._transport.call(member.peer, Frame(header), timeout_s=CALL_LIMIT_S)
        if reply.header.get("kind") != "ok":
            raise RuntimeError(f"a member answered {dict(reply.header)}")

    async def _prepare(self, stamp: Stamp, member: Replica) -> None:
        message = msg.Prepare(
            run=self._manifest.run_id,
            to=member.boot,
            stamp=stamp,
            mark=self._mark,
            stage=0,
            members=self._members,
            contributors=self._members,
            expected=frozenset({self._members.index(member)}),
        )
        answer = await self._expect(member, message, msg.Prepared)
        if not answer.takes_part:
            raise RuntimeError(f"a member holds {answer.holds}")

    def _decision(self, stamp: Stamp) -> Decision:
        votes = list(self._votes.values())
        if len({vote.digest for vote in votes}) != 1:
            raise RuntimeError("the members have voted for different sums")
        t, norms = self._mark.t, [votes[0].squared_norm]
        update = make_update(self._manifest.optimizer, t, t, norms, votes[0].finite)
        counts = ({member.peer: 1 for member in self._members},)
        rounds = ((stamp, votes[0].digest),)
        to = Mark(TERM, t + 1)
        return Decision(self._mark, to, rounds, update, counts, 1.0, global_norm(norms), t + 1)

    async def _decide(self, decision: Decision, member: Replica) -> None:
        message = msg.Decide(
            run=self._manifest.run_id,
            to=member.boot,
            stamp=self._stamp(),
            decision=msg.WireDecision.of(decision),
        )
        answer = await self._expect(member, message, msg.At)
        if answer.mark != decision.to:
            raise RuntimeError(f"a member did not apply the decision: it is at {answer.mark}")

    async def handle(self, sender: PeerId, frame: Frame) -> Frame:
        message = msg.parse_request(frame.header)
        if not isinstance(message, msg.Vote):
            return refusal("only votes are wanted here")
        self._votes[sender] = message
        if len(self._votes) == len(self._members):
            self._voted.set()
        return Frame(msg.header(msg.Ok()))

    async def _each(self, do: Any) -> None:
        async with anyio.create_task_group() as tasks:
            for member in self._members:
                tasks.start_soon(do, member)

    async def _expect(self, member: Replica, message: msg.Message, kind: type[Any]) -> Any:
        answer = (await self._caller.call(member.peer, message)).message
        if not isinstance(answer, kind):
            raise RuntimeError(f"{message.kind} was answered with {answer}")
        return answer

    @property
    def _term(self) -> tuple[int, str]:
        return TERM.number, TERM.boot

    def _stamp(self) -> Stamp:
        self._n += 1
        return Stamp(TERM, self._n)


async def obey(lead: Lead, transport: P2pdTransport, order: dict[str, Any]) -> dict[str, Any]:
    match order:
        case {"do": "connect", "addresses": addresses}:
            for address in addresses:
                await transport.connect(address)
            return {}
        case {"do": "begin", "manifest": tree, "order": peers}:
            await lead.begin(Manifest.from_tree(tree), peers)
            return {}
        case {"do": "hold"}:
            await lead.hold()
            return {}
        case {"do": "average"}:
            return await lead.average()
        case {"do": "move", "codec": codec}:
            return await lead.move(codec)
    raise ValueError(f"not an order: {order}")


async def main(folder: Path) -> None:
    transport = await P2pdTransport.create(identity_path=folder / f"{os.getpid()}.key")
    lead = Lead(transport)
    await transport.serve(lead.handle)
    say({"address": transport.addresses()[0], "peer": transport.peer})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        say(await obey(lead, transport, json.loads(line)))
    await transport.close()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
