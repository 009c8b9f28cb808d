"""Stay at a stage or move to another, and why.

The paper's rule (SWARM, algorithm 2) compares queues: once a period the least loaded peer of the
least loaded stage moves to the most loaded one. It moves somebody every period, whether that
helps or not, and sees nothing before queues have built up. Here the *rate* of a stage decides,
the sum of what its replicas were measured to do: the slowest stage sets the pace of the whole
pipeline, so a move is worth it if the slower of the two stages that it touches is faster
afterwards, by a margin. Where peers differ, a few moves are planned together, since one alone may
help nobody: a fast peer comes, then a slow one goes where it was. Queues break ties, tell a
newcomer where it is needed while nothing has been measured, and veto a move that they contradict.

With constant speeds every plan raises the rates of the stages, the slowest first, and no
assignment ever comes back: no two moves undo each other.

All peers find the same move from the same records, so only one asks for it. Records are old by
the time they are read; that is why the trainer has the last word (``Grants``), from what it knows
itself.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import nsmallest
from itertools import permutations
from math import ceil, fsum, inf
from operator import itemgetter, mul
from statistics import median

from swarm.types import PeerId

FIRST_GUESS = 1.0
"""Work per second of every peer while none has been measured."""

PILED_UP = 2.0
"""Microbatches that wait for each replica of a stage, on average, where work piles up; a quarter
of that is nothing."""

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
class Need:
    """What a stage takes. ``cost``: work for one sample, forward and backward, in one unit for all
    stages (FLOPs, say), above 0. ``memory_bytes``: of one replica, at most."""

    cost: float
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Serving:
    """One peer, and the stage that it serves or is on its way to.

    ``samples_per_s``: what it can do at that stage when it never has to wait; 0: not measured.
    ``queued``: microbatches that wait there, on average. ``memory_bytes``: what it has for a
    stage; None: not known, and then everything fits. ``settled``: False for who is joining or
    leaving; such a peer counts, and stays.
    """

    peer: PeerId
    stage: int
    samples_per_s: float = 0.0
    queued: float = 0.0
    memory_bytes: int | None = None
    settled: bool = True


@dataclass(frozen=True, slots=True)
class Settings:
    """``gain``: by how much of its rate the slower of two stages has to get faster by a move.
    ``least``: replicas that each stage needs before anything else counts."""

    gain: float = 0.05
    least: int = 1


@dataclass(frozen=True, slots=True)
class Stay:
    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """``peer`` is to go to ``stage``. ``gain``: the slower stage's rate afterwards by that before;
    infinite if a stage had nobody."""

    peer: PeerId
    stage: int
    reason: str
    gain: float


class View:
    """The swarm as somebody knows it: what each stage takes, and who is where.

    Peers of unknown stages are left out.
    """

    def __init__(self, stages: Sequence[Need], peers: Iterable[Serving]) -> None:
        self.stages = tuple(stages)
        self.peers = tuple(p for p in peers if 0 <= p.stage < len(self.stages))

    @cached_property
    def guess(self) -> float:
        """Work per second of a peer that has not been measured: the median of the others'."""
        known = [p.samples_per_s * self.stages[p.stage].cost for p in self.peers if p.samples_per_s]
        return median(known) if known else FIRST_GUESS

    @cached_property
    def measured(self) -> bool:
        """Whether any peer of each stage that has some has been measured."""
        known = {p.stage for p in self.peers if p.samples_per_s}
        return all(p.stage in known for p in self.peers)

    def rate(self, peer: Serving, stage: int) -> float:
        """Samples per second that ``peer`` does, or would do, at ``stage``."""
        if stage == peer.stage and peer.samples_per_s:
            return peer.samples_per_s
        own = peer.samples_per_s * self.stages[peer.stage].cost
        return (own or self.guess) / self.stages[stage].cost

    @cached_property
    def members(self) -> list[list[Serving]]:
        """Who is at each stage, or on the way there."""
        found: list[list[Serving]] = [[] for _ in self.stages]
        for peer in self.peers:
            found[peer.stage].append(peer)
        return found

    @cached_property
    def settled(self) -> list[int]:
        """How many of each stage are neither joining nor leaving."""
        return [sum([p.settled for p in peers]) for peers in self.members]

    @cached_property
    def rates(self) -> list[float]:
        """Samples per second of each stage. Rounded once, so it is the same in whatever order the
        records came."""
        found = []
        for need, peers in zip(self.stages, self.members, strict=True):
            known = [p.samples_per_s for p in peers]
            if unknown := known.count(0.0):
                known.append(unknown * self.guess / need.cost)
            found.append(fsum(known))
        return found

    @cached_property
    def queues(self) -> list[float]:
        """Microbatches that wait for each replica of a stage, on average."""
        return [fsum([p.queued for p in peers]) / max(1, len(peers)) for peers in self.members]

    @property
    def throughput(self) -> float:
        """Samples per second of the pipeline, if nothing but compute limits it."""
        return min(self.rates)

    def fits(self, peer: Serving, stage: int) -> bool:
        return peer.memory_bytes is None or peer.memory_bytes >= self.stages[stage].memory_bytes

    def without(self, peer: PeerId) -> View:
        return View(self.stages, [p for p in self.peers if p.peer != peer])


