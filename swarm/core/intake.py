"""The queue of a stage: what is accepted, what is busy, what is refused, and what runs next.

Bounded on purpose: a forward beyond the bound is *busy*; a backward for a context that is held
needs no room, so something can always move (the last stage waits for nobody).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import StrEnum

from swarm.core.books import Book, book_of, step_of
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
        self._before: Mark | None = None
        self._bars: dict[Book, Stamp] = {}
        self._waiting: dict[tuple[Kind, Stamp], Job] = {}
        self._undecoded: set[tuple[Kind, Stamp]] = set()
        self._ready: list[tuple[bool, int, int, str, int, Kind, Stamp]] = []
        self._forwards = self._reserved = 0
        self._next_expiry = float("inf")
        self._running: Job | None = None
        self._contexts: dict[Stamp, Job] = {}
        self._newest: dict[tuple[int, int, bool], Stamp] = {}
        self._answers: dict[tuple[Kind, Stamp], tuple[int, Reply, int]] = {}
        self._taken: dict[tuple[Kind, Stamp], int] = {}
        self._cancelled: dict[Stamp, Mark | None] = {}
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
            newest, reply, _ = self._answers[key]
            if tries <= newest:
                return reply if tries == newest else Reply(Outcome.BUSY, "an old try")
        elif len(self._answers) >= self._answer_bound:
            return Reply(Outcome.REFUSED, "too many attempts in this step")
        reply = self._refusal(job) or self._room(job, now) or ACCEPTED
        if reply is ACCEPTED:
            self._take(job)
        self._answers[key] = (tries, reply, step_of(job.attempt))
        return reply

    def _refusal(self, job: Job) -> Reply | None:
        attempt = job.attempt
        if attempt.stamp.term < self.term:
            return Reply(Outcome.REFUSED, f"term {self.term.number} is obeyed here")
        if attempt.stamp.term > self.term:
            return Reply(Outcome.BUSY, "not yet under this trainer")
        if self._book(attempt) is None:
            if self.mark is None or attempt.mark > self.mark:
                return Reply(Outcome.BUSY, "not yet at this mark")
            return Reply(Outcome.REFUSED, f"stale: this replica is at step {self.mark.t}")
        if attempt.stamp in self._cancelled:
            return Reply(Outcome.REFUSED, "cancelled")
        if self._barred(attempt):
            return Reply(Outcome.REFUSED, "sent before the last prepare or reset")
        newest = self._newest.get(_microbatch(attempt))
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
        superseded = self._newest.get(_microbatch(attempt))
        self._newest[_microbatch(attempt)] = attempt.stamp
        if superseded is not None and superseded != attempt.stamp:
            self._end(superseded)

    def _take(self, job: Job) -> None:
        key = (job.kind, job.attempt.stamp)
        self._waiting[key] = job
        self._undecoded.add(key)
        self._taken[key] = step_of(job.attempt)
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
        job = self._waiting.get((kind, stamp))
        if job is None:
            return False
        term, step = stamp.term, step_of(job.attempt)
        place = (kind is Kind.FORWARD, step, term.number, term.boot, stamp.n, kind, stamp)
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
        self._cancelled[stamp] = self.mark
        self._end(stamp)

    def adopt(self, term: Term) -> bool:
        """Obey a trainer of ``term``; True if it is new. Work of lower terms is dropped."""
        if term <= self.term:
            return False
        self.term = term
        for job in self._jobs():
            self._end(job.attempt.stamp)
        return True

    def raise_bar(self, stamp: Stamp, *books: Book) -> None:
        """What was sent before ``stamp`` no longer counts, so it need not run either.

        What only passes through, having counted here already, is not touched. A prepare is of
        the OWN book alone; without ``books``, as for a poll or reset, it holds for both.
        """
        for book in books or Book:
            bar = self._bars.get(book)
            if bar is None or stamp > bar:
                self._bars[book] = stamp
        for job in self._jobs():
            if self._barred(job.attempt):
                self._end(job.attempt.stamp)

    def leave(self) -> None:
        """The stage is at no mark any more: everything ends, and all work is *not yet*."""
        self._turn_to(None, None)

    def advance(self, mark: Mark, before: Mark | None = None) -> None:
        """A new mark: everything of the old one ends, and so do the remembered answers.

        Not so what was ahead, if a decision led here ``before`` whose mark that was.
        """
        self._turn_to(mark, before)

    def _turn_to(self, mark: Mark | None, before: Mark | None) -> None:
        left, self.mark, self._before = self.mark, mark, before
        for job in self._jobs():
            if self._book(job.attempt) is None:
                self._end(job.attempt.stamp)
        if before is None or mark is None:
            for memory in (self._ready, self._newest, self._answers, self._taken, self._cancelled):
                memory.clear()
            return
        # Own is what was ahead. What was the own book's is for the next: all that is sent for
        # that is younger than its bar.
        own, ahead = self._bars.get(Book.OWN), self._bars.get(Book.AHEAD)
        pairs = {Book.OWN: ahead, Book.AHEAD: own}
        self._bars = {book: bar for book, bar in pairs.items() if bar is not None}
        self._newest = {key: s for key, s in self._newest.items() if key[0] >= mark.t}
        self._answers = {key: kept for key, kept in self._answers.items() if kept[-1] >= mark.t}
        self._taken = {key: step for key, step in self._taken.items() if step >= mark.t}
        self._cancelled = {s: at for s, at in self._cancelled.items() if at == left}

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
        newest = self._newest.get(_microbatch(attempt))
        return (
            self._book(attempt) is not None
            and attempt.stamp.term == self.term
            and attempt.stamp not in self._cancelled
            and not self._barred(attempt)
            and newest == attempt.stamp
        )

    def _barred(self, attempt: Attempt) -> bool:
        """It would have to count here, but was sent before the last prepare or reset."""
        bar = self._bars.get(self._book(attempt) or Book.OWN)
        return bar is not None and self._stage in attempt.mask and attempt.stamp <= bar

    @property
    def bar(self) -> Stamp | None:
        """The highest stamp of poll, prepare or reset that was obeyed for the own book."""
        return self._bars.get(Book.OWN)

    def _book(self, attempt: Attempt) -> Book | None:
        return book_of(attempt.mark, attempt.ahead, self.mark, self._before)

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


def _microbatch(attempt: Attempt) -> tuple[int, int, bool]:
    """What an attempt is one try of: the step, ``m``, and whether it counts nowhere."""
    return step_of(attempt), attempt.m, attempt.evaluation
