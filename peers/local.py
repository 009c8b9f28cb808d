"""``swarm local``: a whole swarm on this machine, each peer a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import Process, TaskGroup

from dht.identity import Identity
from peers.coordinator import Coordinator, Plan, Result
from peers.entering import LOOPBACK, Entry
from peers.kills import Killer, Kills
from peers.running import PARENT_VARIABLE
from peers.status import Monitor
from peers.transport import TransportKind
from swarm.errors import UserError
from swarm.manifest import Manifest
from swarm.types import PeerId

STOP_S = 6.0
"""How long a node may take to leave before it is killed."""


@dataclass(slots=True)
class Child:
    """A node process of the local swarm, started for ``stage``. ``killed``: on purpose."""

    name: str
    stage: int
    process: Process
    log: Path
    key: Path
    killed: bool = False

    @property
    def peer(self) -> PeerId:
        """Its peer id; empty until it has made its key."""
        return Identity.load_or_create(self.key)[0].peer_id if self.key.exists() else ""


class LocalSwarm:
    """The node processes of a local swarm, by name: all that were ever started.

    Args:
        folder: for their keys and logs.
        event: hears of those that end too early.
        training: says whether the run has begun.
        allow: code of the user's that they may run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        event: Callable[[str], None],
        training: Callable[[], bool],
        allow: frozenset[str] = frozenset(),
    ) -> None:
        self.children: dict[str, Child] = {}
        self.ending = False
        self._folder, self._event, self._training, self._allow = folder, event, training, allow
        self._words: tuple[str, ...] = ()
        self._tasks: TaskGroup | None = None

    async def run(
        self,
        manifest: Manifest,
        address: str,
        replicas: int,
        transport: TransportKind = TransportKind.AUTO,
    ) -> None:
        """Start ``replicas`` nodes for each stage, and tell of nodes that end.

        Raises:
            UserError: a node could not start at all.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._words = (
            *("--join", address, "--run", manifest.run_id),
            *("--listen", LOOPBACK, "--transport", transport.value),
        )
        async with anyio.create_task_group() as self._tasks:
            for _ in range(replicas):
                for stage in range(manifest.stages.count):
                    await self.spawn(stage)

    async def spawn(self, stage: int) -> Child:
        """Start one more node for ``stage``, once ``run`` has begun. It may move later.

        It is told the stage: the announcement of one that was killed lives on for a while, so
        that by the directory no stage lacks anybody.
        """
        assert self._tasks is not None
        number = sum(child.stage == stage for child in self.children.values())
        name = f"node-{stage}-{number}"
        log, key = self._folder / f"{name}.log", self._folder / f"{name}.key"
        command = [
            *(sys.executable, "-m", "peers.cli", "node", *self._words),
            *("--stage", str(stage), "--identity", str(key), "--threads", "1"),
        ]
        for model in sorted(self._allow):
            command += ["--allow-model", model]
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            # Its own session: Ctrl-C in the terminal is ours to pass on, once.
            process = await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        child = self.children[name] = Child(name, stage, process, log, key)
        self._tasks.start_soon(self._watch, child)
        return child

    async def _watch(self, child: Child) -> None:
        """Tell of ``child`` when it ends, unless it was to."""
        code = await child.process.wait()
        if self.ending or child.killed or code == 0:
            return
        if not self._training():
            what = "could not start" if code == 2 else "ended before training began"
            raise UserError(f"{child.name} {what}: {last_line(child.log)}")
        if code == 2:
            self._event(f"{child.name} could not start: {last_line(child.log)}")
            return
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        self._event(f"{child.name} ended {how}; its log is {child.log}")

    def living(self) -> list[Child]:
        """The nodes that run, in the order of their start."""
        children = self.children.values()
        return [c for c in children if not c.killed and c.process.returncode is None]

    def kill(self, child: Child) -> None:
        """By SIGKILL, so that it cannot finish or tell anything."""
        child.killed = True
        _signal(child.process, signal.SIGKILL)

    async def stop(self) -> None:
        """End all nodes: asked first, killed after ``STOP_S``. None is left."""
        self.ending = True
        children = list(self.children.values())
        with anyio.CancelScope(shield=True):
            for child in children:
                # Two signals: it need not finish anything any more.
                _signal(child.process, signal.SIGINT)
                _signal(child.process, signal.SIGTERM)
                _signal(child.process, signal.SIGCONT)  # one that is stopped would not hear it
            with anyio.move_on_after(STOP_S):
                for child in children:
                    await child.process.wait()
            for child in children:
                if child.process.returncode is None:
                    _signal(child.process, signal.SIGKILL)
                    await child.process.wait()


async def run_local(
    plan: Plan,
    *,
    replicas: int,
    out: Path,
    monitor: Monitor,
    entry: Entry,
    kills: Kills | None = None,
) -> tuple[Result, int]:
    """A coordinator in this process and ``replicas`` nodes a stage, until the run is complete.

    Returns what came of it, and how many nodes were killed by ``kills``.
    """
    swarm = LocalSwarm(
        out / "nodes", event=monitor.event, training=lambda: monitor.training, allow=plan.allow
    )
    killer = None if kills is None else Killer(kills, swarm, monitor)
    opened = anyio.Event()
    found: list[tuple[Manifest, list[str]]] = []

    def on_open(manifest: Manifest, addresses: list[str]) -> None:
        found.append((manifest, addresses))
        opened.set()

    async def nodes() -> None:
        await opened.wait()
        manifest, addresses = found[0]
        await swarm.run(manifest, addresses[0], replicas, entry.transport)

    coordinator = Coordinator(plan, out=out, monitor=monitor, on_open=on_open)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(swarm.stop)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(nodes)
            if killer is not None:
                tasks.start_soon(killer.run)
            result = await coordinator.run(entry)
            swarm.ending = True
            tasks.cancel_scope.cancel()
    return result, 0 if killer is None else killer.killed


def last_line(path: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _signal(process: Process, number: signal.Signals) -> None:
    if process.returncode is None:
        try:
            process.send_signal(number)
        except ProcessLookupError:
            return
