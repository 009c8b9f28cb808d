"""The microbatches of a step in flight: who is sent next, by which way, and what came of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.core import journey
from swarm.core.intake import Kind
from swarm.core.journey import Ask, Journey, Phase, Route, Silent
from swarm.core.pace import Pace, Stamps
from swarm.core.tally import Tally
from swarm.core.wiring import Window, Wiring
from swarm.types import Attempt, Mark, Replica, Stamp

COUNTED = "counted"
HELD = "held"
NOT_FINITE = "not finite"
DROPPED = "dropped"
"""What a receipt may say of the count; anything else means that nothing was added."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a replica says after a pass. Receipts are hints; ledgers are the truth.

    Times in seconds: waiting in the queue, computing, and pushing the output on. ``busy`` counts
    busy answers on the push, ``skipped`` names replicas that could not be reached.
    """

    stamp: Stamp
    m: int
    stage: int
    replica: Replica
    kind: Kind
    verdict: str
    queue_s: float
    compute_s: float
    link_s: float
    loss: float | None = None
    busy: int = 0
    skipped: tuple[Replica, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """Send ``attempt`` to the first stage along ``route``; it may take ``limit_s``.

    An empty mask alone does not mean held-out data: a training microbatch that every stage holds
    goes once more in this way when only its loss is missing. What ``m`` means is the flight's.
    """

    attempt: Attempt
    route: Route
    limit_s: float


Instruction = Launch | Ask | Silent


@dataclass(slots=True)
class _Sent:
    """An attempt that was launched. ``forward_s``: work on its forward pass, by stage."""

    trip: Journey
    stamp: Stamp
    route: Route
    open: bool = True
    forward_s: dict[int, float] = field(default_factory=dict)


class Flight:
    """Machine: keeps a window of journeys in flight until all are done.

    What an event costs does not depend on how many journeys or replicas there are, but for the
    loss of a replica.

    Args:
        journeys: the microbatches, or evaluations, to get done.
        mark: the version that they are for.
        wiring, window, pace, stamps: the trainer's, shared by all its steps.
        ahead: with delayed updates, they are for the step after that of ``mark``.

    ``beside``: a flight before this one that shares the window; ours takes what it leaves.
    """

    def __init__(
        self,
        journeys: Sequence[Journey],
        mark: Mark,
        *,
        wiring: Wiring,
        window: Window,
        pace: Pace,
        stamps: Stamps,
        rng: random.Random,
        ahead: bool = False,
    ) -> None:
        self.journeys = {j.m: j for j in journeys}
        self.mark, self.ahead = mark, ahead
        self.beside: Flight | None = None
        self.resent = 0
        self._wiring, self._window, self._pace = wiring, window, pace
        self._stamps, self._rng = stamps, rng
        self._tally = Tally(self.journeys)
        self._sent: dict[Stamp, _Sent] = {}
        self._latest: dict[int, _Sent] = {}
        self._single: set[Replica] = set()
        self._some_done = False

    @property
    def done(self) -> bool:
        return self._tally.all_done

    @property
    def void(self) -> bool:
        """A microbatch was found not finite by two: the step is to be skipped."""
        return self._tally.void

    @property
    def in_flight(self) -> int:
        return self._tally.in_flight

    def stage_done(self, stage: int) -> bool:
        """Every microbatch is known to have counted in ``stage``."""
        return self._tally.stage_done(stage)

    @property
    def some_stage_done(self) -> bool:
        return self._tally.some_stage_done

    def held_by(self, stage: int, replica: Replica) -> frozenset[int]:
        return self._tally.held_by(stage, replica)

    def fill(self, stages: Sequence[Sequence[Replica]], now: float) -> list[Instruction]:
        """Launch what the window allows, oldest microbatch first.

        ``stages``: who can serve each stage now. Nothing is launched while one has nobody.
        """
        if self._wiring.serve(stages):
            self._single = {replicas[0] for replicas in stages if len(replicas) == 1}
        found: list[Instruction] = []
        room = self._window.size - self._tally.in_flight
        if self.beside is not None:
            room -= self.beside.in_flight
        if room <= 0 or not all(stages):
            return found
        while len(found) < room and (trip := self._tally.next_idle()) is not None:
            found.append(self._launch(trip, len(stages), now))
        return found

    def _launch(self, trip: Journey, stages: int, now: float) -> Launch:
        stamp = self._stamps.take()
        shun = trip.shun
        route = tuple(
            [
                self._wiring.choose(stage, stamp, now, self._rng, shun=shun)
                for stage in range(stages)
            ]
        )
        limit_s = self._pace.limit_s(trip.tries)
        self.resent += trip.tries > 0
        trip.send(stamp, route, now, limit_s)
        self._latest[trip.m] = self._sent[stamp] = _Sent(trip, stamp, route)
        return Launch(Attempt(stamp, self.mark, trip.m, trip.mask, self.ahead), route, limit_s)

    def receipt(self, receipt: Receipt, alone: bool, now: float) -> list[Instruction]:
        """Take in a receipt of this flight. ``alone``: its stage has no other replica."""
        sent = self._find(receipt)
        if sent is None:
            return []
        trip = sent.trip
        trip.progress(sent.stamp, receipt.stage, receipt.replica, now)
        self._measure(receipt, sent, now)
        if receipt.loss is not None:
            trip.measured(receipt.loss)
        if receipt.verdict in (COUNTED, HELD):
            trip.holds(receipt.stage, receipt.replica)
        todo: list[Instruction] = []
        if receipt.verdict == NOT_FINITE:
            single = self._single | ({receipt.replica} if alone else set())
            todo += trip.not_finite(sent.stamp, receipt.stage, single, now)
        elif receipt.verdict == DROPPED:
            self.dropped(receipt.replica)
            todo += self.failed(trip.m, sent.stamp, "a replica failed while adding", now)
        if trip.phase is Phase.DONE:
            self._arrived(sent, now)
        return self._asked(todo)

    def promote(self, mark: Mark) -> None:
        """Ahead no more: the decision that led to ``mark`` was applied."""
        self.mark, self.ahead, self.beside = mark, False, None

    def knows(self, stamp: Stamp) -> bool:
        """Whether ``stamp`` is an attempt of this flight."""
        return stamp in self._sent

    def expects(self, receipt: Receipt) -> bool:
        """Whether ``receipt`` is of an attempt of this flight, from a replica on its lists."""
        return self._find(receipt) is not None

    def _find(self, receipt: Receipt) -> _Sent | None:
        sent = self._sent.get(receipt.stamp)
        if (
            sent is not None
            and sent.trip.m == receipt.m
            and 0 <= receipt.stage < len(sent.route)
            and receipt.replica in sent.route[receipt.stage]
        ):
            return sent
        return None

    def _measure(self, receipt: Receipt, sent: _Sent, now: float) -> None:
        self.busy(receipt.busy)
        stage, replica = receipt.stage, receipt.replica
        link_s = self._pace.beyond_latency_s((stage, receipt.kind), receipt.link_s)
        work_s = max(receipt.compute_s, link_s)
        if receipt.kind is Kind.FORWARD:
            sent.forward_s[stage] = work_s
            self._wiring.accepted(stage, sent.stamp, replica, now)
            return
        work_s += sent.forward_s.pop(stage, 0.0)
        self._wiring.served(stage, sent.stamp, replica, work_s, now)

    def _arrived(self, sent: _Sent, now: float) -> None:
        """Its microbatch is done. An older attempt may have done it, the latest is over too."""
        latest = self._latest[sent.trip.m]
        if not latest.open:
            return
        self._some_done = True
        took_s = now - sent.trip.sent_at if sent is latest else None
        if took_s is not None:
            self._pace.took(took_s)
        self._window.succeeded(took_s)
        self._close(latest)

    def end(self) -> None:
        """Nothing more is waited for: what the open attempts were charged for is refunded."""
        for sent in self._sent.values():
            self._close(sent)

    def _close(self, sent: _Sent) -> None:
        if sent.open:
            sent.open = False
            self._wiring.closed(sent.stamp)
        sent.forward_s.clear()

    def busy(self, answers: int) -> None:
        """A push met this many busy replicas: fewer microbatches should be in flight.

        Not so before the first is done: a whole window arrives at once then.
        """
        if answers > 0 and self._some_done:
            self._window.busy()

    def failed(self, m: int, stamp: Stamp, reason: str, now: float) -> list[Instruction]:
        """A hop of attempt ``stamp``, ours or a replica's, gave up."""
        trip = self.journeys.get(m)
        if trip is None or trip.stamp != stamp:
            return []
        return self._asked([*trip.failed(reason, now)])

    def answered(
        self,
        ask: Ask,
        stage: int,
        holds: bool,
        loss: float | None = None,
    ) -> None:
        """The answer to an ``Ask``."""
        self.journeys[ask.m].answered(ask.stamp, ask.replica, stage, holds, loss)

    def lost(self, replica: Replica, now: float, *, stands: bool = False) -> list[Instruction]:
        """``replica`` was removed. ``stands``: its work is in a sum that is complete.

        The one event that goes over all microbatches.
        """
        todo: list[Instruction] = []
        for trip in self.journeys.values():
            todo += trip.lost(replica, now, stands=stands)
        return self._asked(todo)

    def dropped(self, replica: Replica) -> None:
        """``replica`` was reset, or emptied its accumulators: it holds nothing."""
        for trip in self._tally.held_anywhere(replica):
            trip.dropped(replica)

    def tick(self, now: float) -> list[Instruction]:
        todo: list[Instruction] = []
        for trip in self._tally.due(now):
            todo += trip.tick(now)
        return self._asked(todo)

    def keep_only(self, stage: int, members: Sequence[Replica]) -> None:
        """What somebody else than ``members`` holds for ``stage`` is as good as lost."""
        kept = set(members)
        for replica in self._tally.holders(stage):
            if replica not in kept:
                self.dropped(replica)

    def deadline(self) -> float:
        return self._tally.deadline()

    def _asked(self, todo: list[Instruction]) -> list[Instruction]:
        if todo:
            for m in dict.fromkeys([do.m for do in todo if isinstance(do, Ask)]):
                self._close(self._latest[m])
        return todo

    def loss(self) -> float:
        return journey.loss_of(list(self.journeys.values()))
