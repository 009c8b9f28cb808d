"""How a replica gets to the mark of a run that goes on: it copies pieces, and keeps them up."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio
from torch import Tensor

from peers import messages as msg
from peers.donors import Donors
from peers.host import Host
from peers.lane import Lane
from peers.pace import Pace
from peers.sources import RUN, Copy, cut, digests
from peers.state import DonorBusy, PieceSource, Told, fetch_digests, fetch_piece, fetch_sum
from swarm.core.backoff import Backoff
from swarm.core.joining import Joining, runs
from swarm.core.step import Decision
from swarm.core.totals import Totals
from swarm.errors import BadInput, TransportError
from swarm.types import FRESH, Mark, Replica

log = logging.getLogger("swarm.node")

AT_ONCE = 4
"""Pieces, or runs of sums, on their way at one time."""

AGAIN = Backoff(first_s=0.1, cap_s=3.0)
WAIT_S = 5.0
"""How long a donor is asked to wait for its next decision, and how often readiness is told."""

WITNESSES = 4
"""So many are asked at most where two replicas differ."""


@dataclass(slots=True)
class Order:
    """What the trainer said: where the run is, and who can give the state.

    ``copies``: a checkpoint's mark; its state becomes that of ``mark``, and ``applied`` and
    ``totals`` belong to it. None: the state of live replicas.
    """

    mark: Mark
    donors: list[Replica]
    copies: Mark | None = None
    applied: int = 0
    totals: Totals = ()


class Joiner:
    """Works until the trainer has admitted this replica (``admitted``), or its scope ends.

    Args:
        say: told in plain words how far it is.
        arrived, left: called when the stage is whole at a mark, and when it is at none any more,
            before anything else runs.
        kept: a copy of our own; if it is the one that is to be loaded, nothing needs to be fetched.
    """

    def __init__(
        self,
        host: Host,
        lane: Lane,
        order: Order,
        *,
        say: Callable[[str], None],
        arrived: Callable[[], None],
        left: Callable[[], None],
        kept: Copy | None = None,
    ) -> None:
        self.admitted = False
        self.order = order
        self._host, self._lane, self._say = host, lane, say
        self._arrived, self._left = arrived, left
        self._own = kept if kept is not None and kept.mark == order.copies else None
        stage = host.stage
        self._places = cut(stage.model.length, host.manifest.limits.state_piece)
        self._vectors = len(stage.model.state())
        known = stage.mark if order.copies is None else None
        if known is not None and known > order.mark:
            known = None  # of a timeline that was abandoned
        self._joining = Joining([known] * len(self._places), order.mark)
        self._donors = Donors(order.donors)
        self._last: Decision | None = None
        self._news: Decision | None = None
        self._offered: Mark | None = None
        self._offered_at = float("-inf")
        self._contradictions = 0
        state_bytes = 4 * stage.model.length * self._vectors
        self._pace = Pace(stage.stage, state_bytes, stage.model.accumulators.nbytes, say)
        self._wake = anyio.Event()

    def can_follow(self, order: Order) -> bool:
        """Whether what is here is of use for ``order``. Each piece knows its mark; only the pieces
        of a checkpoint have been given another name."""
        ours = self.order
        return order.copies == ours.copies and (order.copies is None or order.mark == ours.mark)

    def update(self, order: Order) -> None:
        """The trainer says it again: others may be there to copy from."""
        self.order = order
        self._donors.offered(order.donors)
        self._joining.moved(order.mark)
        self._notify()

    @property
    def progress(self) -> str:
        """In plain words, for whoever asks why nothing is counted here yet."""
        share = self._joining.share
        if share < 1.0:
            return f"downloading the state of stage {self._host.stage.stage}: {share:.0%}"
        return f"catching up with step {self._joining.head.t}"

    def _notify(self) -> None:
        self._wake.set()
        self._wake = anyio.Event()

    # -- the whole of it --------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is admitted.

        Raises:
            TooSlow: the link cannot keep up; with figures.
        """
        await self._leave()
        if self.order.copies == FRESH:
            await self._lane.control("initialise", self._host.stage.initialise)
            self._joining.stepped(range(len(self._places)), self.order.mark)
        elif (own := self._own) is not None:
            whole = slice(0, own.length)
            await self._put(whole, own.piece(0, own.length))
            self._joining.stepped(range(len(self._places)), self.order.mark)
        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE):
                tasks.start_soon(self._copy_for_ever)
            if self.order.copies is None:
                tasks.start_soon(self._watch)
            while not self.admitted:
                await self._once()
            tasks.cancel_scope.cancel()

    async def _once(self) -> None:
        """Whatever is to be done now; else wait for something to happen."""
        last = self._last
        if self._news is not None:
            decision, self._news = self._news, None
            await self._step(decision)
        elif last is not None and self._joining.at(last.mark):
            await self._step(last)  # a copy that was on its way has come, one step late
        elif self._joining.whole and self._is_offer_due():
            await self._offer()
        else:
            now = anyio.current_time()
            until = self._again_at if self._again_at > now else now + WAIT_S
            with anyio.move_on_at(until):
                await self._wake.wait()

    @property
    def _again_at(self) -> float:
        """When readiness has to be told again.

        A time, not what is left until then: that may be so little that no time passes meanwhile.
        """
        return self._offered_at + WAIT_S

    def _is_offer_due(self) -> bool:
        """It is told again now and then: the trainer may not have heard it."""
        again = anyio.current_time() >= self._again_at
        return self._offered != self._joining.head or again

    async def _leave(self) -> bool:
        """The weights are of no version from now on, unless they are a member's (False)."""

        def leave() -> bool:
            if not self.admitted:
                self._host.stage.leave_mark()
            return not self.admitted

        return await self._lane.control("leave", leave, lambda left: self._left() if left else None)

    # -- copies -----------------------------------------------------------------------------

    async def _copy_for_ever(self) -> None:
        failures = 0
        while True:
            wake, piece = self._wake, self._joining.take()
            if piece is None:
                await wake.wait()
                continue
            donor = self._donors.next(anyio.current_time())
            if donor is not None and await self._copy(piece, donor):
                failures = 0
                continue
            self._joining.failed(piece)
            failures += 1
            await anyio.sleep(AGAIN.pause(failures, self._host.rng))

    async def _copy(self, piece: int, donor: Replica) -> bool:
        place, copies = self._places[piece], self.order.copies
        try:
            mark, tensors = await fetch_piece(self._source(donor), place, self._vectors, copies)
        except DonorBusy as error:
            log.debug("%s gives no piece now: %s", donor.peer[-6:], error)
            return False
        except (TransportError, BadInput) as error:
            self._donors.failed(donor, anyio.current_time())
            log.info("a piece could not be had from %s: %s", donor.peer[-6:], error)
            return False
        self._donors.gave(donor)
        await self._put(place, tensors)
        self._joining.copied(piece, self.order.mark if copies is not None else mark)
        self._pace.copied(sum(tensor.nbytes for tensor in tensors))
        self._pace.tell(self.progress)
        if not self._joining.whole:
            self._pace.check()
        self._notify()
        return True

    async def _put(self, place: slice, tensors: list[Tensor]) -> None:
        """Write a piece of the state. If the stage still claimed a mark, it does so no more."""
        stage = self._host.stage

        def load() -> bool:
            if self.admitted:
                return False
            left = stage.mark is not None
            if left:
                stage.leave_mark()
            for vector, tensor in zip(stage.model.state().values(), tensors, strict=True):
                vector[place].copy_(tensor)
            return left

        await self._lane.control("load", load, lambda left: self._left() if left else None)

    def _source(self, donor: Replica) -> PieceSource:
        host = self._host
        return PieceSource(host.caller, host.manifest.run_id, donor, host.stage.stage)

    # -- steps ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Hear of each decision as soon as a donor has applied it."""
        failures = 0
        while True:
            began, head = anyio.current_time(), self._joining.head
            donor = self._donors.next(began)
            if donor is not None and await self._hear(donor, head):
                failures = 0
                if self._joining.head == head and anyio.current_time() - began < WAIT_S / 2:
                    await anyio.sleep(AGAIN.first_s)  # it does not wait, so we do
                continue
            failures += 1
            await anyio.sleep(AGAIN.pause(failures, self._host.rng))

    async def _hear(self, donor: Replica, head: Mark) -> bool:
        host = self._host
        question = msg.GetDecision(
            run=host.manifest.run_id, to=donor.boot, mark=head, wait_s=WAIT_S
        )
        limit_s = host.caller.timeout_s + WAIT_S
        try:
            answer = (await host.caller.call(donor.peer, question, timeout_s=limit_s)).message
        except (TransportError, BadInput) as error:
            self._donors.failed(donor, anyio.current_time())
            log.info("%s did not tell its next decision: %s", donor.peer[-6:], error)
            return False
        match answer:
            case msg.Decided() if answer.decision.mark == head and answer.decision.to > head:
                self._news = answer.decision.decision()
                self._pace.decided()
                self._joining.decided(self._news.mark, self._news.to)
            case msg.At(mark=other) if other is not None and other >= head:
                self._joining.moved(other)  # one that we missed, or nothing new yet
            case _:
                self._donors.failed(donor, anyio.current_time())
                return False
        self._notify()
        return True

    async def _step(self, decision: Decision) -> None:
        """Take all pieces that are where the decision begins to where it leads."""
        self._last = decision
        if not await self._leave():
            return
        while pieces := self._joining.take_at(decision.mark):
            limiter = anyio.CapacityLimiter(AT_ONCE)
            async with anyio.create_task_group() as tasks:
                for run in runs(pieces, RUN):
                    tasks.start_soon(self._step_run, decision, run, limiter)
        self._pace.tell(self.progress)

    async def _step_run(
        self, decision: Decision, run: range, limiter: anyio.CapacityLimiter
    ) -> None:
        async with limiter:
            place = slice(self._places[run[0]].start, self._places[run[-1]].stop)
            sums = None
            if not decision.update.skip:
                sums = await self._sum(decision, place)
                if sums is None:
                    self._joining.lost(run)
                    return
                self._pace.summed(sums.nbytes)
            model = self._host.stage.model

            def apply() -> None:
                if not self.admitted:
                    model.apply_to(place, sums, decision.update)

            await self._lane.control("apply", apply)
            self._joining.stepped(run, decision.to)

    async def _sum(self, decision: Decision, place: slice) -> Tensor | None:
        """A piece of the sum, from anyone who has applied it; None if nobody gives it."""
        exact = self._host.manifest.reproducible.enabled
        for donor in self._donors.in_turn(anyio.current_time()):
            try:
                return await fetch_sum(self._source(donor), decision.mark, place, exact=exact)
            except (TransportError, BadInput) as error:
                log.info("a sum could not be had from %s: %s", donor.peer[-6:], error)
        return None

    # -- the end ----------------------------------------------------------------------------

    async def _offer(self) -> None:
        """All pieces are at the newest mark: compare them with another's, and say so."""
        head, copies = self._joining.head, self.order.copies
        if copies == FRESH or self._own is not None:
            await self._take_place(head, self.order.applied, self.order.totals)
            return
        witness = self._donors.witness(anyio.current_time())
        told = None if witness is None else await self._ask_digests(witness, copies or head)
        if witness is None or told is None:
            await anyio.sleep(AGAIN.first_s)
            return
        own = await self._lane.control("digest", self._digests)
        wrong = [int(i) for i in (own != told.digests).any(dim=1).nonzero()]
        if wrong:
            await self._contradicted(witness, told, wrong, copies or head)
        elif self._joining.whole and self._joining.head == head:
            await self._take_place(head, told.applied, told.totals)

    async def _ask_digests(self, witness: Replica, mark: Mark) -> Told | None:
        try:
            pieces, stages = len(self._places), self._host.manifest.stages.count
            return await fetch_digests(self._source(witness), mark, pieces, stages=stages)
        except (TransportError, BadInput) as error:
            log.info("%s did not tell its digests: %s", witness.peer[-6:], error)
            self._donors.failed(witness, anyio.current_time())
            return None

    async def _contradicted(
        self, witness: Replica, told: Told, wrong: list[int], mark: Mark
    ) -> None:
        """Some pieces differ from those of a witness: take them from one whom most agree with."""
        opinions = {witness: bytes(told.digests.flatten().tolist())}
        for other in list(self._donors.in_turn(anyio.current_time()))[:WITNESSES]:
            if other not in opinions and (more := await self._ask_digests(other, mark)):
                opinions[other] = bytes(more.digests.flatten().tolist())
        votes = Counter(opinions.values())
        # Of those whom most agree with, one that gave none of what was wrong.
        right = max(
            sorted(opinions), key=lambda r: (votes[opinions[r]], not self._donors.has_given(r))
        )
        self._say(
            f"stage {self._host.stage.stage}: {len(wrong)} of {len(self._places)} pieces differ "
            f"from those of {witness.peer[-6:]}: they are copied again, from {right.peer[-6:]}"
        )
        if len(votes) > 1:
            log.error("replicas of stage %d differ at step %d", self._host.stage.stage, mark.t)
        self._joining.lost(wrong)
        self._donors.prefer(right)
        self._contradictions += 1
        self._pace.forgive()
        await anyio.sleep(AGAIN.pause(self._contradictions, self._host.rng))
        self._notify()

    def _digests(self) -> Tensor:
        stage = self._host.stage
        return digests(list(stage.model.state().values()), self._host.manifest.limits.state_piece)

    async def _take_place(self, mark: Mark, applied: int, totals: Totals) -> None:
        def arrive() -> None:
            if not self.admitted and self._host.stage.mark != mark:
                self._host.stage.arrive(mark, applied, totals)

        await self._lane.control("arrive", arrive, lambda _: self._arrived())
        self._offered, self._offered_at = mark, anyio.current_time()
        host = self._host
        ready = msg.Ready(run=host.manifest.run_id, boot=host.me.boot, mark=mark)
        # Not waited for: the next decision may be here before the answer is.
        host.tasks.start_soon(partial(host.tell_trainer, ready, tries=2))
