"""Rules for choosing a replica, to compare ours with: each has the interface of ``core.wiring``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from swarm.core.backoff import Backoff, Bans
from swarm.core.wiring import Wiring
from swarm.sim.world import WiringRule
from swarm.types import Replica, Stamp

Share = Callable[[int, Replica | None, Replica], float]
"""(stage, who had it before or None, candidate) -> the part of the work that goes this way."""

BAN = Backoff(first_s=1.0, cap_s=60.0)

EPSILON_S = 1.0
"""What a replica is expected to take before anything was measured."""

SMOOTHING = 0.1
BACKWARD_WEIGHT = 2.5
"""So much more than a forward pass a backward one is charged, in the published prototype."""


class Base(Wiring):
    """Keeps who serves what. Whoever is not chosen by a rule of its own is a substitute by lot."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages, ban=BAN)
        self._banned: Bans[Replica] = Bans(BAN)
        self._here: list[list[Replica]] = [[] for _ in range(stages)]

    def sync(self, stage: int, replicas: Iterable[Replica]) -> None:
        wanted = list(replicas)
        if wanted != self._here[stage]:
            self._changed(stage, self._here[stage], wanted)
            self._here[stage] = wanted

    def _changed(self, stage: int, before: list[Replica], after: list[Replica]) -> None:
        """Others serve ``stage`` from now on."""

    def ban(self, replica: Replica, now: float, rng: random.Random) -> None:
        self._banned.failed(replica, now, rng)

    def choose(
        self,
        stage: int,
        stamp: Stamp,
        now: float,
        rng: random.Random,
        *,
        shun: frozenset[Replica] = frozenset(),
        most: int = 3,
    ) -> tuple[Replica, ...]:
        allowed = self._banned.allowed(self._here[stage], now)
        if not allowed:
            return ()
        best = [replica for replica in allowed if replica not in shun] or allowed
        first = self._first(stage, stamp, best, now, rng)
        spare = [r for r in rng.sample(allowed, min(most, len(allowed))) if r != first]
        return (first, *spare[: most - 1])

    def _first(
        self, stage: int, stamp: Stamp, allowed: list[Replica], now: float, rng: random.Random
    ) -> Replica:
        """Who is to do it."""
        del stage, stamp, now
        return rng.choice(allowed)

    def accepted(self, stage: int, stamp: Stamp, replica: Replica, now: float) -> None:
        """``replica`` has done the forward pass."""

    def served(self, stage: int, stamp: Stamp, replica: Replica, took_s: float, now: float) -> None:
        """``replica`` has done the backward pass."""
        self._banned.succeeded(replica)

    def closed(self, stamp: Stamp) -> None:
        """The attempt is over."""


class Uniform(Base):
    """Every replica with the same probability."""


class Paper(Base):
    """SWARM, algorithm 1: the replica with the least total expected time given to it so far.

    It is charged before the call, with the running average of its response times, and never
    corrected afterwards. A replica that fails is banned. A newcomer begins at the least priority.
    """

    def __init__(self, stages: int) -> None:
        super().__init__(stages)
        self._given: list[dict[Replica, float]] = [{} for _ in range(stages)]
        self._response_s: dict[Replica, float] = {}
        self._heard: dict[Stamp, float] = {}

    def _changed(self, stage: int, before: list[Replica], after: list[Replica]) -> None:
        given = self._given[stage]
        floor = min((given[r] for r in before), default=0.0)
        self._given[stage] = {r: given.get(r, floor) for r in after}

    def _first(
        self, stage: int, stamp: Stamp, allowed: list[Replica], now: float, rng: random.Random
    ) -> Replica:
        given = self._given[stage]
        self._heard.setdefault(stamp, now)
        first = min(allowed, key=lambda replica: (given[replica], rng.random()))
        given[first] += self._response_s.get(first, EPSILON_S)
        return first

    def accepted(self, stage: int, stamp: Stamp, replica: Replica, now: float) -> None:
        self._answered(stamp, replica, 1.0, now)

    def served(self, stage: int, stamp: Stamp, replica: Replica, took_s: float, now: float) -> None:
        super().served(stage, stamp, replica, took_s, now)
        last = stage == len(self._here) - 1
        self._answered(stamp, replica, BACKWARD_WEIGHT + last, now)

    def _answered(self, stamp: Stamp, replica: Replica, weight: float, now: float) -> None:
        """The answer to one call, which took since the one before: queue, compute and link."""
        before = self._heard.get(stamp)
        if before is None:
            return
        self._heard[stamp] = now
        took_s = (now - before) / weight
        known = self._response_s.get(replica)
        if known is not None:
            took_s = SMOOTHING * took_s + (1 - SMOOTHING) * known
        self._response_s[replica] = took_s

    def closed(self, stamp: Stamp) -> None:
        self._heard.pop(stamp, None)


