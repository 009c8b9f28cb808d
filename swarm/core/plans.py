"""A few moves planned together, where one alone helps nobody."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import permutations
from math import inf
from operator import itemgetter

from swarm.core.balance import Serving, Settings, View, shared_out, spares
from swarm.types import PeerId

MARGINS = (1.0, 2.0, 2.1, 2.2)
"""A plan of one to four moves has to gain so many times ``Settings.gain``. In growing order: what
is left of a plan after its first move beats going back."""

REPLICA_SHARE, PAIR_SHARE = 0.5, 0.2
"""In stages of many replicas no single move gains much. It is also worth it if it gains half of
what a replica of the two stages does on average, and the two, shared out evenly, a fifth of
``Settings.gain``."""

HAIR = 1e-9
"""Relative: rates that differ by less are equal."""

EFFORT = 10_000
"""Plans that are looked at, at most about: the fewer the peers, the more steps ahead. Where stages
have many replicas single moves are fine enough."""


@dataclass(frozen=True, slots=True)
class Move:
    """``peer`` is to go to ``stage``. ``gain``: the slower stage's rate afterwards by that before;
    infinite if a stage had nobody."""

    peer: PeerId
    stage: int
    reason: str
    gain: float


@dataclass(frozen=True, slots=True)
class Step:
    """``work``: per second, of the mover, in the unit of the stages' costs."""

    peer: Serving
    stage: int
    work: float


@dataclass(frozen=True, slots=True)
class Plan:
    """``before``, ``rate``: of the slowest stage that takes part, now and after all steps.
    ``score``: of the slowest of all stages then, with the margin taken off."""

    steps: tuple[Step, ...]
    before: float
    rate: float
    score: float

    def first(self, view: View) -> Move:
        step, *more = self.steps
        if more:
            then = ", ".join(f"{s.peer.peer[-6:]} to stage {s.stage}" for s in more)
            why = f"with {then} next the slowest of them does {self.rate:.3g} samples/s"
            why += f" rather than {self.before:.3g}"
        else:
            source = step.peer.stage
            why = f"stage {step.stage} does {view.rates[step.stage]:.3g} samples/s, stage {source} "
            why += f"{view.rates[source]:.3g}; then the slower does {self.rate:.3g}"
        gain = self.rate / self.before if self.before else inf
        return Move(step.peer.peer, step.stage, why, gain)


