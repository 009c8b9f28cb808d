"""A swarm in one process on virtual time: real trainer, real nodes, memory twins, no threads.

Everything that decides is the production code; only transport, directory, executor and clock are
twins. On trio's MockClock an hour costs milliseconds, and a seed fixes the schedule.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import anyio
import torch
import trio
import trio.testing
from anyio.abc import TaskGroup

from dht.identity import Identity
from dht.memory import MemoryDirectory, MemoryDirectoryStore
from peers.entering import Entered
from peers.executor import InlineExecutor
from peers.faults import Drop, FaultPlan, FaultyTransport, Rule
from peers.memory import MemoryNetwork, MemoryTransport
from peers.node import Choice, Node
from peers.rpc import Caller
from peers.running import expected_error
from peers.shelf import Shelf
from peers.stage import StageOwner
from peers.steps import StepDone
from peers.trainer import Trainer
from peers.transport import Frame, refusal
from swarm.core.rebalancing import Need
from swarm.data import Batches, load_batches
from swarm.errors import SwarmError
from swarm.manifest import Manifest
from swarm.model.digest import weights_sha256
from swarm.model.registry import model_spec
from swarm.reference import ReferenceRun, run_reference
from swarm.types import PeerId, Term

DIGITS = "tests.digits_model:mlp"
SAMPLES = "tests.digits_model:digits"
TINY, POINTS = "tests.digits_model:tiny", "tests.digits_model:points"
ALLOWED = frozenset({DIGITS, SAMPLES, TINY, POINTS})
DAY_S = 86_400.0


def digits_manifest(**changes: object) -> Manifest:
    """A small MLP on scikit-learn's digits: cheap enough for thousands of microbatches."""
    tree: dict[str, object] = {
        "name": "digits",
        "model.kind": DIGITS,
        "data.source": f"python:{SAMPLES}",
        "batch.microbatch": 4,
        "batch.microbatches": 8,
        "optimizer.lr": 0.01,
        "optimizer.warmup_steps": 0,
        "stages.count": 2,
    }
    given = {name.replace("__", "."): value for name, value in changes.items()}
    return Manifest.from_tree({}).changed(tree | given)