class LeastLoaded(Base):
    """The replica with the fewest microbatches on their way to it or in its queue, as they were
    up to ``delay_s`` ago: what is known is looked up that often."""

    def __init__(self, stages: int, *, delay_s: float) -> None:
        super().__init__(stages)
        self._delay_s = delay_s
        self._load: dict[Replica, int] = {}
        self._known: dict[Replica, int] = {}
        self._known_at = float("-inf")
        self._at: dict[tuple[int, Stamp], Replica] = {}

    def _first(
        self, stage: int, stamp: Stamp, allowed: list[Replica], now: float, rng: random.Random
    ) -> Replica:
        if now >= self._known_at + self._delay_s:
            self._known, self._known_at = dict(self._load), now
        first = min(allowed, key=lambda replica: (self._known.get(replica, 0), rng.random()))
        self._put(stage, stamp, first)
        return first

    def _put(self, stage: int, stamp: Stamp, replica: Replica | None) -> None:
        """The attempt is at ``replica`` now; None: nowhere in this stage any more."""
        before = self._at.pop((stage, stamp), None)
        if before is not None:
            self._load[before] -= 1
        if replica is not None:
            self._at[stage, stamp] = replica
            self._load[replica] = self._load.get(replica, 0) + 1

    def accepted(self, stage: int, stamp: Stamp, replica: Replica, now: float) -> None:
        if (stage, stamp) in self._at:
            self._put(stage, stamp, replica)

    def served(self, stage: int, stamp: Stamp, replica: Replica, took_s: float, now: float) -> None:
        super().served(stage, stamp, replica, took_s, now)
        self._put(stage, stamp, None)

    def closed(self, stamp: Stamp) -> None:
        for stage in range(len(self._here)):
            self._put(stage, stamp, None)


class Static(Base):
    """A fixed plan, computed beforehand: each next replica with its share of what goes that way.

    A replica that the plan does not know is a substitute only.
    """

    def __init__(self, stages: int, *, share: Share) -> None:
        super().__init__(stages)
        self._share = share
        self._last: dict[Stamp, Replica] = {}

    def _first(
        self, stage: int, stamp: Stamp, allowed: list[Replica], now: float, rng: random.Random
    ) -> Replica:
        before = self._last.get(stamp)
        shares = [self._share(stage, before, replica) for replica in allowed]
        first = rng.choices(allowed, shares)[0] if sum(shares) > 0 else rng.choice(allowed)
        self._last[stamp] = first
        return first

    def closed(self, stamp: Stamp) -> None:
        self._last.pop(stamp, None)


def make_wiring(
    rule: WiringRule, stages: int, *, delay_s: float, share: Share | None = None
) -> Wiring:
    """The wiring of ``rule``. ``delay_s``: how old is what LEAST_LOADED knows.

    Raises:
        ValueError: STATIC without a ``share``.
    """
    match rule:
        case WiringRule.PAPER:
            return Paper(stages)
        case WiringRule.UNIFORM:
            return Uniform(stages)
        case WiringRule.LEAST_LOADED:
            return LeastLoaded(stages, delay_s=delay_s)
        case WiringRule.STATIC:
            if share is None:
                raise ValueError(
                    "wiring 'static': no shares were given; pass share=, or choose another rule"
                )
            return Static(stages, share=share)
        case _:
            return Wiring(stages, ban=BAN)