# -- a newcomer ------------------------------------------------------------------------------


def choose(view: View, memory_bytes: int | None, settings: Settings, rng: random.Random) -> int:
    """The stage where one more peer is needed most, of those that fit; by lot among equals.

    Raises:
        ValueError: no stage fits into ``memory_bytes``.
    """
    fitting = [
        stage
        for stage, need in enumerate(view.stages)
        if memory_bytes is None or memory_bytes >= need.memory_bytes
    ]
    if not fitting:
        raise ValueError("no stage fits")
    neediest = min(_need(view, stage, settings) for stage in fitting)
    return rng.choice([s for s in fitting if _need(view, s, settings) == neediest])


def _need(view: View, stage: int, settings: Settings) -> tuple[float, ...]:
    """Smallest where a peer is needed most: below the least, then slow (or with long queues)."""
    missing = min(len(view.members[stage]), settings.least)
    if view.measured or max(view.queues) < PILED_UP:
        return (missing, view.rates[stage])
    return (missing, -view.queues[stage], view.rates[stage])


# -- who serves already ----------------------------------------------------------------------


def decide(view: View, me: PeerId, settings: Settings) -> Stay | Move:
    """Whether ``me`` should move, as far as ``view`` tells.

    Of several who could move equally well the first by name does, so that no two ask at once.
    """
    found = best_move(view, settings)
    if isinstance(found, Move) and found.peer != me:
        return Stay(f"{found.peer[-6:]} is the one to move to stage {found.stage}")
    return found


def best_move(view: View, settings: Settings) -> Stay | Move:
    """The move that helps most, of whichever peer; or the first of several, if they help most."""
    if len(view.stages) < 2:
        return Stay("there is one stage")
    order = sorted(range(len(view.stages)), key=lambda s: (len(view.members[s]), view.rates[s]))
    short = [stage for stage in order if len(view.members[stage]) < settings.least]
    for stage in short:
        if move := _relief(view, stage, settings):
            return move
    target = view.rates.index(view.throughput)
    if not short and (veto := _contradiction(view, target)):
        return Stay(veto)
    plan = _Search(view, settings).best()
    if plan is None:
        return Stay(f"no move makes stage {target}, the slowest, faster by enough")
    return plan.first(view)


def judge(view: View, peer: PeerId, target: int, settings: Settings) -> str:
    """Why ``peer`` had better not move to ``target``; empty if it may.

    Half the gain is enough for a single move: the views of two are never quite the same. The
    first of several has to gain all of it, or what remains of the plan would not be worth it. If
    it alone does not make the pipeline faster, nothing much better may be known: the others might
    do without it, or have to undo it.
    """
    if not 0 <= target < len(view.stages):
        return f"there is no stage {target}"
    found = next((p for p in view.peers if p.peer == peer), None)
    if found is None:
        return "it is not known here"
    if found.stage == target:
        return f"it is at stage {target} already"
    if not found.settled:
        return f"it is joining or leaving stage {found.stage}"
    if view.settled[found.stage] < 2:
        return f"it is the last of stage {found.stage}"
    if not view.fits(found, target):
        return f"stage {target} does not fit into its memory"
    if not _spares(view, found.stage, target, settings, {}):
        return f"stage {found.stage} needs it as much"
    if len(view.members[target]) < settings.least:
        return ""
    plan = _Search(view, settings, settings.gain / 2).beginning_with(found, target)
    if plan is None:
        return f"that would not make stage {target} and stage {found.stage} faster by enough"
    if len(plan.steps) > 1 or plan.score <= view.throughput:
        best = _Search(view, settings).best()
        if best is not None and plan.score * (1 + settings.gain / 2) < best.score:
            return f"{best.steps[0].peer.peer[-6:]} had better move to stage {best.steps[0].stage}"
    return ""