class Search:
    """Looks for the few moves after which the pipeline is fastest.

    Where that cannot be had, because another stage is as slow, those after which the slowest of
    the stages that they touch is fastest. Each step goes to what is the slowest by then: a stage
    that gets nobody does not get faster, so no better plan is missed. A step may leave another
    stage too slow for the next one to mend; that makes exchanges of fast peers for slow ones, and
    rings over several stages.
    """

    def __init__(self, view: View, settings: Settings, single: float | None = None) -> None:
        """``single``: the gain that is enough for a single move."""
        self._view, self._settings = view, settings
        self._single = settings.gain if single is None else single
        self._uneven = 1 + PAIR_SHARE * self._single
        self._costs = [need.cost for need in view.stages]
        self._rates = list(view.rates)
        self._depth = 1
        while self._depth < len(MARGINS) and len(view.peers) ** (self._depth + 1) <= EFFORT:
            self._depth += 1
        self._sources = sorted(range(len(self._rates)), key=lambda s: (view.queues[s], s))
        self._movers: dict[int, list[tuple[float, Serving]]] = {}
        self._first: Step | None = None
        self._now = min(self._rates)
        # What has been found, with the margin taken off: all stages, those touched.
        self._overall, self._touched = self._now, 0.0
        self._found: Plan | None = None

    def best(self) -> Plan | None:
        """The best plan that makes the slowest stage faster."""
        self._touched = self._now
        if shared_out(self._rates, self._costs) > self._now * self._uneven:
            self._extend([], frozenset([self._rates.index(self._now)]))
        return self._found

    def beginning_with(self, peer: Serving, target: int) -> Plan | None:
        """The best plan of which this is the first move."""
        self._touched = min(self._rates[target], self._rates[peer.stage])
        work = self._view.rate(peer, peer.stage) * self._costs[peer.stage]
        self._first = Step(peer, target, work)
        self._take([], frozenset([target]), self._first)
        return self._found

    def _margin(self, steps: Sequence[Step], touched: float) -> float:
        """How many times as fast the slowest stage has to be after ``steps``. ``touched``: the
        rate of the slowest stage that they touch, then."""
        if len(steps) > 1:
            return 1 + MARGINS[len(steps) - 1] * self._settings.gain
        (step,), before = steps, self._slowest_now(steps)
        pair = (step.peer.stage, step.stage)
        even = shared_out([self._view.rates[s] for s in pair], [self._costs[s] for s in pair])
        average = min(
            self._view.rates[s] * self._costs[s] / max(1, len(self._view.members[s])) for s in pair
        )
        least = REPLICA_SHARE * average / self._costs[step.stage]
        if touched - before >= least and even >= before * self._uneven:
            return 1.0
        return 1 + self._single

    def _enough(self, steps: int) -> float:
        """No plan of so many steps is good enough if the slowest stage it touches does less."""
        margin = 1 + MARGINS[steps - 1] * self._settings.gain if steps > 1 else 1.0
        return self._overall * margin * (1 - HAIR)

    def _take(self, done: list[Step], touched: frozenset[int], step: Step) -> None:
        """Look at what comes of ``step``, and go on from there."""
        source, target = step.peer.stage, step.stage
        kept = self._rates[source], self._rates[target]
        self._rates[source] -= step.work / self._costs[source]
        self._rates[target] += step.work / self._costs[target]
        steps, touched = [*done, step], touched | {source}
        self._consider(steps, min(self._rates), min([self._rates[stage] for stage in touched]))
        if len(steps) < self._depth:
            self._extend(steps, touched)
        self._rates[source], self._rates[target] = kept

    def _consider(self, steps: list[Step], overall: float, touched: float) -> None:
        """Keep these steps if they are better than what has been found, and can be made."""
        margin = self._margin(steps, touched)
        score = max(overall / margin, self._now)
        if score <= self._overall * (1 + HAIR) and (
            # Without gain for the whole a third move is not worth it.
            len(steps) > 2
            or score < self._overall * (1 - HAIR)
            or touched / margin <= self._touched * (1 + HAIR)
        ):
            return
        order = self._in_order(steps)
        if order:
            rate = overall if score > self._now else touched
            self._found = Plan(order, self._slowest_now(steps), rate, score)
            self._overall, self._touched = score, touched / margin

    def _slowest_now(self, steps: Sequence[Step]) -> float:
        return min([self._view.rates[s] for step in steps for s in (step.peer.stage, step.stage)])

    def _extend(self, done: list[Step], touched: frozenset[int]) -> None:
        """Try everybody as the next to go to the slowest stage of all, or of those touched."""
        ahead, enough = self._depth - len(done), self._enough(len(done) + 1)
        if sum([self._rates[stage] < enough for stage in touched]) > ahead:
            return  # each step can mend one stage
        slowest = nsmallest(3, range(len(self._rates)), key=self._rates.__getitem__)
        for target in {slowest[0], min(sorted(touched), key=self._rates.__getitem__)}:
            for source in self._sources:
                if source == target:
                    continue
                if ahead == 1:
                    rest = [stage for stage in slowest if stage not in (source, target)]
                    others = self._rates[rest[0]] if rest else inf
                    self._finish(done, touched - {source, target}, (source, target), others)
                    continue
                for work, peer in self._leaving(source):
                    if self._view.fits(peer, target) and all(s.peer is not peer for s in done):
                        self._take(done, touched | {target}, Step(peer, target, work))

    def _finish(
        self, done: list[Step], touched: frozenset[int], pair: tuple[int, int], others: float
    ) -> None:
        """As ``_take``, for the last step, which goes from the one to the other of ``pair``.

        ``touched``: the other stages touched. ``others``: the slowest rate of all other stages.
        """
        (source, target), enough = pair, self._enough(len(done) + 1)
        own, its = self._rates[source], self._rates[target]
        cost, its_cost = self._costs[source], self._costs[target]
        near = min([self._rates[stage] for stage in touched], default=inf)
        if min(near, (own * cost + its * its_cost) / (cost + its_cost)) < enough:
            return
        for work, peer in self._leaving(source):
            rate = min(own - work / cost, its + work / its_cost)
            if (rate <= self._overall or others <= self._overall) and (
                rate <= self._touched or near <= self._touched
            ):
                continue
            if self._view.fits(peer, target) and all(s.peer is not peer for s in done):
                steps = [*done, Step(peer, target, work)]
                self._consider(steps, min(rate, others), min(rate, near))

    def _leaving(self, stage: int) -> list[tuple[float, Serving]]:
        """Who could leave it, and the work that goes with each: of equals only as many as a plan
        has steps, those with the shortest queues, then by name. The fastest first."""
        if stage not in self._movers:
            kinds = defaultdict(list)
            for peer in self._view.members[stage]:
                if peer.settled:
                    memory = inf if peer.memory_bytes is None else peer.memory_bytes
                    kinds[peer.samples_per_s, memory].append(peer)
            found = []
            for (rate, _), equals in sorted(kinds.items(), key=itemgetter(0), reverse=True):
                if len(equals) > 1:
                    equals = nsmallest(self._depth, equals, key=lambda p: (p.queued, p.peer))
                work = (rate * self._costs[stage]) or self._view.guess
                found += [(work, peer) for peer in equals]
            self._movers[stage] = found
        return self._movers[stage]

    def _in_order(self, steps: list[Step]) -> tuple[Step, ...] | None:
        """The steps so that each can be made, and the first does least harm; None: impossible."""
        orders = [
            order
            for order in permutations(steps)
            if (self._first is None or order[0] is self._first) and self._possible(order)
        ]
        return max(orders, key=lambda order: self._left_by(order[0]), default=None)

    def _left_by(self, step: Step) -> float:
        source = step.peer.stage
        return self._view.rates[source] - step.work / self._costs[source]

    def _possible(self, order: Iterable[Step]) -> bool:
        come: Counter[int] = Counter()
        for step in order:
            source, target = step.peer.stage, step.stage
            if not spares(self._view, source, target, self._settings, come):
                return False
            come[source] -= 1
            come[target] += 1
        return True
