"""Replicas of one stage of a small model, without a trainer: they step when they are told to."""

from __future__ import annotations

import functools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import torch
from anyio.abc import TaskGroup

from peers import messages as msg
from peers.donor import Donor
from peers.executor import InlineExecutor
from peers.host import Host
from peers.lane import Lane
from peers.memory import MemoryNetwork, MemoryTransport
from peers.rpc import Caller
from peers.stage import StageOwner
from peers.transport import Frame
from swarm.core.step import Decision
from swarm.core.update import Update
from swarm.manifest import Manifest
from swarm.model.registry import model_spec
from swarm.types import FRESH, Attempt, Mark, Replica, Stamp, Term
from tests.chaos.harness import DIGITS, digits_manifest, run_on_virtual_time

TERM = Term(1, "aa")
STAGE = 1
PIECE = 64


def mark(t: int) -> Mark:
    return FRESH if t == 0 else Mark(TERM, t)


@dataclass
class Peer:
    """A replica that gives its state to whoever asks. ``sums``: also those of its steps.

    ``asked`` and ``gave`` hold the kinds of the requests and replies.
    """

    host: Host
    lane: Lane
    donor: Donor
    sums: bool = True
    asked: list[str] = field(default_factory=list)
    gave: list[str] = field(default_factory=list)

    @property
    def stage(self) -> StageOwner:
        return self.host.stage

    @property
    def me(self) -> Replica:
        return self.host.me

    async def handle(self, sender: str, frame: Frame) -> Frame:
        message = msg.parse_request(frame.header)
        self.asked.append(message.kind)
        reply: msg.Message = msg.Refused(reason="not here")
        payload: list[memoryview] = []
        match message:
            case msg.GetState():
                reply, payload = await self.donor.state(sender, message)
            case msg.GetDigests():
                reply, payload = await self.donor.digests(message)
            case msg.GetDecision():
                reply = await self.donor.decision(message)
            case msg.GetDecidedSum() if self.sums:
                reply, payload = await self.donor.decided_sum(message)
        self.gave.append(reply.kind)  # type: ignore[attr-defined]
        return Frame(msg.header(reply), payload)

    async def step(self, *, skip: bool = False) -> Decision:
        """One step over one microbatch: the same bits in all that do the same steps."""
        decision = await self.lane.control("step", functools.partial(step, self.stage, skip))
        self.donor.advanced()
        return decision


def step(owner: StageOwner, skip: bool) -> Decision:
    before = owner.mark
    assert before is not None
    t, round_ = before.t, Stamp(TERM, 2 * before.t + 2)
    attempt = Attempt(Stamp(TERM, 2 * t + 1), before, 0, frozenset({0, STAGE}))
    generator = torch.Generator().manual_seed(t)
    inputs, targets = torch.rand(4, 32, generator=generator), torch.tensor([1, 2, 3, 4])
    owner.forward_backward(attempt, inputs, targets)
    owner.prepare(round_, frozenset({0}))
    owner.total(alone=True)
    sealed = owner.seal(round_)
    assert sealed is not None
    applied = owner.applied + (not skip)
    decision = Decision(
        before,
        mark(t + 1),
        ((round_, "of stage 0"), (round_, sealed.digest)),
        Update(0.1, 1.0, 0.5, 0.5, skip),
        ({}, {} if skip else {"p": 1}),
        1.0,
        1.0,
        applied,
    )
    assert owner.decide(decision) == mark(t + 1)
    return decision


@dataclass
class Bench:
    """Where replicas meet."""

    manifest: Manifest
    network: MemoryNetwork
    tasks: TaskGroup

    async def replica(self, name: str) -> Peer:
        """A new one, with the initial weights and at no mark."""
        owner = StageOwner(self.manifest, model_spec(self.manifest, {DIGITS}), STAGE)
        transport = MemoryTransport(self.network, name)
        executor = InlineExecutor(lambda work: 0.0)
        host = Host(
            manifest=self.manifest,
            stage=owner,
            me=Replica(name, "bb"),
            caller=Caller(transport, timeout_s=5.0),
            executor=executor,
            tasks=self.tasks,
            rng=random.Random(0),
        )
        lane = Lane(executor, lambda: None)
        self.tasks.start_soon(lane.run)
        peer = Peer(host, lane, Donor(host, lane))
        await transport.serve(peer.handle)
        return peer

    async def member(self, name: str, steps: int = 0) -> Peer:
        """One that has done so many steps."""
        peer = await self.replica(name)
        peer.stage.begin()
        for _ in range(steps):
            await peer.step()
        return peer


def with_bench(
    **changes: Any,
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run an async test on a virtual clock, with a ``Bench`` for its first argument."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def main(failed: list[AssertionError]) -> None:
            manifest = digits_manifest(**{"limits__state_piece": PIECE} | changes)
            async with MemoryNetwork() as network, anyio.create_task_group() as tasks:
                try:
                    await test(Bench(manifest, network, tasks))
                except AssertionError as error:  # raised outside, or the task groups wrap it
                    failed.append(error)
                tasks.cancel_scope.cancel()

        def run() -> None:
            failed: list[AssertionError] = []
            run_on_virtual_time(functools.partial(main, failed), seed=0)
            for error in failed:
                raise error

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate
