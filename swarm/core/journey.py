"""One microbatch on its way through one step: events in, instructions out.

When something fails there is one rule: *ask, then send again*. The attempt is cancelled at every
replica on its lists; each answers whether it holds the microbatch and never counts that attempt
afterwards. Then it goes again from the first stage, with the mask of the stages where nobody is
known to hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import fsum
from typing import Protocol

from swarm.types import Replica, Stamp

Route = tuple[tuple[Replica, ...], ...]
"""For each stage an ordered short list of replicas."""


class Phase(StrEnum):
    IDLE = "idle"
    FLYING = "flying"
    ASKING = "asking"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Ask:
    """Cancel attempt ``stamp`` of ``m`` at ``replica`` and hear whether it holds ``m``."""

    m: int
    stamp: Stamp
    replica: Replica


@dataclass(frozen=True, slots=True)
class Silent:
    """``replica`` did not answer a question within its limit."""

    replica: Replica
    reason: str


Instruction = Ask | Silent


class Watcher(Protocol):
    """Hears at once of a change, but not of a deadline that only moves on within a phase."""

    def turned(self, trip: Journey, before: Phase) -> None: ...

    def held(self, trip: Journey, stage: int, replica: Replica) -> None: ...

    def uncounted(self, trip: Journey, stage: int, replica: Replica) -> None: ...


class Journey:
    """Machine for one microbatch in one step.

    ``holders`` maps each stage where ``m`` is known to have counted to who holds it. ``void`` is
    set once its gradient was not finite on two ways that share no replica (but for stages that
    have only one): the step will be skipped. Whoever finds such a gradient need not have caused
    it, so the finder alone is not enough.

    When every stage holds it and only the loss has not come, ``mask`` is empty: it goes once more
    as an evaluation of the same microbatch.

    Args:
        m: the microbatch. stages: how many the model has.
        answer_s: how long the answer to a question may take.
        evaluation: it counts nowhere; it is done once its loss is known.
    """

    def __init__(self, m: int, stages: int, *, answer_s: float, evaluation: bool = False) -> None:
        self.m = m
        self.evaluation = evaluation
        self.phase = Phase.IDLE
        self.holders: dict[int, Replica] = {}
        self.loss: float | None = None
        self.void = False
        self.tries = 0
        self.stamp: Stamp | None = None
        self.sent_at = 0.0
        self.deadline = float("inf")
        self.reason = ""
        self.watcher: Watcher | None = None
        self._missing = set() if evaluation else set(range(stages))
        self._answer_s = answer_s
        self._route: Route = ()
        self._limit_s = 0.0
        self._unanswered: set[Replica] = set()
        self._took: dict[int, Replica] = {}
        self._not_finite: dict[Stamp, frozenset[Replica]] = {}

    # -- sending ----------------------------------------------------------------------------

    @property
    def mask(self) -> frozenset[int]:
        """The stages where it still has to count."""
        return frozenset(self._missing)

    @property
    def shun(self) -> frozenset[Replica]:
        """The way on which the gradient last was not finite: others are to look at it."""
        return next(reversed(self._not_finite.values()), frozenset())

    @property
    def _way(self) -> frozenset[Replica]:
        """Who has the attempt under way, or had it: as told, else the first choice."""
        firsts = {
            stage: short_list[0] for stage, short_list in enumerate(self._route) if short_list
        }
        return frozenset((firsts | self._took).values())

    def send(self, stamp: Stamp, route: Route, now: float, limit_s: float) -> None:
        """It is on its way as attempt ``stamp``; without news for ``limit_s`` it is asked for."""
        self.tries += 1
        self.stamp, self._route, self._took = stamp, route, {}
        self.sent_at, self._limit_s = now, limit_s
        self._turn(Phase.FLYING, now + limit_s)

    # -- news -------------------------------------------------------------------------------

    def progress(self, stamp: Stamp, stage: int, replica: Replica, now: float) -> None:
        """A sign of life of the attempt under way: ``replica`` has it, or had it."""
        if stamp is not self.stamp and stamp != self.stamp:
            return
        self._took[stage] = replica
        if self.phase is Phase.FLYING:
            self.deadline = now + self._limit_s

    def holds(self, stage: int, replica: Replica) -> None:
        """``replica`` says that it holds ``m`` for ``stage``. First come, first believed."""
        if stage not in self.holders:
            self.holders[stage] = replica
            self._missing.discard(stage)
            if self.watcher is not None:
                self.watcher.held(self, stage, replica)
        self._if_done()

    def measured(self, loss: float) -> None:
        """The last stage's part of the loss of the step (mean over the batch, its share)."""
        if self.loss is None:
            self.loss = loss
        self._if_done()

    def not_finite(
        self, stamp: Stamp, stage: int, single: Collection[Replica], now: float
    ) -> list[Instruction]:
        """A gradient of attempt ``stamp`` was not finite at ``stage``, and was not counted.

        ``single``: replicas that are the only one of their stage now.
        """
        if stamp != self.stamp or self.phase is Phase.DONE:
            return []
        way = self._way
        others = [found for told, found in self._not_finite.items() if told != stamp]
        self._not_finite[stamp] = way
        if any((way & found) <= set(single) for found in others):
            self.void = True
            self._end()
            return []
        return self.failed(f"stage {stage}: gradient not finite", now)

    def failed(self, reason: str, now: float) -> list[Instruction]:
        """The attempt under way came to grief, or went quiet: ask everybody on its lists."""
        if self.phase is not Phase.FLYING or self.stamp is None:
            return []
        self.reason = reason
        self._unanswered = {replica for short_list in self._route for replica in short_list}
        self._turn(Phase.ASKING, now + self._answer_s)
        stamp = self.stamp
        asks: list[Instruction] = [Ask(self.m, stamp, r) for r in sorted(self._unanswered)]
        self._if_answered()
        return asks

    def answered(
        self, stamp: Stamp, replica: Replica, stage: int, holds: bool, loss: float | None = None
    ) -> None:
        """The answer to an ``Ask``; a replica of the last stage that holds ``m`` adds its loss."""
        if loss is not None:
            self.measured(loss)
        if holds:
            self.holds(stage, replica)
        if self.phase is Phase.ASKING and stamp == self.stamp:
            self._unanswered.discard(replica)
            self._if_answered()

    def lost(self, replica: Replica, now: float, *, stands: bool = False) -> list[Instruction]:
        """``replica`` was removed: what it held is uncounted; what was on its way there is asked.

        ``stands``: a round that holds its work is complete, so nothing needs to be done again.
        """
        if not stands:
            self.dropped(replica)
        if not self._may_have(replica):
            return []
        under_way = replica in self._way
        self._route = tuple(
            tuple(other for other in short_list if other != replica) for short_list in self._route
        )
        self._unanswered.discard(replica)
        self._if_answered()
        return self.failed(f"{replica.peer[-6:]} was removed", now) if under_way else []

    def dropped(self, replica: Replica) -> None:
        """``replica`` no longer holds ``m`` (it emptied its accumulators, or said so)."""
        for stage in [s for s, holder in self.holders.items() if holder == replica]:
            del self.holders[stage]
            if not self.evaluation:
                self._missing.add(stage)
            if self.watcher is not None:
                self.watcher.uncounted(self, stage, replica)
        if self.phase is Phase.DONE and self._missing and not self.void:
            self._turn(Phase.IDLE)

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed: a quiet attempt is asked for, an unanswered question ends."""
        if now < self.deadline:
            return []
        if self.phase is Phase.FLYING:
            return self.failed("no progress in the expected time", now)
        silent: list[Instruction] = [
            Silent(replica, "did not answer a cancel") for replica in sorted(self._unanswered)
        ]
        self._unanswered.clear()
        self._if_answered()
        return silent

    def _may_have(self, replica: Replica) -> bool:
        """It was to take part in the latest attempt, or told of it."""
        return replica in self._took.values() or any(replica in listed for listed in self._route)

    def _if_answered(self) -> None:
        if self.phase is Phase.ASKING and not self._unanswered:
            self._turn(Phase.IDLE)
            self._if_done()

    def _if_done(self) -> None:
        if self.loss is not None and not self._missing and not self.void:
            self._end()

    def _end(self) -> None:
        self._unanswered.clear()
        self._turn(Phase.DONE)

    def _turn(self, phase: Phase, deadline: float = float("inf")) -> None:
        before, self.phase, self.deadline = self.phase, phase, deadline
        if self.watcher is not None:
            self.watcher.turned(self, before)


def loss_of(journeys: Sequence[Journey]) -> float:
    """The exact sum of the parts of the loss; NaN if one never came back, or there is no sum."""
    try:
        return fsum(float("nan") if journey.loss is None else journey.loss for journey in journeys)
    except (OverflowError, ValueError):  # beyond a float, or infinities of both signs
        return float("nan")
