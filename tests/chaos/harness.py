"""A swarm in one process on virtual time: real trainer, real nodes, memory twins, no threads.

Everything that decides is the production code; only transport, directory, executor and clock are
twins. On trio's MockClock an hour costs milliseconds, and a seed fixes the schedule.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import trio
import trio.testing
from anyio.abc import TaskGroup

from dht.identity import Identity
from dht.memory import MemoryDirectory, MemoryDirectoryStore
from peers.entering import Entered
from peers.executor import InlineExecutor
from peers.faults import FaultPlan, FaultyTransport
from peers.memory import MemoryNetwork, MemoryTransport
from peers.node import Node
from peers.rpc import Caller
from peers.trainer import Trainer
from swarm.data import Batches, load_batches
from swarm.manifest import Manifest
from swarm.model.digest import weights_sha256
from swarm.model.registry import model_spec

DIGITS = "tests.digits_model:mlp"
SAMPLES = "tests.digits_model:digits"


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
    return Manifest.from_tree({}).changed(tree | {k.replace("__", "."): v for k, v in changes.items()})


def identity(number: int) -> Identity:
    """The same peer ids in every run of a test."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Identity(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big")))


@dataclass
class Peer:
    """One node of the harness. ``unit_s``: seconds of work for a forward; a backward takes two."""

    node: Node
    executor: InlineExecutor
    scope: anyio.CancelScope
    unit_s: float

    def slow_down(self, factor: float) -> None:
        self.unit_s *= factor


@dataclass
class World:
    """A running swarm. ``faults`` acts on every link; ``peers`` by name, in order of start."""

    manifest: Manifest
    network: MemoryNetwork
    store: MemoryDirectoryStore
    faults: FaultPlan
    tasks: TaskGroup
    trainer: Trainer
    seed: int
    peers: dict[str, Peer] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    started: int = 0

    async def start(self, stage: int, *, unit_s: float = 0.01, key: int | None = None) -> Peer:
        """Start a node and wait until it serves."""
        self.started += 1
        me = identity(100 + (key if key is not None else self.started))
        peer: Peer

        def cost_s(work: str) -> float:
            share = {"forward": 1.0, "backward": 2.0, "forward_backward": 3.0, "evaluate": 1.0}
            return share.get(work, 0.0) * peer.unit_s

        executor = InlineExecutor(cost_s)
        transport = FaultyTransport(MemoryTransport(self.network, me.peer_id), self.faults)
        node = Node(
            self.manifest,
            model_spec(self.manifest, {DIGITS}),
            stage,
            swarm=Entered(me, f"{self.started:016x}", transport, MemoryDirectory(self.store)),
            executor=executor,
            rng=random.Random(self.seed * 1000 + self.started),
            say=lambda line: self.events.append(f"node {me.peer_id[-6:]}: {line}"),
        )
        peer = Peer(node, executor, anyio.CancelScope(), unit_s)
        self.peers[me.peer_id] = peer

        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            with peer.scope:
                await node.run(task_status=task_status)  # type: ignore[arg-type]

        await self.tasks.start(live)
        return peer

    async def kill(self, peer: Peer) -> None:
        """As SIGKILL: nothing is said to anyone."""
        self.network.kill(peer.node.me.peer)
        peer.node.server.host.trainer = None  # type: ignore[union-attr]  # no goodbye
        peer.scope.cancel()

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


def batches_of(manifest: Manifest) -> Batches:
    batches, _ = load_batches(
        manifest.data.source,
        expected_sha256="",
        holdout=manifest.data.holdout,
        sequence=manifest.model.sequence,
        microbatch=manifest.batch.microbatch,
        seed=manifest.seed,
        allow={SAMPLES},
    )
    return batches


def run_world(
    manifest: Manifest, scenario: Callable[[World], Awaitable[None]], *, seed: int = 0
) -> World:
    """Run ``scenario`` in a fresh world on virtual time; returns the world as it ended."""
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
                boot=f"{0xABC:016x}",
                tasks=tasks,
                rng=rng,
            )
            store = MemoryDirectoryStore()
            world = World(manifest, network, store, faults, tasks, trainer, seed)
            kept.append(world)
            trainer.on_event = world.events.append
            await transport.serve(trainer.handle)
            tasks.start_soon(trainer.admissions.watch, MemoryDirectory(store))
            await scenario(world)
            tasks.cancel_scope.cancel()

    random_ = trio._core._run._r  # type: ignore[attr-defined]
    random_.seed(seed)
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return kept[0]
