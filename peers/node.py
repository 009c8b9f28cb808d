"""A node: one process that serves one stage. Announces itself, answers, says what it does."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import anyio
from anyio.abc import TaskGroup, TaskStatus

from dht.envelope import wall_clock
from dht.records import PeerRecord, encode
from peers import messages as msg
from peers.balance import Meter
from peers.draining import Drain
from peers.entering import Entered
from peers.executor import Executor
from peers.mover import Mover
from peers.replica import QUIET_S, ReplicaServer
from peers.rpc import Caller
from peers.shelf import Shelf
from peers.stage import StageOwner
from peers.transport import Frame, refusal
from swarm import __version__
from swarm.core.rebalancing import Need
from swarm.errors import SwarmError
from swarm.manifest import Manifest
from swarm.model.device import CPU, Device
from swarm.model.memory import Plan
from swarm.model.spec import ModelSpec
from swarm.types import FRESH, PeerId, Replica

log = logging.getLogger("swarm.node")

GOODBYE_S = 2.0
WARN_S = 60.0
"""How long the same warning is not repeated."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a node goes by when it chooses a stage: what each takes, and the bytes that it has."""

    needs: Sequence[Need]
    memory_bytes: int


class Node:
    """Serves ``stage`` of a run until the run is over, it moves, or it is cancelled.

    ``say`` is called with one line of plain words for each change of state. ``shelf`` keeps a
    copy for checkpoints on this machine's disk. ``choice``: by what to find out whether another
    stage needs it more; None: it stays. ``moves_to``: where it has been let go to, at the end.
    ``sequence``: of its last announcement; whoever serves the next stage goes on from there.
    ``device``: what it computes on. ``plan``: how it keeps within the memory there.
    ``paused``: no new work is taken, here or wherever it moves to. ``on_pass`` is told how long
    each pass took, in seconds.
    """

    def __init__(
        self,
        manifest: Manifest,
        spec: ModelSpec,
        stage: int,
        *,
        swarm: Entered,
        executor: Executor,
        rng: random.Random,
        say: Callable[[str], None] = log.info,
        shelf: Shelf | None = None,
    ) -> None:
        self.manifest, self.stage = manifest, stage
        self.choice: Choice | None = None
        self.device: Device = CPU
        self.plan: Plan | None = None
        self.paused = False
        self.on_pass: Callable[[float], object] = lambda seconds: None
        self.moves_to: int | None = None
        self.me = Replica(swarm.identity.peer_id, swarm.boot)
        self._spec, self._transport, self._directory = spec, swarm.transport, swarm.directory
        self._identity, self._executor = swarm.identity, executor
        self._addresses = swarm.addresses
        self._rng, self._say, self._shelf = rng, say, shelf
        self.sequence = 0
        self._change = anyio.Event()
        self._leaving = anyio.Event()
        self._moving = anyio.CancelScope()
        self._meter: Meter | None = None
        self.server: ReplicaServer | None = None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> str:
        """Until the trainer says that the run is over, or we have left; returns why it ended.

        Raises:
            TooSlow: this machine cannot keep up with the run.
        """
        build = partial(StageOwner, self.manifest, self._spec, self.stage)
        build = partial(build, device=self.device, plan=self.plan)
        owner = await self._executor.lane("build", build)
        async with anyio.create_task_group() as tasks:
            server = self.server = self._serve(owner, tasks)
            if self._shelf is not None:
                names = tuple(owner.model.state())
                get = partial(self._shelf.get, owner.model.length, names)
                server.donor.shelf = self._shelf
                server.donor.kept = await self._executor.side(get)
            await self._transport.serve(server.handle)
            tasks.start_soon(server.run)
            tasks.start_soon(self._announce_for_ever)
            tasks.start_soon(self._watch_quiet)
            tasks.start_soon(self._leave_when_asked)
            tasks.start_soon(self._move_when_granted)
            self._say(
                f"stage {self.stage}: {owner.model.length:,} parameters, layers "
                f"{owner.model.layers.start} to {owner.model.layers.stop - 1}; waits for a trainer"
            )
            task_status.started()
            try:
                await server.orders.finished.wait()
            finally:
                await self._goodbye()
                with anyio.CancelScope(shield=True):
                    await self._transport.serve(_gone)
            tasks.cancel_scope.cancel()
        reason = server.orders.finish_reason
        if self.moves_to is not None and (self._leaving.is_set() or reason != self._moving_to()):
            self.moves_to = None  # the owner wants to stop, or the run has ended
        self._say_what_counted(server)
        return reason

    def pause(self, paused: bool) -> None:
        """Take no new work, or take it again."""
        self.paused = paused
        if self.server is not None:
            self.server.passes.paused = paused

    def _serve(self, owner: StageOwner, tasks: TaskGroup) -> ReplicaServer:
        server = ReplicaServer(
            self.manifest,
            owner,
            me=self.me,
            caller=Caller(self._transport, timeout_s=self.manifest.periods.call_s),
            executor=self._executor,
            tasks=tasks,
            rng=self._rng,
        )
        server.passes.paused = self.paused
        server.passes.on_pass = lambda seconds: self.on_pass(seconds)
        self._meter = Meter(server.passes.counters, self.manifest.batch.microbatch)
        server.orders.on_change = self._changed
        server.addresses = self._addresses
        return server

    def _say_what_counted(self, server: ReplicaServer) -> None:
        counted = server.host.stage.totals[self.stage].get(self.me.peer, 0)
        samples = counted * self.manifest.batch.microbatch
        self._say(f"counted in this run for this peer: {counted} microbatches, {samples} samples")

    def _changed(self, line: str) -> None:
        self._say(line)
        self._change.set()

    # -- leaving ------------------------------------------------------------------------------

    def leave(self) -> None:
        """Go, but leave no work undone: when the step under way is applied, or ``drain_s``."""
        self._leaving.set()

    async def _leave_when_asked(self) -> None:
        await self._leaving.wait()
        self._moving.cancel()
        server = self.server
        assert server is not None
        server.draining = True
        self._changed("leaving: the step under way is finished first; Ctrl-C again leaves at once")
        with anyio.move_on_after(self.manifest.periods.drain_s) as limit:
            await Drain(server, None, say=self._say).let_go()
        step = "" if server.mark is None else f" after step {server.mark.t}"
        why = "; it took too long to finish what was under way" if limit.cancelled_caught else ""
        server.orders.finish_reason = f"left{step}{why}"
        server.orders.finished.set()

    # -- moving -------------------------------------------------------------------------------

    async def _move_when_granted(self) -> None:
        manifest, choice = self.manifest, self.choice
        if choice is None or not manifest.rebalancing.enabled or manifest.stages.count < 2:
            return
        mover = Mover(
            manifest,
            choice.needs,
            self._directory,
            me=self.me.peer,
            rng=self._rng,
            say=self._say,
        )
        server = self.server
        assert server is not None
        with self._moving:
            while True:
                move = await mover.granted(server)
                server.draining = True
                self._changed(
                    f"moves to stage {move.stage} ({move.reason}); the step under way is finished "
                    "first"
                )
                free = await Drain(server, move.stage, say=self._say).let_go()
                if server.orders.finished.is_set():
                    return  # the run has ended meanwhile
                if free:
                    self.moves_to = move.stage
                    server.orders.finish_reason = self._moving_to()
                    server.orders.finished.set()
                    return
                server.draining = False
                self._change.set()

    # -- the directory ------------------------------------------------------------------------

    async def _announce_for_ever(self) -> None:
        warned = -inf
        while True:
            self._change = anyio.Event()
            if not await self._announce() and anyio.current_time() >= warned + WARN_S:
                warned = anyio.current_time()
                log.warning("nobody stored our announcement; trying again")
            with anyio.move_on_after(self.manifest.periods.announce_s):
                await self._change.wait()

    async def _announce(self) -> bool:
        server, meter = self.server, self._meter
        ttl_s = self.manifest.periods.record_ttl_s
        assert server is not None
        assert meter is not None
        meter.read(anyio.current_time())
        self.sequence = max(self.sequence + 1, int(wall_clock() * 1e6))
        record = PeerRecord(
            peer=self.me.peer,
            run_id=self.manifest.run_id,
            boot=self.me.boot,
            stage=self.stage,
            state=server.state,
            mark=server.mark or FRESH,
            samples_per_s=meter.samples_per_s,
            queued=meter.queued,
            memory_bytes=0 if self.choice is None else self.choice.memory_bytes,
            stays=self.choice is None,
            version=__version__,
            sequence=self.sequence,
        )
        value = encode(record, self._identity, ttl_s=ttl_s)
        return await self._directory.announce(record.key, record.peer, value, ttl_s=ttl_s)

    # -- what a volunteer wants to know -----------------------------------------------------------

    async def _watch_quiet(self) -> None:
        """Say now and then how it goes; say why, when nothing goes."""
        said = 0
        while True:
            await anyio.sleep(QUIET_S)
            server = self.server
            assert server is not None
            counters, now = server.passes.counters, anyio.current_time()
            last = counters.last_work
            if counters.counted > said:
                said = counters.counted
                step = server.mark.t if server.mark is not None else 0
                self._say(f"step {step}: {said} microbatches counted here so far")
            elif server.orders.joiner is None and server.why_quiet():
                since = "no work yet" if last is None else f"last work {now - last:.0f} s ago"
                self._say(f"{since}: {server.why_quiet()}")

    def _moving_to(self) -> str:
        return f"moves to stage {self.moves_to}"

    def _why_gone(self, server: ReplicaServer) -> str:
        if self.moves_to is not None:
            return self._moving_to()
        return "its work is done" if server.orders.finished.is_set() else "stopped by its owner"

    def _told_to_go(self, server: ReplicaServer) -> bool:
        """The trainer has ended the run: it need not hear that we go."""
        return server.orders.finished.is_set() and not server.draining

    async def _goodbye(self) -> None:
        """Tell the trainer that we go, so that it need not find out."""
        server = self.server
        if server is None or server.host.trainer is None or self._told_to_go(server):
            return
        message = msg.Goodbye(
            run=self.manifest.run_id,
            boot=self.me.boot,
            reason=self._why_gone(server),
        )
        with anyio.move_on_after(GOODBYE_S, shield=True):
            try:
                await server.host.caller.call(server.host.trainer, message, timeout_s=GOODBYE_S)
            except SwarmError as error:
                log.debug("the trainer did not hear our goodbye: %s", error)


async def _gone(sender: PeerId, frame: Frame) -> Frame:
    """The handler of one that has left."""
    del sender, frame
    return refusal("this peer has left the run")
