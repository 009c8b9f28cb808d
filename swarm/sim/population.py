"""Who is there when: arrivals and departures of single peers, drawn by seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

from swarm.sim.traces import Trace


@dataclass(frozen=True, slots=True)
class Span:
    """One peer is there from ``arrives_s`` until ``leaves_s``, and never again."""

    arrives_s: float
    leaves_s: float = inf


def steady(peers: int) -> list[Span]:
    """``peers`` that come at the start and stay."""
    return [Span(0.0)] * peers


def replay(trace: Trace, peers: int, rng: random.Random, *, until_s: float = inf) -> list[Span]:
    """The trace, scaled to ``peers`` at its peak, as single peers; until ``until_s``.

    When the count falls, those that leave are drawn by lot from those that are there; when it
    rises, new ones come. After the end of the trace all stay that are there.
    """
    scaled = trace.scaled(peers)
    spans: list[Span] = []
    alive: list[float] = []
    for time, wanted in zip(scaled.times_s, scaled.alive, strict=True):
        if time >= until_s:
            break
        while len(alive) > wanted:
            index = rng.randrange(len(alive))
            alive[index], alive[-1] = alive[-1], alive[index]
            spans.append(Span(alive.pop(), time))
        alive += [time] * (wanted - len(alive))
    spans += [Span(arrived) for arrived in alive]
    return sorted(spans, key=lambda span: (span.arrives_s, span.leaves_s))


def renewal(
    peers: int,
    rng: random.Random,
    *,
    until_s: float,
    lifetime_s: float,
    arrival_s: float = 0.0,
) -> list[Span]:
    """``peers`` at the start; lifetimes and times between arrivals are exponential.

    ``lifetime_s``: the mean. ``arrival_s``: mean time from one arrival to the next, of all
    together; 0: so that ``peers`` are there on average.
    """
    gap_s = arrival_s or lifetime_s / peers
    spans = [Span(0.0, rng.expovariate(1 / lifetime_s)) for _ in range(peers)]
    now = rng.expovariate(1 / gap_s)
    while now < until_s:
        spans.append(Span(now, now + rng.expovariate(1 / lifetime_s)))
        now += rng.expovariate(1 / gap_s)
    return [s if s.leaves_s < until_s else Span(s.arrives_s) for s in spans]
