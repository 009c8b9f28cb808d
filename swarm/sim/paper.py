"""The paper's rule (SWARM, algorithm 2), to compare with: queues decide, somebody always moves.

Once a period the peer with the shortest queue of the stage with the least queued moves to the
stage with the most queued. A newcomer goes to that stage too. Where microbatches are simulated
the queues are real; in fluid mode ``queues`` tells what they would be.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from swarm.types import PeerId

HALVINGS = 60


def paper_move(
    queued: Sequence[Mapping[PeerId, float]], rng: random.Random
) -> tuple[PeerId, int] | None:
    """Who moves where. ``queued``: by stage, what waits at each of its peers.

    None: the stages are equal, or the peer is the last of its stage (of which the paper says
    nothing; a stage that nobody serves would stop the run). Among equals the lot decides.
    """
    loads = [sum(peers.values()) for peers in queued]
    source = loads.index(min(loads))
    target = loads.index(max(loads))
    if loads[source] == loads[target] or len(queued[source]) < 2:
        return None
    least = min(queued[source].values())
    return rng.choice([p for p, q in queued[source].items() if q == least]), target


def paper_choice(loads: Sequence[float], fitting: Sequence[int]) -> int:
    """The stage that a newcomer serves: of those that fit, the one with the most queued."""
    return max(fitting, key=lambda stage: loads[stage])


def queues(rates: Sequence[float], waiting: float, rng: random.Random) -> list[float]:
    """How many of ``waiting`` microbatches wait at each stage, if it does ``rates[s]`` a second.

    A closed line of queues. A stage that is busy for a share u of the time has u / (1 - u)
    waiting or served on average; the pace is the one at which all of them add up to ``waiting``.
    So work piles up in front of the slowest stage, and equally slow ones share it. Queues go up
    and down: each is drawn around its mean, as such queues are distributed (geometrically).
    """
    slowest = min(rates)
    if slowest <= 0:
        empty = [rate <= 0 for rate in rates]
        return [waiting / sum(empty) if nobody else 0.0 for nobody in empty]
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if sum(_queue(middle * slowest / rate) for rate in rates) < waiting:
            low = middle
        else:
            high = middle
    means = [_queue(low * slowest / rate) for rate in rates]
    return [rng.expovariate(1 / mean) if mean else 0.0 for mean in means]


def _queue(busy: float) -> float:
    return busy / (1 - busy) if busy < 1 else float("inf")
