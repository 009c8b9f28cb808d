"""The best fixed assignment of microbatches to replicas: a min-cost flow, computed beforehand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from math import floor
from typing import Any

import networkx as nx

UNITS = 10_000
"""The flow is counted in such parts of the throughput: the solver wants whole numbers."""
COST_UNITS = 10_000
"""Of a second: costs are whole numbers too."""


def best_flow(
    stages: Sequence[Mapping[str, float]],
    seconds: Callable[[str, str], float],
) -> dict[tuple[str, str], float]:
    """Microbatches per second from each replica to each replica of the next stage.

    First as many as the stages can do at all; of the ways to do that, the one that spends the
    least time between replicas.

    Args:
        stages: for each stage its replicas, and how many microbatches per second each can do.
        seconds: what it costs to go from one replica to another.

    Raises:
        ValueError: a stage has no replica, or none that can do anything.
    """
    for stage, replicas in enumerate(stages):
        if not any(rate > 0 for rate in replicas.values()):
            raise ValueError(f"stage {stage} has no replica that does anything")
    unit = min(sum(replicas.values()) for replicas in stages) / UNITS
    flow = nx.max_flow_min_cost(_graph(stages, seconds, unit), "source", "sink")
    found: dict[tuple[str, str], float] = {}
    for here, there in _pairs(stages):
        units = flow[("out", here)][("in", there)]
        if units:
            found[here, there] = units * unit
    return found


def shares(
    stages: Sequence[Mapping[str, float]], flow: Mapping[tuple[str, str], float]
) -> list[dict[str, float]]:
    """Of each stage, which part of its microbatches each replica does; they add up to 1."""
    done: list[dict[str, float]] = [dict.fromkeys(replicas, 0.0) for replicas in stages]
    for (here, there), rate in flow.items():
        for stage, replicas in enumerate(stages):
            # What goes into a stage is what it does; into the first one nothing goes.
            if there in replicas:
                done[stage][there] += rate
            elif here in replicas and stage == 0:
                done[stage][here] += rate
    if len(stages) == 1:
        done = [dict(stages[0])]
    return [_normal(replicas) for replicas in done]


def transitions(flow: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    """Where each replica's microbatches go next: parts that add up to 1."""
    onward: dict[str, dict[str, float]] = {}
    for (here, there), rate in flow.items():
        onward.setdefault(here, {})[there] = rate
    return {here: _normal(to) for here, to in onward.items()}


def _graph(
    stages: Sequence[Mapping[str, float]], seconds: Callable[[str, str], float], unit: float
) -> Any:
    """A replica is two nodes, in and out, so that what goes through it can be bounded."""
    graph = nx.DiGraph()
    for replicas in stages:
        for replica, rate in replicas.items():
            graph.add_edge(("in", replica), ("out", replica), capacity=floor(rate / unit), weight=0)
    for here, there in _pairs(stages):
        cost = round(seconds(here, there) * COST_UNITS)
        graph.add_edge(("out", here), ("in", there), weight=cost)
    ends: list[tuple[Hashable, Hashable]] = []
    ends += [("source", ("in", replica)) for replica in stages[0]]
    ends += [(("out", replica), "sink") for replica in stages[-1]]
    for edge in ends:
        graph.add_edge(*edge, weight=0)
    return graph


def _pairs(stages: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    return [(a, b) for here, there in pairwise(stages) for a in here for b in there]


def _normal(parts: Mapping[str, float]) -> dict[str, float]:
    whole = sum(parts.values())
    return {name: part / whole for name, part in parts.items()}
