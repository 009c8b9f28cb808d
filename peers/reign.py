"""Whether a trainer still leads its run: who obeys another, and which stage nobody serves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from peers import messages as msg
from swarm.core.roster import State
from swarm.errors import SwarmError
from swarm.types import Mark, Replica, Term

if TYPE_CHECKING:
    from peers.trainer import Trainer

log = logging.getLogger("swarm.trainer")

MAX_TERM = 1 << 32
"""A higher number is no honest count of trainers' starts."""


class Superseded(SwarmError):
    """Another trainer of a higher term leads the run."""


class RunGoesOn(SwarmError):
    """A run that was to begin here is found at a later step."""


class StageLost(SwarmError):
    """A stage has had no replica at the run's mark for the patience."""

    def __init__(self, stage: int) -> None:
        super().__init__(f"stage {stage} has lost all its replicas")
        self.stage = stage


class Reign:
    """Ends by an error of ``check``, which the trainer calls whenever it waits.

    Attributes:
        begun: the run has begun, here or under another trainer.
        found_at: where a run that was to begin here was found.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.begun = False
        self.found_at: Mark | None = None
        self._raised = False
        self._obey_others: dict[Replica, tuple[int, int]] = {}
        self._empty_since: dict[int, float] = {}

    # -- other trainers ---------------------------------------------------------------------

    def refused(self, replica: Replica, answer: msg.AnyReply) -> bool:
        """Whether ``replica`` refuses since it obeys another; that is taken note of."""
        if isinstance(answer, msg.Refused) and answer.term is not None:
            self.outranked(replica, answer.term)
            return True
        return False

    def outranked(self, replica: Replica, term: int) -> None:
        """``replica`` says that it obeys a trainer of a higher ``term``.

        Before a fresh run's first step we take a higher term still, once. Later it is simply not
        ours any more: anybody can claim anything, so the run ends only where a stage has nobody
        left.
        """
        trainer = self._trainer
        if term > MAX_TERM:
            log.warning("%s claims a term of %d: ignored", replica.peer, term)
        elif not self.begun and trainer.work is None and not self._raised:
            self._raised = True  # once: a trainer that lives would raise its own as well
            trainer.term = max(trainer.term, Term(term + 1, trainer.me.boot))
        else:
            member = trainer.roster.get(replica)
            if member is not None:
                self._obey_others[replica] = term, member.stage
            trainer.lose(replica, f"obeys another trainer, of term {term}")
        trainer.wake()

    def obeyed(self, replica: Replica) -> None:
        """``replica`` has obeyed us: whatever it said of another trainer is over."""
        self._obey_others.pop(replica, None)

    # -- its end ----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises RunGoesOn, StageLost or Superseded: this trainer is not to go on."""
        trainer = self._trainer
        if self.found_at is not None and trainer.work is None:
            raise RunGoesOn(f"this run is at step {self.found_at.t} already")
        now = anyio.current_time()
        for stage, since in self._empty_since.items():
            if now >= since + trainer.manifest.periods.patience_s:
                raise StageLost(stage)
        for term, stage in self._obey_others.values():
            if not trainer.ready(stage):
                raise Superseded(
                    f"another trainer leads this run (term {term}, ours is "
                    f"{trainer.term.number}), and stage {stage} has nobody else"
                )

    def lost_at(self) -> float:
        """When the first of the stages that nobody serves is given up.

        Whoever is still asked may fill it yet. Before the run has begun nothing is lost.
        """
        trainer, now = self._trainer, anyio.current_time()
        for stage in range(trainer.stages):
            served = any(trainer.roster.ready(stage, mark) for mark in trainer.marks)
            if served or self._may_wait(stage):
                self._empty_since.pop(stage, None)
            else:
                self._empty_since.setdefault(stage, now)
        patience_s = trainer.manifest.periods.patience_s
        return min(self._empty_since.values(), default=float("inf")) + patience_s

    def _may_wait(self, stage: int) -> bool:
        """Nothing has begun yet, or whoever comes can begin where we are; but not if one has come
        and does not get there."""
        trainer = self._trainer
        if trainer.standing is not None:
            return False  # a decision is being applied, which nobody who comes now can follow
        if trainer.seed is not None:
            return not any(
                member.stage == stage and member.state is State.JOINING
                for member in trainer.roster.all()
            )
        return trainer.work is None and not self.begun
