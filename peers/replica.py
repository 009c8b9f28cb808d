"""A replica: answers every message about one stage. Knows nothing of directories or processes."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from math import isfinite

import anyio
from anyio.abc import TaskGroup

from dht.records import PeerState
from peers import messages as msg
from peers.averaging import Averager
from peers.donor import Donor
from peers.executor import Executor
from peers.host import Host
from peers.lane import Lane
from peers.orders import Orders
from peers.passes import Passes
from peers.rpc import Caller
from peers.stage import StageOwner
from peers.transport import Frame
from swarm import __version__
from swarm.errors import BadInput
from swarm.manifest import Manifest
from swarm.types import Mark, PeerId, Replica, Term

log = logging.getLogger("swarm.node")

QUIET_S = 30.0
"""Without work for so long, a node says why."""


class ReplicaServer:
    """One stage served by one process, seen from the network. ``draining``: it is about to go."""

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
        self.donor = Donor(self.host, self.lane)
        self.orders = Orders(self.host, self.lane, self.passes, self.averager, self.donor)
        self.addresses: Sequence[str] = ()
        self.heard_trainer: float | None = None
        self.draining = False

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
            reply, payload = await self._answer(sender, message, list(frame.payload))
        except BadInput as error:
            return Frame(msg.header(msg.Refused(reason=str(error)[:500])))
        return Frame(msg.header(reply), payload)

    def _refuse(self, sender: PeerId, message: msg.AnyRequest) -> msg.Refused | None:
        host = self.host
        any_run = isinstance(message, msg.Question) and not message.run
        if message.run != host.manifest.run_id and not any_run:
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
            self.orders.on_change(f"obeys trainer {trainer[-6:]}, term {term.number}")
        self.host.trainer = trainer
        self.heard_trainer = anyio.current_time()
        return None

    async def _answer(
        self, sender: PeerId, message: msg.AnyRequest, payload: list[memoryview]
    ) -> tuple[msg.Message, list[memoryview]]:
        match message:
            case msg.Question():
                manifest = [] if message.run else [memoryview(self.host.manifest.canonical())]
                return self.status(detail=message.detail), manifest
            case msg.Renew():
                return self.status(), []
            case msg.GetSum():
                return await self.averager.get_sum(message)
            case msg.Forward() | msg.Backward():
                self.orders.given_work()
                return await self.passes.offered(message, payload), []
            case msg.Part():
                return await self.averager.part(message, payload), []
            case msg.Sum():
                return await self.averager.sum(message, payload), []
            case msg.Fetch():
                return await self.averager.fetch(message), []
            case msg.GetState() | msg.GetDecidedSum() | msg.GetDigests():
                return await self._give(sender, message)
            case msg.GetDecision():
                return await self.donor.decision(message), []
        answer = await self.orders.obey(message)
        if answer is None:
            reason = f"{message.kind} is not for a replica of this stage"
            answer = msg.Refused(reason=reason)
        return answer, []

    async def _give(
        self, sender: PeerId, message: msg.GetState | msg.GetDecidedSum | msg.GetDigests
    ) -> tuple[msg.Message, list[memoryview]]:
        """Of the stage's state."""
        if message.stage != self.host.stage.stage:
            return msg.Refused(reason=f"stage {message.stage} is not served here"), []
        match message:
            case msg.GetState():
                return await self.donor.state(sender, message)
            case msg.GetDigests():
                return await self.donor.digests(message)
            case _:
                return await self.donor.decided_sum(message)

    # -- answers ----------------------------------------------------------------------------

    def status(self, *, detail: bool = False) -> msg.Status:
        """Where this replica is; ``detail`` for people."""
        term, kept = self.passes.intake.term, self.donor.kept
        return msg.Status(
            boot=self.host.me.boot,
            role="node",
            stage=self.host.stage.stage,
            mark=self.mark,
            term=term.number,
            term_boot=term.boot,
            values=self.host.stage.model.length,
            state=str(self.state),
            trainer=self.host.trainer or "",
            quiet_s=self.quiet_s,
            kept=None if kept is None else kept.mark,
            detail=self._detail() if detail else None,
        )

    def _detail(self) -> msg.Detail:
        stage, last = self.host.stage, self.passes.counters.last_work
        decided = stage.decided
        counts = decided.counts[stage.stage] if decided and decided.counts else {}
        loss = decided.loss if decided is not None and isfinite(decided.loss) else None
        return msg.Detail(
            last_work_s=None if last is None else anyio.current_time() - last,
            why=self.why_quiet(),
            queued=self.passes.intake.queued,
            loss=loss,
            totals=dict(stage.totals[stage.stage]),
            counts=dict(counts),
            version=__version__,
            addresses=[address[:500] for address in self.addresses[:16]],
        )

    @property
    def state(self) -> PeerState:
        if self.draining:
            return PeerState.DRAINING
        if self.orders.joiner is not None:
            return PeerState.JOINING
        return PeerState.WAITING if self.mark is None else PeerState.READY

    @property
    def quiet_s(self) -> float | None:
        """How long no trainer has been heard; None: none ever was."""
        return None if self.heard_trainer is None else anyio.current_time() - self.heard_trainer

    @property
    def holds_work(self) -> bool:
        """Whether anything of the step under way would be lost with this replica."""
        intake = self.passes.intake
        busy = intake.queued or intake.held or self.passes.under_way
        return bool(busy or self.host.stage.holds_any)

    def heard_lately(self) -> bool:
        return self.quiet_s is not None and self.quiet_s < self.host.manifest.periods.lease_s

    def why_quiet(self) -> str:
        """Why there is no work, as far as can be told from here; empty if there is some."""
        now, last = anyio.current_time(), self.passes.counters.last_work
        joins = self.orders.joiner is not None
        if last is not None and now - last < QUIET_S and not joins:
            return ""
        if self.heard_trainer is None:
            return "no trainer has been heard of"
        quiet = now - self.heard_trainer
        if quiet > self.host.manifest.periods.lease_s:
            return f"the trainer has not been heard for {quiet:.0f} s"
        if self.orders.joiner is not None:
            return self.orders.joiner.progress
        return f"the trainer was heard {quiet:.0f} s ago and has sent nothing to do"


_OBEYED = (
    msg.Reset
    | msg.Prepare
    | msg.Decide
    | msg.Cancel
    | msg.Poll
    | msg.Renew
    | msg.Join
    | msg.Load
    | msg.Keep
    | msg.Finish
)
_TRAINER_ONLY = _OBEYED | msg.Fetch