def identity(number: int) -> Identity:
    """The same peer ids in every run of a test."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Identity(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big")))


@dataclass
class Peer:
    """One node of the harness. ``unit_s``: seconds of work for a forward; a backward takes two.

    ``node`` is another one after a move.
    """

    node: Node
    executor: InlineExecutor
    transport: FaultyTransport
    scope: anyio.CancelScope
    unit_s: float
    key: int

    @property
    def peer_id(self) -> PeerId:
        return self.node.me.peer

    @property
    def stage(self) -> StageOwner:
        assert self.node.server is not None
        return self.node.server.host.stage

    def slow_down(self, factor: float) -> None:
        self.unit_s *= factor


@dataclass
class Nodes:
    """The nodes of a swarm. ``faults`` acts on every link; ``peers`` in order of their start."""

    manifest: Manifest
    network: MemoryNetwork
    store: MemoryDirectoryStore
    faults: FaultPlan
    tasks: TaskGroup
    seed: int
    peers: dict[str, Peer] = field(default_factory=dict, kw_only=True)
    events: list[str] = field(default_factory=list, kw_only=True)
    on_start: Callable[[Peer], None] | None = field(default=None, kw_only=True)
    needs: Sequence[Need] | None = field(default=None, kw_only=True)
    """What each stage takes: nodes move by that. None: they stay."""
    started: int = field(default=0, kw_only=True)

    def of_stage(self, stage: int) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.node.stage == stage]

    async def start(
        self,
        stage: int,
        *,
        unit_s: float = 0.01,
        key: int | None = None,
        may_fail: list[str] | None = None,
        shelves: Path | None = None,
        memory_bytes: int = 1 << 40,
    ) -> Peer:
        """Start a node and wait until it serves. ``on_start`` may tamper with it, and again with
        what it is after a move.

        ``key``: of an earlier node, which has been killed. ``may_fail`` takes the error that the
        node ends with; without it an error ends the test. ``shelves``: the disk of all nodes.
        """
        self.started += 1
        number = self.started if key is None else key
        me = identity(100 + number)
        peer: Peer

        def cost_s(work: str) -> float:
            share = {"forward": 1.0, "backward": 2.0, "forward_backward": 3.0, "evaluate": 1.0}
            return share.get(work, 0.0) * peer.unit_s

        executor = InlineExecutor(cost_s)
        transport = FaultyTransport(MemoryTransport(self.network, me.peer_id), self.faults)
        directory, rng = MemoryDirectory(self.store), random.Random(self.seed * 1000 + self.started)

        def node_at(stage: int) -> Node:
            node = Node(
                self.manifest,
                model_spec(self.manifest, ALLOWED),
                stage,
                swarm=Entered(me, f"{self.started:016x}", transport, directory),
                executor=executor,
                rng=rng,
                say=lambda line: self.events.append(f"node {me.peer_id[-6:]}: {line}"),
                shelf=None
                if shelves is None
                else Shelf(shelves / me.peer_id, self.manifest.run_id, stage),
            )
            if self.needs is not None:
                node.choice = Choice(self.needs, memory_bytes)
            return node

        peer = Peer(node_at(stage), executor, transport, anyio.CancelScope(), unit_s, number)
        self.peers[f"{me.peer_id} {self.started}"] = peer

        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            with peer.scope:
                try:
                    await peer.node.run(task_status=task_status)  # type: ignore[arg-type]
                    while peer.node.moves_to is not None:
                        self.started += 1
                        before, peer.node = peer.node, node_at(peer.node.moves_to)
                        peer.node.sequence = before.sequence
                        del before
                        async with anyio.create_task_group() as tasks:
                            await tasks.start(peer.node.run)
                            if self.on_start is not None:
                                self.on_start(peer)
                except* SwarmError as errors:
                    if may_fail is None:
                        raise
                    may_fail.append(str(expected_error(errors)))

        await self.tasks.start(live)
        if self.on_start is not None:
            self.on_start(peer)
        return peer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Look every tenth of a second."""
        while not condition():  # noqa: ASYNC110 (virtual time)
            await anyio.sleep(0.1)

    async def kill(self, peer: Peer) -> None:
        """As SIGKILL: nothing is said to anyone."""
        self.network.kill(peer.node.me.peer)
        if peer.node.server is not None:
            peer.node.server.host.trainer = None  # no goodbye
        peer.scope.cancel()

    def freeze(self, peer: Peer) -> Rule:
        """As SIGSTOP or a pulled cable: nothing comes through, either way, until ``thaw``."""
        ends = peer.peer_id
        return self.faults.add(lambda link, _: ends in (link.source, link.target), Drop())

    def thaw(self, frozen: Rule) -> None:
        self.faults.remove(frozen)

    async def refuse(self, peer: Peer) -> None:
        """It answers everything with a refusal from now on."""

        async def no(sender: PeerId, frame: Frame) -> Frame:
            del sender, frame
            return refusal("out of order")

        await peer.transport.serve(no)

    async def obey(self, peer: Peer) -> None:
        """The end of ``refuse``."""
        assert peer.node.server is not None
        await peer.transport.serve(peer.node.server.handle)


