"""The queue of a stage: what is accepted, what is busy, what is refused, and what runs next.

Bounded on purpose: a forward beyond the bound is *busy*; a backward for a context that is held
needs no room, so something can always move (the last stage waits for nobody).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import StrEnum

from swarm.core.hop import Outcome
from swarm.types import Attempt, Mark, Stamp, Term


class Kind(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Job:
    """A microbatch's pass through this stage. ``expires_at`` bounds how long it may stay here."""

    kind: Kind
    attempt: Attempt
    expires_at: float


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to an offer: ACCEPTED, BUSY or REFUSED, and why."""

    outcome: Outcome
    reason: str = ""


ACCEPTED = Reply(Outcome.ACCEPTED)


class Intake:
    """Accepts jobs up to its bounds and orders them: backward first, older before younger.

    A *context* is what a forward leaves behind for its backward. It ends with the backward, a
    cancel, a later attempt of the same microbatch, a new mark, or its time limit. The shell keeps
    payloads and graphs by stamp; ``take_freed`` says which of them may go.

    Args:
        stage, last_stage: where this is; the last stage needs no contexts.
        queue: how many forwards may wait.
        contexts: how many contexts and forwards that will leave one may be held.
        answers: how many attempts are remembered in a step; further ones are refused.
    """

    def __init__(
        self, stage: int, last_stage: int, *, queue: int, contexts: int, answers: int = 1 << 18
    ) -> None:
        self._stage = stage
        self._last = last_stage
        self._queue_bound = queue
        self._context_bound = contexts
        self._answer_bound = answers
        self.term = Term(0, "")
        self.mark: Mark | None = None
        self.bar: Stamp | None = None
        self._waiting: dict[tuple[Kind, Stamp], Job] = {}
        self._undecoded: set[tuple[Kind, Stamp]] = set()
        self._ready: list[tuple[bool, int, str, int, Kind, Stamp]] = []
        self._forwards = self._reserved = 0
        self._next_expiry = float("inf")
        self._running: Job | None = None
        self._contexts: dict[Stamp, Job] = {}
        self._newest: dict[tuple[int, bool], Stamp] = {}
        self._answers: dict[tuple[Kind, Stamp], tuple[int, Reply]] = {}
        self._taken: set[tuple[Kind, Stamp]] = set()
        self._cancelled: set[Stamp] = set()
        self._freed: list[Stamp] = []

    # -- what arrives ---------------------------------------------------------------------

    def offer(self, job: Job, tries: int, now: float) -> Reply:
        """Answer a push. The same (attempt, tries) gets the same answer all through the step.

        Only the newest try is remembered: a sender tries again only after *busy*.
        """
        key = (job.kind, job.attempt.stamp)
        if key in self._taken:
            return ACCEPTED
        if key in self._answers:
            newest, reply = self._answers[key]
            if tries <= newest:
                return reply if tries == newest else Reply(Outcome.BUSY, "an old try")
        elif len(self._answers) >= self._answer_bound:
            return Reply(Outcome.REFUSED, "too many attempts in this step")
        reply = self._refusal(job) or self._room(job, now) or ACCEPTED
        if reply is ACCEPTED:
            self._take(job)
        self._answers[key] = (tries, reply)
        return reply

    def _refusal(self, job: Job) -> Reply | None:
        attempt = job.attempt
        if attempt.stamp.term < self.term:
            return Reply(Outcome.REFUSED, f"term {self.term.number} is obeyed here")
        if attempt.stamp.term > self.term:
            return Reply(Outcome.BUSY, "not yet under this trainer")
        if self.mark is None or attempt.mark > self.mark:
            return Reply(Outcome.BUSY, "not yet at this mark")
        if attempt.mark < self.mark:
            return Reply(Outcome.REFUSED, f"stale: this replica is at step {self.mark.t}")
        if attempt.stamp in self._cancelled:
            return Reply(Outcome.REFUSED, "cancelled")
        if self._barred(attempt):
            return Reply(Outcome.REFUSED, "sent before the last prepare or reset")
        newest = self._newest.get((attempt.m, attempt.evaluation))
        if newest is not None and attempt.stamp < newest:
            return Reply(Outcome.REFUSED, "a later attempt is known")
        if job.kind is Kind.BACKWARD and attempt.stamp not in self._contexts:
            return Reply(Outcome.REFUSED, "no context is held for it")
        return None

    def _room(self, job: Job, now: float) -> Reply | None:
        if job.kind is Kind.BACKWARD:
            return None
        self._supersede(job.attempt)
        self.expire(now)
        if self._forwards >= self._queue_bound:
            return Reply(Outcome.BUSY, f"{self._forwards} microbatches wait here")
        reserved = len(self._contexts) + self._reserved
        if self._running is not None and self._running.kind is Kind.FORWARD:
            reserved += self.leaves_context(self._running.attempt)
        if self.leaves_context(job.attempt) and reserved >= self._context_bound:
            return Reply(Outcome.BUSY, f"{reserved} microbatches are under way here")
        return None

    def _supersede(self, attempt: Attempt) -> None:
        """A later attempt of a microbatch ends the older one, even if it finds no room here."""
        superseded = self._newest.get((attempt.m, attempt.evaluation))
        self._newest[attempt.m, attempt.evaluation] = attempt.stamp
        if superseded is not None and superseded != attempt.stamp:
            self._end(superseded)

    def _take(self, job: Job) -> None:
        key = (job.kind, job.attempt.stamp)
        self._waiting[key] = job
        self._undecoded.add(key)
        self._taken.add(key)
        self._next_expiry = min(self._next_expiry, job.expires_at)
        self._reckon(job, 1)

    def _reckon(self, job: Job, change: int) -> None:
        """``change`` more jobs such as ``job`` wait."""
        if job.kind is Kind.FORWARD:
            self._forwards += change
            self._reserved += change * self.leaves_context(job.attempt)

    def decoded(self, kind: Kind, stamp: Stamp) -> bool:
        """The payload of an accepted job is there: it may run. False if it has ended meanwhile."""
        self._undecoded.discard((kind, stamp))
        if (kind, stamp) not in self._waiting:
            return False
        term = stamp.term
        place = (kind is Kind.FORWARD, term.number, term.boot, stamp.n, kind, stamp)
        heapq.heappush(self._ready, place)
        return True

    # -- what runs ------------------------------------------------------------------------

    def next(self, now: float) -> Job | None:
        """The job to run now: backward before forward, older before younger; None if idle."""
        self.expire(now)
        if not self._waiting:
            self._ready.clear()  # what has ended meanwhile
        while self._running is None and self._ready:
            key = heapq.heappop(self._ready)[-2:]
            self._running = self._waiting.pop(key, None)
            if self._running is not None:
                self._reckon(self._running, -1)
                return self._running
        return None

    def finished(self, job: Job) -> bool:
        """``job`` has been computed. True if its result still matters (not cancelled meanwhile).

        A forward that leaves a context opens it here.
        """
        self._running = None
        stamp = job.attempt.stamp
        if job.kind is Kind.BACKWARD:
            self._end(stamp)
        alive = self._alive(job.attempt)
        if job.kind is Kind.FORWARD:
            if alive and self.leaves_context(job.attempt):
                self._contexts[stamp] = job
                self._next_expiry = min(self._next_expiry, job.expires_at)
            else:
                self._freed.append(stamp)
        return alive

    def leaves_context(self, attempt: Attempt) -> bool:
        """Whether a forward of ``attempt`` waits here for its backward."""
        return (
            not attempt.evaluation and self._stage != self._last and self._stage >= attempt.lowest
        )

    # -- what ends ------------------------------------------------------------------------

    def cancel(self, stamp: Stamp) -> None:
        """The attempt ends here, queued, running or waiting for its backward."""
        self._cancelled.add(stamp)
        self._end(stamp)

    def adopt(self, term: Term) -> bool:
        """Obey a trainer of ``term``; True if it is new. Work of lower terms is dropped."""
        if term <= self.term:
            return False
        self.term = term
        for job in self._jobs():
            self._end(job.attempt.stamp)
        return True

    def raise_bar(self, stamp: Stamp) -> None:
        """What was sent before ``stamp`` no longer counts, so it need not run either.

        What only passes through, having counted here already, is not touched.
        """
        if self.bar is None or stamp > self.bar:
            self.bar = stamp
        for job in self._jobs():
            if self._barred(job.attempt):
                self._end(job.attempt.stamp)

    def leave(self) -> None:
        """The stage is at no mark any more: everything ends, and all work is *not yet*."""
        self._turn_to(None)

    def advance(self, mark: Mark) -> None:
        """A new mark: everything of the old one ends, and so do the remembered answers."""
        self._turn_to(mark)

    def _turn_to(self, mark: Mark | None) -> None:
        self.mark = mark
        for job in self._jobs():
            self._end(job.attempt.stamp)
        self._ready.clear()
        self._newest.clear()
        self._answers.clear()
        self._taken.clear()
        self._cancelled.clear()

    def expire(self, now: float) -> None:
        """End contexts and queued jobs whose time limit has passed."""
        if now < self._next_expiry:
            return
        for job in self._jobs():
            if job.expires_at <= now:
                self._end(job.attempt.stamp)
        self._next_expiry = min((job.expires_at for job in self._jobs()), default=float("inf"))

    def take_freed(self) -> list[Stamp]:
        """Stamps whose payloads and graphs the shell may forget; emptied by the call."""
        freed, self._freed = self._freed, []
        return freed

    # -- what is held -----------------------------------------------------------------------

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Contexts that wait for their backward."""
        return len(self._contexts)

    def _alive(self, attempt: Attempt) -> bool:
        newest = self._newest.get((attempt.m, attempt.evaluation))
        return (
            attempt.mark == self.mark
            and attempt.stamp.term == self.term
            and attempt.stamp not in self._cancelled
            and not self._barred(attempt)
            and newest == attempt.stamp
        )

    def _barred(self, attempt: Attempt) -> bool:
        """It would have to count here, but was sent before the last prepare or reset."""
        return self.bar is not None and self._stage in attempt.mask and attempt.stamp <= self.bar

    def _jobs(self) -> list[Job]:
        return [*self._contexts.values(), *self._waiting.values()]

    def _end(self, stamp: Stamp) -> None:
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            ended = self._waiting.pop((kind, stamp), None)
            if ended is not None:
                self._reckon(ended, -1)
            self._undecoded.discard((kind, stamp))
        self._contexts.pop(stamp, None)
        self._freed.append(stamp)
