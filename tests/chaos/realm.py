"""A swarm with several who can lead it, on virtual time: trainers come, die and are replaced."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import anyio
from torch import Tensor

from dht.memory import MemoryDirectory, MemoryDirectoryStore
from peers.checkpoints import Checkpoint, CheckpointStore
from peers.entering import Entered
from peers.executor import T
from peers.faults import FaultPlan, FaultyTransport
from peers.leading import Leader, Start
from peers.memory import MemoryNetwork, MemoryTransport
from peers.sources import Copy
from peers.steps import StepDone
from peers.trainer import Trainer
from swarm.manifest import Manifest
from swarm.model.digest import weights_sha256
from swarm.types import FRESH, Mark
from tests.chaos.harness import Nodes, batches_of, identity, run_on_virtual_time


async def at_once(function: Callable[[], T]) -> T:
    """A thread would let virtual time run on."""
    await anyio.lowlevel.checkpoint()
    return function()


class Shelved(Copy):
    """The twin of ``StageReader``."""

    def close(self) -> None:
        return


class MemoryCheckpoints:
    """The twin of ``CheckpointStore``: a disk that outlives the process that writes on it."""

    def __init__(self) -> None:
        self.kept: dict[Mark, Checkpoint] = {}
        self.stages: dict[tuple[Mark, int], Shelved] = {}

    def newest(self) -> Checkpoint | None:
        return self.kept[max(self.kept)] if self.kept else None

    def all(self) -> list[Checkpoint]:
        return [self.kept[mark] for mark in sorted(self.kept)]

    def clean(self) -> None:
        return

    def write(self, mark: Mark, applied: int, totals: Sequence[Mapping[str, int]]) -> MemoryWriter:
        return MemoryWriter(self, mark, applied, tuple(dict(counts) for counts in totals))

    def open_stage(self, checkpoint: Checkpoint, stage: int) -> Shelved:
        return self.stages[checkpoint.mark, stage]


@dataclass
class MemoryWriter:
    """The twin of ``CheckpointWriter``."""

    disk: MemoryCheckpoints
    mark: Mark
    applied: int
    totals: tuple[dict[str, int], ...]
    stages: dict[int, Shelved] = field(default_factory=dict)

    def add_stage(self, stage: int, tensors: Mapping[str, Tensor]) -> None:
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        self.stages[stage] = Shelved(self.mark, self.applied, self.totals, copies)

    def finish(self) -> None:
        for stage, copy in self.stages.items():
            self.disk.stages[self.mark, stage] = copy
        checkpoint = Checkpoint(self.mark, self.applied, self.totals, "", None, ())  # type: ignore[arg-type]
        self.disk.kept[self.mark] = checkpoint

    def abandon(self) -> None:
        return


@dataclass
class Seat:
    """One process that can lead. ``done``: the steps on the way to the run's mark, as it saw them.

    It is the audience of its own leader.
    """

    realm: Realm
    name: int
    transport: FaultyTransport
    scope: anyio.CancelScope
    disk: CheckpointStore | MemoryCheckpoints | None
    leader: Leader | None = None
    done: list[StepDone] = field(default_factory=list)
    reigns: list[Mark] = field(default_factory=list)
    over: bool = False

    @property
    def peer_id(self) -> str:
        return self.transport.peer

    def event(self, line: str) -> None:
        self.realm.events.append(f"{anyio.current_time():.2f} seat {self.name}: {line}")

    def phase(self, text: str) -> None:
        del text

    def leads(self, trainer: Trainer) -> None:
        if trainer.settled and trainer.mark != FRESH:
            self.reigns.append(trainer.mark)

    def step_done(self, trainer: Trainer, done: StepDone) -> None:
        self.done.append(done)
        self.realm.stepped(trainer, done)

    async def complete(self, trainer: Trainer) -> None:
        self.realm.complete(trainer)


@dataclass
class Realm(Nodes):
    """Nodes, and seats that can lead them.

    ``losses``: of each step, as told last (a step done again after a rollback is told again).
    """

    seats: list[Seat] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    steps: list[tuple[Mark, StepDone]] = field(default_factory=list)
    finished: anyio.Event = field(default_factory=anyio.Event)
    weights: str = ""
    last_mark: Mark = FRESH
    totals: tuple[Mapping[str, int], ...] = ()
    boots: int = 0
    _reached: dict[int, anyio.Event] = field(default_factory=dict)

    def seat(
        self,
        start: Start = Start.FRESH,
        *,
        key: int = 1,
        disk: CheckpointStore | MemoryCheckpoints | None = None,
    ) -> Seat:
        """Start a process that leads, or stands by, with trainer key number ``key``."""
        self.boots += 1
        me = identity(key)
        transport = FaultyTransport(MemoryTransport(self.network, me.peer_id), self.faults)
        seat = Seat(self, key, transport, anyio.CancelScope(), disk)
        seat.leader = Leader(
            self.manifest,
            swarm=Entered(
                me, f"{0xABC00 + self.boots:016x}", transport, MemoryDirectory(self.store)
            ),
            batches=batches_of(self.manifest),
            rng=random.Random(self.seed * 7919 + self.boots),
            store=disk,  # type: ignore[arg-type]
            audience=seat,
            blocking=at_once,
        )
        if self.needs is not None:
            seat.leader.needs = self.needs
        self.seats.append(seat)
        self.tasks.start_soon(self._live, seat, start)
        return seat

    async def _live(self, seat: Seat, start: Start) -> None:
        assert seat.leader is not None
        with seat.scope:
            await seat.leader.run(start)
            seat.over = True

    async def kill_seat(self, seat: Seat) -> None:
        """As SIGKILL."""
        self.network.kill(seat.peer_id)
        seat.scope.cancel()

    def leading(self) -> Seat | None:
        """Who trains now, by its own belief; of several the one of the highest term."""
        able = [
            s for s in self.seats if s.leader and s.leader.trainer and not s.scope.cancel_called
        ]
        return max(able, key=lambda s: s.leader.trainer.term, default=None)  # type: ignore[union-attr]

    def stepped(self, trainer: Trainer, done: StepDone) -> None:
        self.losses[done.step] = done.loss
        self.steps.append((trainer.mark, done))
        for step in [step for step in self._reached if step <= done.step + 1]:
            self._reached.pop(step).set()

    async def reaches(self, step: int) -> None:
        """Until so many steps are done, and some microbatches of the next are on their way."""
        if step - 1 not in self.losses:
            await self._reached.setdefault(step, anyio.Event()).wait()
        await anyio.sleep(0.05)

    def complete(self, trainer: Trainer) -> None:
        """The run is at its end: look at the weights while replicas still have them."""
        self.weights, self.last_mark = self._sha256(trainer.mark), trainer.mark
        self.totals = trainer.totals
        self.finished.set()

    def _sha256(self, mark: Mark) -> str:
        tensors = {}
        for stage in range(self.manifest.stages.count):
            found = set()
            for peer in self.of_stage(stage):
                server = peer.node.server
                if server is not None and server.mark == mark:
                    own = server.host.stage.model.tensors()
                    found.add(weights_sha256(own))
                    tensors |= own
            assert len(found) == 1, f"stage {stage}: {len(found)} different weights at one mark"
        return weights_sha256(tensors)


def run_realm(
    manifest: Manifest,
    scenario: Callable[[Realm], Awaitable[None]],
    *,
    seed: int = 0,
    staleness_s: float = 0.0,
    trainers: int = 3,
) -> Realm:
    """Run ``scenario`` in a fresh realm; returns it as it ended."""
    keys = [identity(number + 1).peer_id for number in range(trainers)]
    manifest = manifest.changed({"trainers": keys})
    kept: list[Realm] = []

    async def main() -> None:
        faults = FaultPlan(random.Random(seed + 1))
        async with MemoryNetwork() as network, faults, anyio.create_task_group() as tasks:
            store = MemoryDirectoryStore(staleness_s)
            realm = Realm(manifest, network, store, faults, tasks, seed)
            kept.append(realm)
            await scenario(realm)
            tasks.cancel_scope.cancel()

    run_on_virtual_time(main, seed)
    return kept[0]