@dataclass
class World(Nodes):
    """A running swarm that one trainer leads from the start."""

    trainer: Trainer
    done: list[StepDone] = field(default_factory=list)
    _reached: dict[int, anyio.Event] = field(default_factory=dict)

    def may_move(self, needs: Sequence[Need]) -> None:
        """Who is started from now on moves; trainer and nodes know what each stage takes."""
        self.needs = self.trainer.moves.needs = needs

    async def start_all(self, replicas: int) -> None:
        """So many replicas of each stage, all the same; returns when step 0 may begin."""
        for _ in range(replicas):
            for stage in range(self.manifest.stages.count):
                await self.start(stage)
        await self.trainer.wait_for_start()

    async def wait_for(self, stage: int, replicas: int) -> None:
        """Until the trainer takes so many replicas of ``stage`` for ready."""
        while len(self.trainer.ready(stage)) < replicas:
            self.trainer.admissions.ask()
            await anyio.sleep(0.1)

    async def train(self, steps: int) -> None:
        """Steps one after the other; what came of them is in ``done``."""
        for _ in range(steps):
            self.done.append(await self.trainer.step())
            reached = self._reached.pop(len(self.done), None)
            if reached is not None:
                reached.set()

    async def reaches(self, steps: int) -> None:
        """Until so many steps are done and some microbatches of the next are on their way."""
        if len(self.done) < steps:
            await self._reached.setdefault(steps, anyio.Event()).wait()
        await anyio.sleep(0.05)

    def sha256(self) -> str:
        """Of the weights of one replica per stage at the trainer's mark; all must be equal."""
        tensors = {}
        for stage in range(self.manifest.stages.count):
            found = set()
            for peer in self.peers.values():
                server = peer.node.server
                if peer.node.stage == stage and server and server.mark == self.trainer.mark:
                    own = server.host.stage.model.tensors()
                    found.add(weights_sha256(own))
                    tensors |= own
            assert len(found) == 1, f"stage {stage}: {len(found)} different weights at one mark"
        return weights_sha256(tensors)


def reference(manifest: Manifest, steps: int) -> ReferenceRun:
    """The same run in one process. Many tests compare with the same one: do not change it."""
    return _reference(manifest.canonical(), steps)


@lru_cache(maxsize=64)
def _reference(canonical: bytes, steps: int) -> ReferenceRun:
    manifest = Manifest.from_canonical(canonical)
    return run_reference(manifest, steps=steps, clock=lambda: 0.0, allow=ALLOWED)


def batches_of(manifest: Manifest) -> Batches:
    batches, _ = load_batches(
        manifest.data.source,
        expected_sha256="",
        holdout=manifest.data.holdout,
        sequence=manifest.model.sequence,
        microbatch=manifest.batch.microbatch,
        seed=manifest.seed,
        allow=ALLOWED,
    )
    return batches


def run_world(
    manifest: Manifest,
    scenario: Callable[[World], Awaitable[None]],
    *,
    seed: int = 0,
    staleness_s: float = 0.0,
) -> World:
    """Run ``scenario`` in a fresh world on virtual time; returns the world as it ended.

    ``staleness_s``: what the directory shows is so old.
    """
    me = identity(1)
    manifest = manifest.changed({"trainers": [me.peer_id]})
    kept: list[World] = []

    async def main() -> None:
        faults = FaultPlan(random.Random(seed + 1))
        async with MemoryNetwork() as network, faults, anyio.create_task_group() as tasks:
            rng = random.Random(seed)
            transport = FaultyTransport(MemoryTransport(network, me.peer_id), faults)
            trainer = Trainer(
                manifest,
                caller=Caller(transport, timeout_s=manifest.periods.call_s),
                batches=batches_of(manifest),
                term=Term(1, f"{0xABC:016x}"),
                tasks=tasks,
                rng=rng,
            )
            store = MemoryDirectoryStore(staleness_s)
            world = World(manifest, network, store, faults, tasks, seed, trainer)
            kept.append(world)
            trainer.on_event = world.events.append
            await transport.serve(trainer.inbox.handle)
            tasks.start_soon(trainer.admissions.watch, MemoryDirectory(store))
            await scenario(world)
            tasks.cancel_scope.cancel()

    run_on_virtual_time(main, seed)
    return kept[0]


def run_on_virtual_time(main: Callable[[], Awaitable[None]], seed: int) -> None:
    """On trio's MockClock, with the order of tasks fixed by ``seed``. At most a virtual day."""

    async def limited() -> None:
        with anyio.fail_after(DAY_S):
            await main()

    scheduler = trio._core._run  # type: ignore[attr-defined]
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other cost more than these tensors
    try:
        trio.run(limited, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        torch.set_num_threads(threads)
