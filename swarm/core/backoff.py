"""When to try again: pauses that grow, and bans that end."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pause before try ``k``: ``first_s * factor**k`` up to ``cap_s``, less up to half of it."""

    first_s: float
    factor: float = 2.0
    cap_s: float = 60.0

    def pause(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after ``failures`` failures in a row (1 is the first).

        The jitter keeps peers that failed together from coming back together.
        """
        exponent = min(max(failures, 1) - 1, 60)
        full = min(self.cap_s, self.first_s * self.factor**exponent)
        return full * (0.5 + 0.5 * rng.random())


class Bans(Generic[Key]):
    """Whom to leave out for a while: short, growing on repetition, ended by success."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._failures: dict[Key, int] = {}
        self._until: dict[Key, float] = {}

    def failed(self, key: Key, now: float, rng: random.Random) -> float:
        """Ban ``key``; returns the time at which the ban ends."""
        self._failures[key] = self._failures.get(key, 0) + 1
        self._until[key] = now + self._backoff.pause(self._failures[key], rng)
        return self._until[key]

    def succeeded(self, key: Key) -> None:
        """Success, or a fresh announcement: the past is forgotten."""
        self._failures.pop(key, None)
        self._until.pop(key, None)

    def banned(self, key: Key, now: float) -> bool:
        return self._until.get(key, now) > now

    def allowed(self, keys: Sequence[Key], now: float) -> list[Key]:
        """``keys`` less the banned ones; all of them where that would leave nobody."""
        free = [key for key in keys if not self.banned(key, now)]
        return free or list(keys)