def _contradiction(view: View, target: int) -> str:
    """The queues say that work piles up elsewhere, while none waits at the slowest stage."""
    longest = max(range(len(view.stages)), key=lambda stage: view.queues[stage])
    if view.queues[target] > PILED_UP / 4 or view.queues[longest] < PILED_UP:
        return ""
    return f"by its rate stage {target} is the slowest, but work piles up at stage {longest}"


def _spares(
    view: View, stage: int, target: int, settings: Settings, come: Mapping[int, int]
) -> bool:
    """Whether ``stage`` can do with one replica less, if that one goes to ``target``.

    ``come``: how many more each stage has by then than ``view`` knows.
    """
    have = len(view.members[stage]) + come.get(stage, 0)
    wants = len(view.members[target]) + come.get(target, 0)
    staying = view.settled[stage] + come.get(stage, 0) - 1
    # Below the least, a stage gives nobody away but to one that has fewer still.
    return staying > 0 and (have > settings.least or have - 1 > wants)


def _relief(view: View, target: int, settings: Settings) -> Move | None:
    """Somebody for a stage that has too few, whatever it costs: who leaves most behind."""
    movers = [
        p
        for stage in range(len(view.stages))
        if stage != target and _spares(view, stage, target, settings, {})
        for p in view.members[stage]
        if p.settled and view.fits(p, target)
    ]
    before = view.rates[target]

    def after(peer: Serving) -> float:
        left = view.rates[peer.stage] - view.rate(peer, peer.stage)
        return min(left, before + view.rate(peer, target))

    if not movers:
        return None
    best = min(movers, key=lambda p: (-after(p), view.queues[p.stage], p.queued, p.peer))
    if not view.members[target]:
        return Move(best.peer, target, f"stage {target} has nobody", inf)
    have = len(view.members[target])
    why = f"stage {target} has {have} of {settings.least} replicas"
    return Move(best.peer, target, why, after(best) / before)


# -- a few moves ahead ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """``work``: per second, of the mover, in the unit of the stages' costs."""

    peer: Serving
    stage: int
    work: float


@dataclass(frozen=True, slots=True)
class _Plan:
    """``before``, ``rate``: of the slowest stage that takes part, now and after all steps.
    ``score``: of the slowest of all stages then, with the margin taken off."""

    steps: tuple[_Step, ...]
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


