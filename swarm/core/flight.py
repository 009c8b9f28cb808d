"""The microbatches of a step in flight: who is sent next, by which way, and what came of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.core import journey
from swarm.core.estimates import Estimate
from swarm.core.intake import Kind
from swarm.core.journey import Ask, Journey, Phase, Route, Silent
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


class Stamps:
    """The one counter from which a trainer numbers all that it sends."""

    def __init__(self, make: Callable[[int], Stamp]) -> None:
        self._make = make
        self._n = 0

    def take(self) -> Stamp:
        self._n += 1
        return self._make(self._n)


class Pace:
    """How long attempts take, to know when one is late. Lives longer than a step.

    The limit follows measured times, with a floor for noise; before anything was measured it is
    generous, since first passes are slow everywhere.
    """

    FACTOR = 3.0
    FIRST = 6.0
    GROWTH = 1.5

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._attempt = Estimate()

    def took(self, seconds: float) -> None:
        self._attempt.update(seconds)

    def limit_s(self, tries: int) -> float:
        """How long an attempt may be without news, at its try number ``tries`` (0 is first)."""
        known = self._attempt.value
        base = self.FIRST * self._floor_s if known is None else self.FACTOR * known
        return max(self._floor_s, base) * self.GROWTH ** min(tries, 8)


class Flight:
    """Machine: keeps a window of journeys in flight until all are done.

    Args:
        journeys: the microbatches, or evaluations, to get done.
        mark: the version that they are for.
        wiring, window, pace, stamps: the trainer's, shared by all its steps.
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
    ) -> None:
        self.journeys = {j.m: j for j in journeys}
        self.mark = mark
        self.resent = 0
        self._wiring, self._window, self._pace = wiring, window, pace
        self._stamps, self._rng = stamps, rng
        self._forward_s: dict[tuple[Stamp, int], float] = {}
        self._launched: dict[Stamp, tuple[Journey, Route]] = {}
        self._open: set[Stamp] = set()
        self._single: set[Replica] = set()

    @property
    def done(self) -> bool:
        return all(j.phase is Phase.DONE for j in self.journeys.values())

    @property
    def void(self) -> bool:
        """A microbatch was found not finite by two: the step is to be skipped."""
        return any(j.void for j in self.journeys.values())

    @property
    def in_flight(self) -> int:
        return sum(j.phase in (Phase.FLYING, Phase.ASKING) for j in self.journeys.values())

    def stage_done(self, stage: int) -> bool:
        """Every microbatch is known to have counted in ``stage``."""
        return all(stage in j.holders for j in self.journeys.values())

    def held_by(self, stage: int, replica: Replica) -> frozenset[int]:
        return frozenset(m for m, j in self.journeys.items() if j.holders.get(stage) == replica)

    def fill(self, stages: Sequence[Sequence[Replica]], now: float) -> list[Instruction]:
        """Launch what the window allows, oldest microbatch first.

        ``stages``: who can serve each stage now. Nothing is launched while one has nobody.
        """
        for stage, replicas in enumerate(stages):
            self._wiring.sync(stage, replicas)
        self._single = {replicas[0] for replicas in stages if len(replicas) == 1}
        idle = [j for j in self.journeys.values() if j.phase is Phase.IDLE]
        room = self._window.size - self.in_flight
        if room <= 0 or not all(stages):
            return []
        idle.sort(key=lambda j: j.m)
        return [self._launch(j, len(stages), now) for j in idle[:room]]

    def _launch(self, trip: Journey, stages: int, now: float) -> Launch:
        stamp = self._stamps.take()
        route = tuple(
            self._wiring.choose(stage, stamp, now, self._rng, shun=trip.shun)
            for stage in range(stages)
        )
        limit_s = self._pace.limit_s(trip.tries)
        self.resent += trip.tries > 0
        trip.send(stamp, route, now, limit_s)
        self._launched[stamp] = trip, route
        self._open.add(stamp)
        return Launch(Attempt(stamp, self.mark, trip.m, trip.mask), route, limit_s)

    def receipt(self, receipt: Receipt, alone: bool, now: float) -> list[Instruction]:
        """Take in a receipt of this flight. ``alone``: its stage has no other replica."""
        if not self.expects(receipt):
            return []
        trip, _ = self._launched[receipt.stamp]
        trip.progress(receipt.stamp, receipt.stage, receipt.replica, now)
        self._measure(receipt, now)
        if receipt.loss is not None:
            trip.measured(receipt.loss)
        if receipt.verdict in (COUNTED, HELD):
            trip.holds(receipt.stage, receipt.replica)
        todo: list[Instruction] = []
        if receipt.verdict == NOT_FINITE:
            single = self._single | ({receipt.replica} if alone else set())
            todo += trip.not_finite(receipt.stamp, receipt.stage, single, now)
        elif receipt.verdict == DROPPED:
            self.dropped(receipt.replica)
            todo += self.failed(trip.m, receipt.stamp, "a replica failed while adding", now)
        if trip.phase is Phase.DONE:
            self._arrived(trip, receipt.stamp, now)
        return self._asked(todo)

    def expects(self, receipt: Receipt) -> bool:
        """Whether ``receipt`` is of an attempt of this flight, from a replica on its lists."""
        trip, route = self._launched.get(receipt.stamp, (None, ()))
        return (
            trip is not None
            and trip.m == receipt.m
            and 0 <= receipt.stage < len(route)
            and receipt.replica in route[receipt.stage]
        )

    def _measure(self, receipt: Receipt, now: float) -> None:
        self.busy(receipt.busy)
        key = (receipt.stamp, receipt.stage)
        work_s = max(receipt.compute_s, receipt.link_s)
        if receipt.kind is Kind.FORWARD:
            self._forward_s[key] = work_s
            self._wiring.accepted(receipt.stage, receipt.stamp, receipt.replica, now)
            return
        work_s += self._forward_s.pop(key, 0.0)
        self._wiring.served(receipt.stage, receipt.stamp, receipt.replica, work_s, now)

    def _arrived(self, trip: Journey, stamp: Stamp, now: float) -> None:
        if trip.stamp not in self._open:
            return
        if stamp == trip.stamp:
            self._pace.took(now - trip.sent_at)
        self._window.succeeded()
        self._close(trip.stamp)

    def end(self) -> None:
        """Nothing more is waited for: what the open attempts were charged for is refunded."""
        for stamp in sorted(self._open):
            self._close(stamp)

    def _close(self, stamp: Stamp) -> None:
        self._open.discard(stamp)
        self._wiring.closed(stamp)
        for key in [key for key in self._forward_s if key[0] == stamp]:
            del self._forward_s[key]

    def busy(self, answers: int) -> None:
        """A push met this many busy replicas: fewer microbatches should be in flight."""
        if answers > 0:
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
        """``replica`` was removed. ``stands``: its work is in a sum that is complete."""
        todo: list[Instruction] = []
        for trip in self.journeys.values():
            todo += trip.lost(replica, now, stands=stands)
        return self._asked(todo)

    def dropped(self, replica: Replica) -> None:
        """``replica`` was reset, or emptied its accumulators: it holds nothing."""
        for trip in self.journeys.values():
            trip.dropped(replica)

    def tick(self, now: float) -> list[Instruction]:
        todo: list[Instruction] = []
        for trip in self.journeys.values():
            todo += trip.tick(now)
        return self._asked(todo)

    def keep_only(self, stage: int, members: Sequence[Replica]) -> None:
        """What somebody else than ``members`` holds for ``stage`` is as good as lost."""
        gone = {j.holders[stage] for j in self.journeys.values() if stage in j.holders}
        for replica in gone - set(members):
            self.dropped(replica)

    def deadline(self) -> float:
        return min((j.deadline for j in self.journeys.values()), default=float("inf"))

    def _asked(self, todo: list[Instruction]) -> list[Instruction]:
        for stamp in {do.stamp for do in todo if isinstance(do, Ask)}:
            self._close(stamp)
        return todo

    def loss(self) -> float:
        return journey.loss_of(list(self.journeys.values()))
