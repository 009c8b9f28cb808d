"""The swarm as somebody knows it: what each stage takes, who is where, and how fast that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, fsum
from operator import mul
from statistics import median

from swarm.types import PeerId

FIRST_GUESS = 1.0
"""Work per second of every peer while none has been measured."""


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


def spares(
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


def shared_out(rates: Iterable[float], costs: Iterable[float]) -> float:
    """The rate of stages whose peers could be cut into pieces and shared out evenly."""
    costs = tuple(costs)
    return fsum(map(mul, rates, costs)) / fsum(costs)


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
    return of_equals(len(work), [max(work) / cost for cost in costs])


def of_equals(peers: int, rates: Sequence[float]) -> float:
    """The most that ``peers`` equal peers do: the largest x that needs no more of them.

    ``rates``: of one peer at each stage. A stage needs ``ceil(x / rate)`` peers. One after the
    other to the stage that is slowest: for equal peers there is no better way.
    """
    if peers < len(rates):
        return 0.0
    # All but one per stage, shared out evenly: no stage stays below that rate.
    shared = (peers - len(rates)) / fsum(1 / rate for rate in rates)
    counts = [max(1, ceil(shared / rate - 1e-9)) for rate in rates]
    for _ in range(peers - sum(counts)):
        slowest = min(range(len(rates)), key=lambda s: counts[s] * rates[s])
        counts[slowest] += 1
    return min(count * rate for count, rate in zip(counts, rates, strict=True))
