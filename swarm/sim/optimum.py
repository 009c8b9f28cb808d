"""The best that an assignment of peers to stages could do, kept up to date peer by peer."""

from __future__ import annotations

from collections import Counter

from swarm.core.balance import of_equals
from swarm.sim.costs import Costs, link_of
from swarm.sim.links import Smallest, delays
from swarm.sim.pace import Pace, Stage
from swarm.sim.world import Machine

Kind = tuple[float, float, float]
"""Speed and link of a machine."""


class Optimum:
    """What the best assignment of the machines that were added would do.

    Exact where all are equally fast; else the work is shared out as if peers could be cut into
    pieces, which no assignment can beat. As quick for 20,000 peers as for two.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._pace = Pace(costs)
        self._stages = range(len(costs.work))
        self._kinds: Counter[Kind] = Counter()
        self._links = Smallest()
        self._regions: Counter[str] = Counter()
        self._peers = 0
        self._shared = 0.0

    def add(self, machine: Machine) -> None:
        """``machine`` is there from now on."""
        self._change(machine, 1)
        self._links.add(link_of(machine))

    def remove(self, machine: Machine) -> None:
        """It is there no longer."""
        self._change(machine, -1)
        self._links.discard(link_of(machine))

    def _change(self, machine: Machine, sign: int) -> None:
        kind = (machine.tflops, machine.up_bytes_per_s, machine.down_bytes_per_s)
        self._kinds[kind] += sign
        self._peers += sign
        self._regions[machine.region] += sign
        self._shared += sign * self._alone(machine)
        if not self._kinds[kind]:
            del self._kinds[kind]

    def _alone(self, machine: Machine) -> float:
        """What one machine would do alone, its time divided so that no stage is behind."""
        return 1 / sum([1 / self._costs.rate(machine, s) for s in self._stages])

    @property
    def steady(self) -> float:
        """Microbatches per second as long as the pipeline is full: what rebalancing can reach."""
        if self._peers < len(self._stages):
            return 0.0
        if len(self._kinds) == 1:
            tflops, up, down = next(iter(self._kinds))
            any_of_them = Machine("", tflops, up_bytes_per_s=up, down_bytes_per_s=down)
            rates = [self._costs.rate(any_of_them, s) for s in self._stages]
            return of_equals(self._peers, rates)
        return self._shared

    @property
    def in_steps(self) -> float:
        """Microbatches per second over whole steps, which no assignment can do without: the
        pipeline fills, gradients are averaged."""
        steady = self.steady
        if not steady:
            return 0.0
        world = self._costs.world
        even = Stage(self._peers / len(self._stages), steady, self._links.value)
        waits = delays(world.latency, [self._regions] * len(self._stages), world.trainer_region)
        return self._pace.effective([even] * len(self._stages), *waits)
