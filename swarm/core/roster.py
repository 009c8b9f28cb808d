"""Who serves which stage, at which mark: the trainer's list of members and strangers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from swarm.core.backoff import Backoff
from swarm.types import FRESH, Mark, Replica

GIVEN_UP = 12
"""Unanswered questions after which a replica is forgotten; an announcement brings it back."""

NOBODY_ELSE = "no other replica of its stage is there"

OLD_NEWS_S = 300.0
"""So long an announcement of a boot that a later one has superseded is taken for an old copy."""


class State(StrEnum):
    """ANNOUNCED: seen in the directory, not yet spoken to. READY: at the mark it last told.
    BEHIND: at a mark from which it cannot follow. JOINING: it copies the state of its stage.
    REMOVED: silent; it is asked now and then."""

    ANNOUNCED = "announced"
    READY = "ready"
    BEHIND = "behind"
    JOINING = "joining"
    REMOVED = "removed"


@dataclass(slots=True)
class Member:
    """One replica as the trainer knows it. ``note`` says in plain words what is wrong.

    ``leaving``: it takes part in the step under way, and goes when that is applied. ``sequence``:
    of the peer's announcements the later has the higher one, after a restart or a move too.
    """

    replica: Replica
    stage: int
    state: State
    mark: Mark | None
    note: str
    failures: int
    ask_at: float
    asking: bool = False
    leaving: bool = False
    sequence: int = 0


class Admission(StrEnum):
    """What to do with a replica that has answered a question."""

    BEGIN = "begin"
    RESET = "reset"
    JOIN = "join"
    WAIT = "wait"


class Roster:
    """Machine: announcements, answers and failures in; whom to ask, and who is ready, out."""

    def __init__(self, backoff: Backoff) -> None:
        self._members: dict[Replica, Member] = {}
        self._superseded: dict[Replica, float] = {}
        self._backoff = backoff

    def announced(
        self, replica: Replica, stage: int, now: float, sequence: int = 0
    ) -> list[Replica]:
        """The directory shows ``replica`` at ``stage``. Returns replicas that this proves dead.

        The same peer with another boot has restarted, or moved: what it held before is gone.
        Directories may show the older boot once more; that is no restart. Of two stages the
        later announcement counts; where it is not known when a member was announced (sequence 0),
        both are asked.
        """
        member = self._members.get(replica)
        if member is not None:
            member.sequence = max(member.sequence, sequence)
            return []
        known = [m for m in self._members.values() if m.replica.peer == replica.peer]
        moved_since = any(m.stage != stage and m.sequence > sequence for m in known)
        dead = [m.replica for m in known if m.stage == stage or m.sequence]
        if moved_since or self._superseded.get(replica, now) > now:
            return []
        self._superseded = {r: until for r, until in self._superseded.items() if until > now}
        self._superseded |= dict.fromkeys(dead, now + OLD_NEWS_S)
        self._members[replica] = Member(
            replica, stage, State.ANNOUNCED, None, "", 0, now, sequence=sequence
        )
        return dead

    def forget(self, replica: Replica, now: float | None = None) -> None:
        """Nobody will hear of it again: it has restarted, or left (``now``).

        What the directory still shows of one that has left is old news.
        """
        self._members.pop(replica, None)
        if now is not None:
            self._superseded[replica] = now + OLD_NEWS_S

    def to_ask(self, now: float, *at: Mark) -> list[Member]:
        """Whom to ask where they are, now. Each is asked once until the answer is told here, and
        not again before a pause, whatever came of it, unless something else brings that forward.

        Those that are READY at another mark than the run's (``at``; two while a decision is being
        applied) are asked too: a decision may have passed them by.
        """
        due = [member for member in self._unsure(at) if member.ask_at <= now]
        for member in due:
            member.asking = True
            member.ask_at = now + self._backoff.first_s
        return due

    def answered(
        self, replica: Replica, mark: Mark | None, at: Mark, now: float, rng: random.Random
    ) -> Admission:
        """It says that it is at ``mark`` (None: no weights yet); the run is ``at``.

        While it is being admitted (RESET, BEGIN) it is not asked again: ``admitted`` or
        ``unanswered`` says how that ended.

        Only the trainer of a fresh run says BEGIN; a replica elsewhere has to JOIN, if it can.
        """
        member = self._members.get(replica)
        if member is None:
            return Admission.WAIT
        if member.state is State.READY and member.mark == at:
            member.asking = False
            return Admission.WAIT  # a decision that it has just applied was quicker
        if mark == at:
            return Admission.RESET
        if mark is None and at == FRESH:
            return Admission.BEGIN
        member.asking = False
        member.mark = mark
        if member.state is not State.JOINING:
            where = "has no weights" if mark is None else f"is at step {mark.t}"
            member.state, member.note = State.BEHIND, f"{where}, the run is at step {at.t}"
        member.ask_at = now + self._backoff.pause(1, rng)
        return Admission.JOIN

    def unanswered(self, replica: Replica, reason: str, now: float, rng: random.Random) -> None:
        """The question, or the admission, failed."""
        member = self._members.get(replica)
        if member is None:
            return
        member.asking = False
        member.note = reason
        self._later(member, now, rng)
        if member.failures > GIVEN_UP:
            self.forget(replica)

    def _later(self, member: Member, now: float, rng: random.Random) -> None:
        member.failures += 1
        member.ask_at = now + self._backoff.pause(member.failures, rng)

    def admitted(self, replica: Replica, mark: Mark) -> None:
        """It obeyed a reset, or applied a decision: it is READY at ``mark``.

        Only a step forward makes up for past failures; else one that falls silent in each round
        would be back at once each time.
        """
        member = self._members.get(replica)
        if member is None:
            return
        if mark != member.mark:
            member.failures = 0
        member.state, member.mark = State.READY, mark
        member.asking, member.note = False, ""

    def joining(self, replica: Replica, note: str) -> None:
        """It has been told where to copy the state from. ``note``: how that goes."""
        member = self._members.get(replica)
        if member is not None:
            member.state, member.note = State.JOINING, note

    def ask_soon(self, replica: Replica, now: float) -> None:
        """It says that something has changed: hear what."""
        member = self._members.get(replica)
        if member is not None:
            member.ask_at = now

    def leave(self, replica: Replica, *at: Mark, done: bool = False) -> str:
        """It would like to go: why it must not yet, or nothing; then it gets no more work.

        One replica of a stage leaves at a time, and never the last one: if all its mates are gone
        meanwhile, it has to stay after all. ``at``: the run's mark; two while a decision is being
        applied, and then, if its own part is ``done``, only mates count that have applied it.
        """
        member = self._members.get(replica)
        if member is None or member.state is not State.READY or member.mark not in at:
            return ""
        others = [
            other
            for other in self._members.values()
            if other.stage == member.stage and other.state is State.READY and other is not member
        ]
        mates = [mate for mate in others if mate.mark in (at[-1:] if done else at)]
        # Those that still apply the last decision are there too: it goes as soon as they have.
        member.leaving = member.leaving and bool(others)
        if not mates:
            return "its mates have not applied the step yet" if done else NOBODY_ELSE
        if not member.leaving and any(other.leaving for other in others):
            return "another replica of its stage is leaving"
        member.leaving = True
        return ""

    def stays(self, replica: Replica) -> None:
        """It does not leave after all."""
        member = self._members.get(replica)
        if member is not None:
            member.leaving = False

    def behind(self, replica: Replica, mark: Mark | None, now: float) -> None:
        """It cannot apply the last decision: it is at ``mark`` and has to join anew."""
        member = self._members.get(replica)
        if member is None:
            return
        member.state, member.mark, member.asking = State.BEHIND, mark, False
        member.note = "could not follow the last decision"
        member.ask_at = now

    def removed(self, replica: Replica, reason: str, now: float, rng: random.Random) -> None:
        """It fell silent. It is asked again after a pause that grows."""
        member = self._members.get(replica)
        if member is None or member.state is State.REMOVED:
            return
        member.state, member.note = State.REMOVED, reason
        self._later(member, now, rng)

    def ready(self, stage: int, mark: Mark) -> list[Replica]:
        """Replicas of ``stage`` that are READY at ``mark``, in a fixed order."""
        return sorted(
            member.replica
            for member in self._members.values()
            if member.stage == stage and member.state is State.READY and member.mark == mark
        )

    def serving(self, stage: int, mark: Mark) -> list[Replica]:
        """Who gets new work of ``stage``: those that are READY and stay, or else all READY."""
        ready = self.ready(stage, mark)
        return [r for r in ready if not self._members[r].leaving] or ready

    def is_leaving(self, replica: Replica) -> bool:
        member = self._members.get(replica)
        return member is not None and member.leaving

    def get(self, replica: Replica) -> Member | None:
        return self._members.get(replica)

    def all(self) -> list[Member]:
        return sorted(self._members.values(), key=lambda member: (member.stage, member.replica))

    def asking(self, replica: Replica, under_way: bool) -> None:
        """A decision is on its way to it: until that is answered it need not be asked."""
        member = self._members.get(replica)
        if member is not None:
            member.asking = under_way

    def next_ask(self, *at: Mark) -> float:
        """When the next question is due."""
        return min((member.ask_at for member in self._unsure(at)), default=float("inf"))

    def _unsure(self, at: Sequence[Mark]) -> list[Member]:
        return [
            member
            for member in self._members.values()
            if not member.asking and (member.state is not State.READY or member.mark not in at)
        ]
