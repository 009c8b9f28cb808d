"""A replica: answers every message about one stage. Knows nothing of directories or processes."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
from anyio.abc import TaskGroup

from peers import messages as msg
from peers.averaging import Averager
from peers.executor import Executor
from peers.host import Host
from peers.lane import Lane
from peers.passes import Passes
from peers.rpc import Caller
from peers.stage import StageOwner
from peers.tensors import RAW, pack
from peers.transport import Frame
from swarm.errors import BadInput
from swarm.manifest import Manifest
from swarm.types import Mark, PeerId, Replica, Term

log = logging.getLogger("swarm.node")


class ReplicaServer:
    """One stage served by one process, seen from the network.

    ``on_change`` is called with a line of plain words whenever the replica's state changes.
    """

    def __init__(
        self,
        manifest: Manifest,
        stage: StageOwner,
        *,
        me: Replica,
        caller: Caller,
        executor: Executor,
        tasks: TaskGroup,
        rng: random.Random,
    ) -> None:
        self.host = Host(manifest, stage, me, caller, executor, tasks, rng)
        self.lane = Lane(executor, self._next_pass)
        self.passes = Passes(self.host, wake=self.lane.wake)
        self.averager = Averager(self.host, self.lane)
        self.heard_trainer: float | None = None
        self.finished = anyio.Event()
        self.finish_reason = ""
        self.on_change: Callable[[str], None] = log.info

    @property
    def mark(self) -> Mark | None:
        return self.host.stage.mark

    def _next_pass(self) -> Callable[[], Awaitable[None]] | None:
        return self.passes.next_pass()

    async def run(self) -> None:
        """Compute what arrives, for ever."""
        await self.lane.run()

    # -- dispatch ---------------------------------------------------------------------------

    async def handle(self, sender: PeerId, frame: Frame) -> Frame:
        """The transport's handler: raises only where work on the device has failed."""
        try:
            message = msg.parse_request(frame.header)
            refusal = self._refuse(sender, message)
            if refusal is not None:
                return Frame(msg.header(refusal))
            reply, payload = await self._answer(message, list(frame.payload))
        except BadInput as error:
            return Frame(msg.header(msg.Refused(reason=str(error)[:500])))
        return Frame(msg.header(reply), payload)

    def _refuse(self, sender: PeerId, message: msg.AnyRequest) -> msg.Refused | None:
        host = self.host
        if message.run != host.manifest.run_id:
            return msg.Refused(reason=f"this peer belongs to run {host.manifest.run_id}")
        if message.to not in ("", host.me.boot):
            return msg.Refused(reason="meant for another boot of this peer")
        claimed = getattr(message, "sender", None)
        if isinstance(claimed, Replica) and claimed.peer != sender:
            return msg.Refused(reason="the sender is not who the message says")
        if isinstance(message, _TRAINER_ONLY) and sender not in host.manifest.trainers:
            return msg.Refused(reason=f"{sender} is not a trainer of this run")
        if isinstance(message, _OBEYED):
            return self._obey(sender, message.stamp.term)
        return None

    def _obey(self, trainer: PeerId, term: Term) -> msg.Refused | None:
        """Adopt a higher term; refuse a lower one, naming the higher."""
        intake = self.passes.intake
        if term < intake.term:
            return msg.Refused(
                reason=f"term {intake.term.number} is obeyed here", term=intake.term.number
            )
        if intake.adopt(term):
            self.averager.end()
            self.on_change(f"obeys trainer {trainer[-6:]}, term {term.number}")
        self.host.trainer = trainer
        self.heard_trainer = anyio.current_time()
        return None

    async def _answer(
        self, message: msg.AnyRequest, payload: list[memoryview]
    ) -> tuple[msg.Message, list[memoryview]]:
        match message:
            case msg.GetSum():
                return await self.averager.get_sum(message)
            case msg.GetState():
                return await self._get_state(message)
            case msg.Forward() | msg.Backward():
                return await self.passes.offered(message, payload), []
            case msg.Part():
                return await self.averager.part(message, payload), []
            case msg.Sum():
                return await self.averager.sum(message, payload), []
            case msg.Fetch():
                return await self.averager.fetch(message), []
            case _:
                return await self._control(message), []

    async def _control(self, message: msg.AnyRequest) -> msg.Message:
        match message:
            case msg.Question():
                return self._status()
            case msg.Cancel():
                return await self._cancel(message)
            case msg.Prepare() if message.stage == self.host.stage.stage:
                return await self._prepare(message)
            case msg.Decide():
                return await self._decide(message)
            case msg.Reset():
                return await self._reset(message)
            case msg.Finish():
                self.finish_reason = message.reason
                self.finished.set()
                return msg.Ok()
            case _:
                return msg.Refused(reason=f"{message.kind} is not for a replica of this stage")

    # -- answers ----------------------------------------------------------------------------

    def _status(self) -> msg.Status:
        term = self.passes.intake.term
        return msg.Status(
            boot=self.host.me.boot,
            role="node",
            stage=self.host.stage.stage,
            mark=self.mark,
            term=term.number,
            term_boot=term.boot,
            values=self.host.stage.model.length,
        )

    async def _cancel(self, message: msg.Cancel) -> msg.Message:
        self.passes.intake.cancel(message.stamp)
        stage = self.host.stage
        cancel = partial(stage.cancel, message.stamp, message.m)
        holds, loss = await self.lane.control("cancel", cancel)
        if message.mark != self.mark:
            return msg.At(mark=self.mark)
        return msg.Holds(holds=holds, loss=loss)

    async def _prepare(self, message: msg.Prepare) -> msg.Message:
        self.passes.intake.raise_bar(message.stamp)
        return await self.averager.prepare(message)

    async def _reset(self, message: msg.Reset) -> msg.Message:
        stage = self.host.stage
        if stage.mark is None and message.begin:
            await self.lane.control("begin", stage.begin, lambda _: self._advanced())
            self.on_change(f"serves stage {stage.stage} from the initial weights")
        if stage.mark != message.mark:
            where = "has no weights" if stage.mark is None else f"is at step {stage.mark.t}"
            self.on_change(
                f"the run is at step {message.mark.t}, this replica {where}: it waits, since "
                "joining in mid-run is not there yet"
            )
            return msg.At(mark=stage.mark)
        self.passes.intake.raise_bar(message.stamp)
        self.averager.end()
        await self.lane.control("reset", partial(stage.reset, message.stamp))
        return msg.At(mark=stage.mark)

    async def _decide(self, message: msg.Decide) -> msg.Message:
        stage = self.host.stage
        mine = None
        if not message.skip:
            if stage.stage >= len(message.rounds):
                return msg.Refused(reason=f"no round of stage {stage.stage} in the decision")
            round_ = message.rounds[stage.stage]
            mine = (round_.stamp, round_.digest)
        before = stage.mark
        apply = partial(stage.decide, message.mark, message.next, mine, message.update)
        mark = await self.lane.control("apply", apply, lambda mark: self._applied(before, mark))
        return msg.At(mark=mark)

    def _applied(self, before: Mark | None, mark: Mark | None) -> None:
        if mark != before:
            self._advanced()

    def _advanced(self) -> None:
        """Before anything else runs: what belonged to the old mark ends."""
        if self.mark is not None:
            self.averager.end()
            self.passes.intake.advance(self.mark)

    async def _get_state(self, message: msg.GetState) -> tuple[msg.Message, list[memoryview]]:
        """A piece of the weights, copied between two steps."""
        stage = self.host.stage
        stop = message.start + message.count
        if message.mark != stage.mark:
            return msg.At(mark=stage.mark), []
        if stop > stage.model.length:
            return msg.Refused(reason=f"the stage has {stage.model.length} values"), []
        copy = partial(stage.copy_weights, message.mark, message.start, stop)
        piece = await self.lane.control("copy", copy)
        if piece is None:
            return msg.At(mark=stage.mark), []
        metas, payload = pack([(piece, RAW)])
        return msg.Ok(tensors=metas), payload


_OBEYED = (msg.Reset, msg.Prepare, msg.Decide, msg.Cancel, msg.Finish)
_TRAINER_ONLY = (*_OBEYED, msg.Fetch, msg.GetState)
