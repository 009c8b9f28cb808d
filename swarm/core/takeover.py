"""Where a new trainer goes on: the highest version that every stage can reach.

Any one replica per stage will do. What a dead trainer decided is finished by whoever comes after
it, if every stage still has a replica that applied the decision or holds the sum that it names.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from swarm.core.step import Decision
from swarm.core.totals import Totals, fold
from swarm.types import Mark, Replica, Stamp

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """What a replica said to a poll.

    ``mark`` is None if it has no weights. ``applied`` counts the updates up to ``mark`` that
    were not skipped, ``totals`` the microbatches up to ``mark``, by stage and peer. ``held`` is
    its ledger, ``losses`` (last stage only) the losses of those. ``sum`` is the round and digest
    of the finished sum that it holds, ``decision`` the last one it has seen, applied or not.
    """

    replica: Replica
    stage: int
    mark: Mark | None
    applied: int
    held: frozenset[int]
    losses: Mapping[int, float]
    sum: tuple[Stamp, str] | None
    decision: Decision | None
    totals: Totals


@dataclass(frozen=True, slots=True)
class Reach:
    """Where the run goes on.

    ``decision`` leads to ``mark``; None if nobody knows of one (then all stages are there).
    ``there`` are the replicas at ``mark``, whose ledgers are to be reconciled; ``followers`` those
    that can apply the decision and are to be told so. Both are ordered by stage and replica.
    Everybody else joins anew.
    """

    mark: Mark
    decision: Decision | None
    applied: int
    totals: Totals
    there: tuple[Found, ...]
    followers: tuple[Found, ...]


def reach(found: Sequence[Found], stages: int) -> Reach | None:
    """The highest mark that each of the ``stages`` can reach; None: there is none.

    A stage can reach a mark if one of its replicas is there, or is where a known decision leads
    on from and holds the sum that it names (of a skipped step there is no sum). The order of
    ``found`` does not matter, except that of two answers by one replica the later holds.
    """
    for way in _ways(_valid(found, stages), stages):
        if len(way.stages) == stages:
            applied, totals = way.applied(), way.totals(stages)
            return Reach(way.mark, way.decision, applied, totals, way.there, way.followers)
    return None


def lacking(found: Sequence[Found], stages: int) -> list[str]:
    """Why nothing is reachable, a line for each stage that is in the way. Empty: something is."""
    valid = _valid(found, stages)
    # The first of equals: the highest mark that as many stages as possible can reach.
    best = max(_ways(valid, stages), key=lambda way: len(way.stages), default=None)
    lines = []
    for stage in range(stages):
        if best is None or stage not in best.stages:
            here = [one for one in valid if one.stage == stage]
            lines.append(f"stage {stage}: {_why_not(here, None if best is None else best.mark)}")
    return lines


def _why_not(here: Sequence[Found], goal: Mark | None) -> str:
    if not here:
        return "nobody was found"
    steps = sorted({one.mark.t for one in here if one.mark is not None})
    if not steps or goal is None:
        return "no replica that was found has weights"
    where = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    step = f"step {goal.t}"
    to = f"the version of {step} that other stages have" if goal.t in steps else step
    return f"its replicas are at {where} and cannot get to {to}"


@dataclass(frozen=True, slots=True)
class _Way:
    """A mark, and who is there or can follow ``decision`` there."""

    mark: Mark
    decision: Decision | None
    there: tuple[Found, ...]
    followers: tuple[Found, ...]

    @property
    def stages(self) -> set[int]:
        return {one.stage for one in (*self.there, *self.followers)}

    def applied(self) -> int:
        if self.decision is not None and not self.there:
            return self.decision.applied
        return _agreed([one.applied for one in self.there], int)

    def totals(self, stages: int) -> Totals:
        """As those say who are there; else what followers have, and the decision's counts.

        Totals that are not of all stages are malformed and say nothing.
        """
        there = [one.totals for one in self.there if len(one.totals) == stages]
        if there:
            return _agreed(there, _flat)
        before = [one.totals for one in self.followers if len(one.totals) == stages]
        none: Totals = tuple({} for _ in range(stages))
        totals = _agreed(before, _flat) if before else none
        return totals if self.decision is None else fold(totals, self.decision.counts)


def _ways(found: Sequence[Found], stages: int) -> Iterator[_Way]:
    """All marks that anybody is at or could get to, the highest first."""
    at: dict[Mark, list[Found]] = defaultdict(list)
    for one in found:
        if one.mark is not None:
            at[one.mark].append(one)
    known = _known(found, stages)
    for mark in sorted(at.keys() | known.keys(), reverse=True):
        there = tuple(at.get(mark, ()))
        for decision in known.get(mark, ()):
            before = at.get(decision.mark, ())
            followers = tuple(one for one in before if _can_follow(one, decision))
            yield _Way(mark, decision, there, followers)
        if mark not in known:
            yield _Way(mark, None, there, ())


def _can_follow(one: Found, decision: Decision) -> bool:
    """Whether a replica at the decision's ``mark`` can apply it."""
    return decision.update.skip or one.sum == decision.rounds[one.stage]


def _valid(found: Sequence[Found], stages: int) -> list[Found]:
    """One answer for each replica of a stage of this run, in a fixed order."""
    latest = {one.replica: one for one in found if 0 <= one.stage < stages}
    return sorted(latest.values(), key=lambda one: (one.stage, one.replica))


def _known(found: Sequence[Found], stages: int) -> dict[Mark, list[Decision]]:
    """The decisions that lead to a mark, the most credible first.

    A trainer decides a step once, so two of them mean a bug or a liar. What a replica at the mark
    shows has been applied there: no other may lead to that mark, or one mark would mean two
    versions. Else the one that most replicas show comes first, then the smallest.
    """
    shown: Counter[str] = Counter()
    arrived: set[str] = set()
    decisions: dict[Mark, dict[str, Decision]] = defaultdict(dict)
    for one in found:
        decision = one.decision
        if decision is not None and _well_formed(decision, stages):
            name = _name(decision)
            decisions[decision.to][name] = decision
            shown[name] += 1
            if one.mark == decision.to:
                arrived.add(name)
    known = {}
    for to, named in decisions.items():
        names = sorted(named, key=lambda name: (name not in arrived, -shown[name], name))
        if names[0] in arrived:
            names = names[:1]
        known[to] = [named[name] for name in names]
    return known


def _well_formed(decision: Decision, stages: int) -> bool:
    """Whether it leads one step on, under the same or a later term, and names all the sums."""
    mark, to = decision.mark, decision.to
    onward = to.t == mark.t + 1 and to.term >= mark.term and decision.applied >= 0
    return onward and (decision.update.skip or len(decision.rounds) == stages)


def _name(decision: Decision) -> str:
    """Equal for equal decisions. NaN is equal to itself here: a skipped step may have no norm."""
    d = decision
    return repr((d.mark, d.to, d.rounds, d.update, _flat(d.counts), d.loss, d.norm, d.applied))


def _flat(totals: Iterable[Mapping[str, int]]) -> tuple[tuple[tuple[str, int], ...], ...]:
    return tuple(tuple(sorted(total.items())) for total in totals)


def _agreed(values: Sequence[T], order: Callable[[T], Any]) -> T:
    """What most say; of what is said equally often, the smallest.

    Replicas at one mark agree. Where one is wrong, every trainer has to come to the same.
    """
    keys: list[Hashable] = [order(value) for value in values]
    said = Counter(keys)
    return min(zip(keys, values, strict=True), key=lambda pair: (-said[pair[0]], pair[0]))[1]
