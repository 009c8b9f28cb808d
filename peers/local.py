"""``swarm local``: a whole swarm on this machine, each peer a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio.abc import Process

from peers.coordinator import Coordinator, Plan, Result
from peers.entering import Entry
from peers.running import PARENT_VARIABLE
from peers.status import Monitor
from swarm.errors import UserError
from swarm.manifest import Manifest

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
STOP_S = 6.0
"""How long a node may take to leave before it is killed."""


@dataclass(slots=True)
class Child:
    """A node process of the local swarm."""

    name: str
    stage: int
    process: Process
    log: Path


@dataclass(slots=True)
class LocalSwarm:
    """The node processes of a local swarm. ``event`` hears of those that end too early;
    ``training`` says whether the run has begun."""

    folder: Path
    event: Callable[[str], None]
    training: Callable[[], bool]
    allow: frozenset[str] = frozenset()
    children: list[Child] = field(default_factory=list)
    ending: bool = False

    async def start(self, manifest: Manifest, addresses: list[str], replicas: int) -> None:
        """Start ``replicas`` nodes for each stage."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for replica in range(replicas):
            for stage in range(manifest.stages.count):
                await self._spawn(manifest, addresses[0], stage, replica)

    async def _spawn(self, manifest: Manifest, address: str, stage: int, replica: int) -> None:
        name = f"node-{stage}-{replica}"
        log = self.folder / f"{name}.log"
        command = [
            *(sys.executable, "-m", "peers.cli", "node", "--join", address),
            *("--run", manifest.run_id, "--stage", str(stage), "--listen", LOOPBACK),
            *("--identity", str(self.folder / f"{name}.key"), "--threads", "1"),
        ]
        for model in sorted(self.allow):
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
        self.children.append(Child(name, stage, process, log))

    async def watch(self) -> None:
        """Tell of nodes that end while the swarm runs.

        Raises:
            UserError: a node could not start at all.
        """

        async def one(child: Child) -> None:
            code = await child.process.wait()
            if self.ending or code == 0:
                return
            if code == 2:
                raise UserError(f"{child.name} could not start: {last_line(child.log)}")
            if not self.training():
                raise UserError(f"{child.name} ended before training began: {last_line(child.log)}")
            how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            self.event(f"{child.name} ended {how}; its log is {child.log}")

        async with anyio.create_task_group() as tasks:
            for child in self.children:
                tasks.start_soon(one, child)

    async def stop(self) -> None:
        """End all nodes: asked first, killed after ``STOP_S``. None is left."""
        self.ending = True
        with anyio.CancelScope(shield=True):
            for child in self.children:
                # Two signals: it need not finish anything any more.
                _signal(child.process, signal.SIGINT)
                _signal(child.process, signal.SIGTERM)
                _signal(child.process, signal.SIGCONT)  # one that is stopped would not hear it
            with anyio.move_on_after(STOP_S):
                for child in self.children:
                    await child.process.wait()
            for child in self.children:
                if child.process.returncode is None:
                    _signal(child.process, signal.SIGKILL)
                    await child.process.wait()


async def run_local(
    plan: Plan, *, replicas: int, out: Path, monitor: Monitor, entry: Entry
) -> Result:
    """A coordinator in this process and ``replicas`` nodes a stage, until the run is complete."""
    swarm = LocalSwarm(out / "nodes", monitor.event, lambda: monitor.training, plan.allow)
    opened = anyio.Event()
    found: list[tuple[Manifest, list[str]]] = []

    def on_open(manifest: Manifest, addresses: list[str]) -> None:
        found.append((manifest, addresses))
        opened.set()

    async def nodes() -> None:
        await opened.wait()
        await swarm.start(*found[0], replicas)
        await swarm.watch()

    coordinator = Coordinator(plan, out=out, monitor=monitor, on_open=on_open)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(swarm.stop)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(nodes)
            result = await coordinator.run(entry)
            swarm.ending = True
            tasks.cancel_scope.cancel()
    return result


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