class _Search:
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
        self._first: _Step | None = None
        self._now = min(self._rates)
        # What has been found, with the margin taken off: all stages, those touched.
        self._overall, self._touched = self._now, 0.0
        self._found: _Plan | None = None

    def best(self) -> _Plan | None:
        """The best plan that makes the slowest stage faster."""
        self._touched = self._now
        if _shared_out(self._rates, self._costs) > self._now * self._uneven:
            self._extend([], frozenset([self._rates.index(self._now)]))
        return self._found

    def beginning_with(self, peer: Serving, target: int) -> _Plan | None:
        """The best plan of which this is the first move."""
        self._touched = min(self._rates[target], self._rates[peer.stage])
        work = self._view.rate(peer, peer.stage) * self._costs[peer.stage]
        self._first = _Step(peer, target, work)
        self._take([], frozenset([target]), self._first)
        return self._found

    def _margin(self, steps: Sequence[_Step], touched: float) -> float:
        """How many times as fast the slowest stage has to be after ``steps``. ``touched``: the
        rate of the slowest stage that they touch, then."""
        if len(steps) > 1:
            return 1 + MARGINS[len(steps) - 1] * self._settings.gain
        (step,), before = steps, self._slowest_now(steps)
        pair = (step.peer.stage, step.stage)
        even = _shared_out([self._view.rates[s] for s in pair], [self._costs[s] for s in pair])
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

    def _take(self, done: list[_Step], touched: frozenset[int], step: _Step) -> None:
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

    def _consider(self, steps: list[_Step], overall: float, touched: float) -> None:
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
            self._found = _Plan(order, self._slowest_now(steps), rate, score)
            self._overall, self._touched = score, touched / margin

    def _slowest_now(self, steps: Sequence[_Step]) -> float:
        return min([self._view.rates[s] for step in steps for s in (step.peer.stage, step.stage)])

    def _extend(self, done: list[_Step], touched: frozenset[int]) -> None:
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
                        self._take(done, touched | {target}, _Step(peer, target, work))

    def _finish(
        self, done: list[_Step], touched: frozenset[int], pair: tuple[int, int], others: float
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
                steps = [*done, _Step(peer, target, work)]
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

    def _in_order(self, steps: list[_Step]) -> tuple[_Step, ...] | None:
        """The steps so that each can be made, and the first does least harm; None: impossible."""
        orders = [
            order
            for order in permutations(steps)
            if (self._first is None or order[0] is self._first) and self._possible(order)
        ]
        return max(orders, key=lambda order: self._left_by(order[0]), default=None)

    def _left_by(self, step: _Step) -> float:
        source = step.peer.stage
        return self._view.rates[source] - step.work / self._costs[source]

    def _possible(self, order: Iterable[_Step]) -> bool:
        come: Counter[int] = Counter()
        for step in order:
            source, target = step.peer.stage, step.stage
            if not _spares(self._view, source, target, self._settings, come):
                return False
            come[source] -= 1
            come[target] += 1
        return True


def _shared_out(rates: Iterable[float], costs: Iterable[float]) -> float:
    """The rate of stages whose peers could be cut into pieces and shared out evenly."""
    costs = tuple(costs)
    return fsum(map(mul, rates, costs)) / fsum(costs)


# -- the trainer's word --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mover:
    """``serving``: as it will be where it goes."""

    serving: Serving
    until: float


class Grants:
    """Machine: which moves the trainer allows. One at a time, each judged by what is known now.

    A mover counts at the stage where it is going from the moment of the grant, so a stale view
    elsewhere cannot cause a second move into the same gap, or one that undoes the first.

    Args:
        limit_s: how long a move may take before it no longer holds up the next one.
        most: moves under way at the same time.
    """

    def __init__(self, settings: Settings, *, limit_s: float, most: int = 1) -> None:
        self._settings = settings
        self._limit_s = limit_s
        self._most = most
        self._movers: dict[PeerId, _Mover] = {}

    def ask(self, view: View, peer: PeerId, target: int, now: float) -> str:
        """``peer`` would like to move to ``target``: why it must not; empty: granted.

        Who asks once more for what was granted is told the same.
        """
        self.expire(now)
        mover = self._movers.get(peer)
        if mover is not None:
            on_its_way = f"it is on its way to stage {mover.serving.stage}"
            return "" if mover.serving.stage == target else on_its_way
        if len(self._movers) >= self._most:
            other, its = next(iter(self._movers.items()))
            return f"{other[-6:]} is on its way to stage {its.serving.stage}"
        reason = judge(self.applied_to(view), peer, target, self._settings)
        if not reason:
            found = next(p for p in view.peers if p.peer == peer)
            expected = view.rate(found, target)
            serving = replace(found, stage=target, samples_per_s=expected, settled=False)
            self._movers[peer] = _Mover(serving, now + self._limit_s)
        return reason

    def applied_to(self, view: View) -> View:
        """``view`` as it will be when those that are on their way have arrived."""
        if not self._movers:
            return view
        staying = [p for p in view.peers if p.peer not in self._movers]
        return View(view.stages, [*staying, *(m.serving for m in self._movers.values())])

    def ended(self, peer: PeerId) -> None:
        """It has arrived, or will not move after all."""
        self._movers.pop(peer, None)

    def expire(self, now: float) -> None:
        self._movers = {peer: m for peer, m in self._movers.items() if m.until > now}

    @property
    def under_way(self) -> dict[PeerId, int]:
        """Who is on the way to which stage."""
        return {peer: mover.serving.stage for peer, mover in self._movers.items()}


# -- the best that there is --------------------------------------------------------------------


def best_assignment(view: View) -> float:
    """Samples per second of the best assignment of all peers that ``view`` knows, from above.

    Exact where all peers are equally fast and fit everywhere; else a bound that no assignment can
    beat: all work shared out as if peers could be cut into pieces.
    """
    costs = [need.cost for need in view.stages]
    if len(view.peers) < len(costs):
        return 0.0
    work = [(p.samples_per_s * costs[p.stage]) or view.guess for p in view.peers]
    if max(work) > min(work) * (1 + 1e-9):
        return fsum(work) / fsum(costs)
    return _of_equals(len(work), max(work), costs)


def _of_equals(peers: int, work: float, costs: Sequence[float]) -> float:
    """One after the other to the stage that is slowest: for equal peers there is no better way."""
    # All but one per stage, shared out evenly: no stage stays below that rate.
    shared = (peers - len(costs)) / fsum(costs)
    counts = [max(1, ceil(shared * cost - 1e-9)) for cost in costs]
    for _ in range(peers - sum(counts)):
        slowest = min(range(len(costs)), key=lambda s: counts[s] / costs[s])
        counts[slowest] += 1
    return min(count * work / cost for count, cost in zip(counts, costs, strict=True))
