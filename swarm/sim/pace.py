"""How fast a swarm is, all in all, from the rates of its stages: the synchronous step.

A step of M microbatches takes

    M / X + fill + rounding + closing

where X is what the slowest stage does, or the link of a trainer that relays everything. (The window
of microbatches in flight grows as long as nobody is busy, so it limits nothing for long.)

* *fill*: until the first microbatch has reached the last stage, and while the last one returns,
  stages have nothing to do. With one peer per stage and no latency that is S - 1 service times:
  the classic (M + S - 1) / M. In general it is the way of one microbatch through all stages and
  links, less the time at the slowest stage, which is in M / X already.
* *rounding*: microbatches are not cut into pieces. At the end n replicas of the slowest stage do
  not end together: on average half of them are idle for one service time, (n - 1) / 2 microbatches.
* *closing*: prepare, sums, votes, decision. A member sends and receives 2 (n - 1) / n times the
  vector; the slowest link of any stage decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from swarm.sim.costs import Costs

CLOSING_TRIPS = 6
"""One-way delays from the last receipt to the first launch: prepare and its answer, parts, sums
(with the vote), decision and its answer."""


@dataclass(slots=True)
class Stage:
    """The replicas that serve a stage: how many, what they do together in microbatches per
    second, and the slowest of their links in bytes per second."""

    count: float = 0
    rate: float = 0.0
    link: float = inf


class Pace:
    """Steps of one world. ``hop_s``: mean one-way delay from one stage to the next, in seconds;
    ``trainer_s``: between trainer and peers."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._world = costs.world
        self._vectors = [stage.vector_bytes for stage in costs.world.stages]

    def effective(self, stages: Sequence[Stage], hop_s: float, trainer_s: float) -> float:
        """Microbatches per second over whole steps; 0 if a stage has nobody."""
        slowest = min(stages, key=lambda stage: stage.rate)
        if slowest.rate <= 0:
            return 0.0
        fill_s = self._way_s(stages, hop_s, trainer_s) - slowest.count / slowest.rate
        rounding_s = (slowest.count - 1) / 2 / slowest.rate
        closing_s = self.averaging_s(stages) + CLOSING_TRIPS * trainer_s
        microbatches, steady = self._world.microbatches, min(slowest.rate, self._costs.most)
        return microbatches / (microbatches / steady + fill_s + rounding_s + closing_s)

    def averaging_s(self, stages: Sequence[Stage]) -> float:
        """How long the slowest stage takes to sum its gradients."""
        return max(
            [self.averaged_bytes(s, stage.count) / stage.link for s, stage in enumerate(stages)]
        )

    def averaged_bytes(self, stage: int, count: float) -> float:
        """What each of ``count`` replicas sends, and receives, in a step."""
        return 2 * (count - 1) / count * self._vectors[stage] if count > 1 else 0.0

    def window(self, stages: Sequence[Stage]) -> int:
        """Microbatches in flight at first; the trainer takes twice as many as it has replicas."""
        if self._world.window:
            return self._world.window
        replicas = round(sum([stage.count for stage in stages]))
        return min(2 * max(len(stages), replicas), self._world.microbatches)

    def _way_s(self, stages: Sequence[Stage], hop_s: float, trainer_s: float) -> float:
        """One microbatch there and back, if it never waits."""
        served = sum([stage.count / stage.rate for stage in stages])
        if self._world.relayed:
            return served + 4 * len(stages) * trainer_s
        return served + 2 * (len(stages) - 1) * hop_s + 2 * trainer_s
