"""What a replica does when its trainer says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import anyio

from peers import messages as msg
from peers.averaging import Averager
from peers.donor import Donor
from peers.fields import Round, WireDecision
from peers.host import Host
from peers.joiner import Joiner, Order
from peers.lane import Lane
from peers.passes import Passes
from swarm.core.books import Book
from swarm.types import FRESH, Mark, Stamp

log = logging.getLogger("swarm.node")


class Orders:
    """Obeys: whatever touches the stage goes through the lane, in the order of its queue.

    ``on_change`` is called with a line of plain words whenever the replica's state changes.
    """

    def __init__(
        self, host: Host, lane: Lane, passes: Passes, averager: Averager, donor: Donor
    ) -> None:
        self._host, self._lane = host, lane
        self._passes, self._averager, self._donor = passes, averager, donor
        self.joiner: Joiner | None = None
        self.finished = anyio.Event()
        self.finish_reason = ""
        self._serves_from: int | None = None
        self.on_change: Callable[[str], None] = log.info
        self._joining_scope = anyio.CancelScope()

    async def obey(self, message: msg.AnyRequest) -> msg.Message | None:
        """The answer; None if this is no order for a replica of this stage."""
        match message:
            case msg.Cancel():
                return await self._cancel(message)
            case msg.Prepare() if message.stage == self._host.stage.stage:
                self._passes.intake.raise_bar(message.stamp, Book.OWN)
                return await self._averager.prepare(message)
            case msg.Decide():
                return await self._decide(message)
            case msg.Reset():
                return await self._reset(message)
            case msg.Poll():
                return await self._poll(message)
            case msg.Keep():
                return await self._donor.keep(message)
            case msg.Join() | msg.Load() if self._is_old(message.stamp):
                return msg.At(mark=self.mark)
            case msg.Join():
                return self._join(Order(message.mark, message.members))
            case msg.Load() if len(message.totals) != self._host.manifest.stages.count:
                return msg.Refused(reason=f"totals of {len(message.totals)} stages")
            case msg.Load():
                totals = tuple(message.totals)
                return self._join(
                    Order(message.mark, message.sources, message.copies, message.applied, totals)
                )
            case msg.Finish():
                self.finish_reason = message.reason
                self.finished.set()
                return msg.Ok()
        return None

    @property
    def mark(self) -> Mark | None:
        return self._host.stage.mark

    # -- work -------------------------------------------------------------------------------

    async def _cancel(self, message: msg.Cancel) -> msg.Message:
        self._passes.intake.cancel(message.stamp)
        stage = self._host.stage

        def cancel() -> msg.Message:
            book = stage.book(message.mark, message.ahead)
            holds, loss = stage.cancel(message.stamp, message.m, book or Book.OWN)
            return msg.At(mark=stage.mark) if book is None else msg.Holds(holds=holds, loss=loss)

        return await self._lane.control("cancel", cancel)

    async def _decide(self, message: msg.Decide) -> msg.Message:
        stage, decision = self._host.stage, message.decision.decision()
        if not decision.update.skip and stage.stage >= len(decision.rounds):
            return msg.Refused(reason=f"no round of stage {stage.stage} in the decision")
        before, joiner = stage.mark, self.joiner

        def apply() -> Mark | None:
            mark = stage.decide(decision)
            if joiner is not None and mark == decision.to != before:
                joiner.admitted = True  # a skipped step needs no sum: it is a member now
            return mark

        try:
            mark = await self._lane.control("apply", apply, lambda now: self._applied(before, now))
        except Exception:
            if stage.mark is None:
                self._left()
            raise
        if joiner is not None and joiner.admitted and joiner is self.joiner:
            self._end_joining()
        return msg.At(mark=mark)

    def _is_old(self, stamp: Stamp) -> bool:
        """Sent before a poll or reset that was obeyed: it has been on its way for long."""
        bar = self._passes.intake.bar
        return bar is not None and stamp < bar

    def _applied(self, before: Mark | None, mark: Mark | None) -> None:
        if mark != before:
            self.advanced()

    def advanced(self) -> None:
        """Before anything else runs: what belonged to the old mark ends."""
        if self.mark is not None:
            self._averager.end()
            self._passes.intake.advance(self.mark, self._host.stage.before)
        self._donor.advanced()

    def given_work(self) -> None:
        """The first work since it was admitted: only now is it certain that the trainer knows."""
        since, self._serves_from = self._serves_from, None
        if since is not None:
            self.on_change(f"serves stage {self._host.stage.stage} from step {since} on")

    # -- becoming a member ------------------------------------------------------------------

    async def _reset(self, message: msg.Reset) -> msg.Message:
        """At the trainer's mark this admits: whatever was held is dropped, and work may come."""
        stage = self._host.stage
        if stage.mark is None and message.begin:
            self._end_joining()
            await self._lane.control("begin", stage.begin, lambda _: self.advanced())
            if stage.mark is not None:
                self.on_change(f"serves stage {stage.stage} from the initial weights")
        if stage.mark != message.mark:
            return msg.At(mark=stage.mark)
        self._passes.intake.raise_bar(message.stamp)
        self._averager.end()

        def reset() -> None:
            if stage.mark == message.mark:
                stage.reset(message.stamp)
                if self.joiner is not None:
                    self.joiner.admitted = True

        await self._lane.control("reset", reset)
        if stage.mark == message.mark and self.joiner is not None and self.joiner.admitted:
            self._end_joining()
            self._serves_from = message.mark.t
        return msg.At(mark=stage.mark)

    def _join(self, order: Order) -> msg.Message:
        """Begin to copy the stage's state, or hear from whom else it can be had."""
        if self.mark == order.mark and self.joiner is None:
            return msg.At(mark=self.mark)
        joiner = self.joiner
        if joiner is not None and not joiner.can_follow(order):
            self._end_joining()
            joiner = None
        if joiner is not None:
            joiner.update(order)
            return msg.At(mark=self.mark)
        stage = self._host.stage
        self._serves_from = None
        where = "has no weights yet" if stage.mark is None else f"is at step {stage.mark.t}"
        self.on_change(
            f"the run is at step {order.mark.t}, this replica {where}: it copies the state of "
            f"stage {stage.stage} from {_sources(order)}"
        )
        self.joiner = Joiner(
            self._host,
            self._lane,
            order,
            say=self.on_change,
            arrived=self.advanced,
            left=self._left,
            kept=self._donor.kept,
        )
        self._joining_scope = anyio.CancelScope()
        self._host.tasks.start_soon(self._run_joiner, self.joiner, self._joining_scope)
        return msg.At(mark=None)

    def _left(self) -> None:
        """The stage is at no mark: nothing of the old one is of use."""
        self._averager.end()
        self._passes.leave()
        self._donor.advanced()

    async def _run_joiner(self, joiner: Joiner, scope: anyio.CancelScope) -> None:
        with scope:
            await joiner.run()

    def _end_joining(self) -> None:
        if self.joiner is not None:
            self.joiner.admitted = True  # nothing that it has under way is written any more
        self.joiner = None
        self._joining_scope.cancel()

    # -- another trainer --------------------------------------------------------------------

    async def _poll(self, message: msg.Poll) -> msg.Message:
        """What is held here, frozen: what was sent before the poll counts no more."""
        self._passes.intake.raise_bar(message.stamp)
        held = await self._lane.control("poll", partial(self._held, message.stamp))
        if self.joiner is not None and self.joiner.admitted:
            self._end_joining()
        return held

    def _held(self, stamp: Stamp) -> msg.Held:
        """On the lane. Whoever is polled at a mark is a member there, if the trainer likes."""
        stage = self._host.stage
        if self.joiner is not None and stage.mark is not None:
            self.joiner.admitted = True
        stage.raise_bar(stamp)
        sealed, decision, kept = stage.sealed, stage.decision, self._donor.kept
        return msg.Held(
            stage=stage.stage,
            mark=stage.mark,
            applied=stage.applied,
            holds=frozenset(stage.ledger.held),
            losses=sorted(stage.losses.items()),
            sum=None if sealed is None else Round(stamp=sealed.round, digest=sealed.digest),
            decision=None if decision is None else WireDecision.of(decision),
            totals=msg.plain(stage.totals),
            kept=None if kept is None else kept.mark,
            kept_applied=0 if kept is None else kept.applied,
            kept_totals=[] if kept is None else msg.plain(kept.totals),
        )


def _sources(order: Order) -> str:
    if order.copies is None:
        return "1 replica" if len(order.donors) == 1 else f"{len(order.donors)} replicas"
    if order.copies == FRESH:
        return "its initial weights"
    return f"the checkpoint of step {order.copies.t}"
