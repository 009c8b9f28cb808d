"""One push of a payload along an ordered short list of replicas.

Used by whoever sends a microbatch on: the trainer to the first stage, a replica to the next.
A hop goes on to the next candidate only after *busy*, *refused* or a connection that could not
be opened: then nobody has the payload. After silence or a cut somebody may have it, so the
attempt must not be forked: the trainer is told, and asks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from swarm.core.backoff import Backoff
from swarm.types import Replica


class Outcome(StrEnum):
    """How one call ended."""

    ACCEPTED = "accepted"
    BUSY = "busy"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Push:
    """Send the payload to ``replica``; ``tries`` tells repeats after *busy* from duplicates."""

    replica: Replica
    tries: int


@dataclass(frozen=True, slots=True)
class Pause:
    """All were busy: keep the payload and call ``resume`` at ``until``."""

    until: float


@dataclass(frozen=True, slots=True)
class Tell:
    """Give up and tell the trainer why; ``silent`` names a replica that may have the payload."""

    reason: str
    silent: Replica | None


@dataclass(frozen=True, slots=True)
class Delivered:
    """``replica`` has the payload."""

    replica: Replica


Move = Push | Pause | Tell | Delivered


class Hop:
    """Machine: ``start``, then ``answered`` for each call's outcome and ``resume`` after a pause.

    ``deadline`` is the time by which the payload must be delivered.
    """

    def __init__(
        self, candidates: Sequence[Replica], deadline: float, backoff: Backoff, rng: random.Random
    ) -> None:
        self.deadline = deadline
        self._backoff = backoff
        self._rng = rng
        self._round = 0
        self._todo = list(candidates)
        self._busy: list[Replica] = []
        self._current: Replica | None = None
        self._reasons: list[str] = []
        self.busy_answers = 0
        self.unreachable: list[Replica] = []

    def start(self, now: float) -> Move:
        return self._next(now)

    def resume(self, now: float) -> Move:
        """The pause is over: all that were busy are tried again."""
        self._round += 1
        self._todo, self._busy = self._busy, []
        return self._next(now)

    def answered(self, outcome: Outcome, reason: str, now: float) -> Move:
        """The call under way has ended with ``outcome``."""
        replica = self._current
        if replica is None:
            raise ValueError("no call is under way")
        self._current = None
        if outcome is Outcome.ACCEPTED:
            return Delivered(replica)
        if outcome is Outcome.LOST:
            return Tell(f"{replica.peer[-6:]} fell silent: {reason}", replica)
        if outcome is Outcome.BUSY:
            self.busy_answers += 1
            self._busy.append(replica)
        else:
            if outcome is Outcome.UNREACHABLE:
                self.unreachable.append(replica)
            self._reasons.append(f"{replica.peer[-6:]} {outcome}: {reason}")
        return self._next(now)

    def _next(self, now: float) -> Move:
        if now >= self.deadline:
            return Tell("; ".join(["time is up", *self._reasons[-3:]]), None)
        if self._todo:
            self._current = self._todo.pop(0)
            return Push(self._current, self._round)
        if self._busy:
            pause = self._backoff.pause(self._round + 1, self._rng)
            return Pause(min(now + pause, self.deadline))
        return Tell("; ".join(self._reasons[-3:]) or "nobody to send to", None)
