"""Who is announced for which stage, as peers and trainer know it in fluid mode."""

from __future__ import annotations

from swarm.core.balance import Serving, Settings, View, shared_out
from swarm.core.plans import PAIR_SHARE
from swarm.sim.costs import Costs
from swarm.sim.world import Machine
from swarm.types import PeerId

WHOLE = "a stage"
"""The name of the one record that stands for all of a stage, where only sums matter."""


class Listing:
    """Records by peer, and their sums by stage. The dead are listed until they are found out."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._stages = range(len(costs.work))
        self._samples = costs.world.microbatch
        self._records: dict[PeerId, Serving] = {}
        self.members: list[dict[PeerId, float]] = [{} for _ in self._stages]
        """Microbatches per second of each peer listed for a stage, on its way there included."""
        self._rates = [0.0 for _ in self._stages]

    def put(self, machine: Machine, stage: int, *, settled: bool) -> None:
        """``machine`` serves ``stage``, or is on its way there if not ``settled``."""
        self.drop(machine.peer)
        rate = self._costs.rate(machine, stage)
        self._records[machine.peer] = Serving(
            machine.peer,
            stage,
            samples_per_s=rate * self._samples,
            memory_bytes=machine.memory_bytes,
            settled=settled,
        )
        self.members[stage][machine.peer] = rate
        self._rates[stage] += rate

    def drop(self, peer: PeerId) -> None:
        record = self._records.pop(peer, None)
        if record is not None:
            members = self.members[record.stage]
            rate = members.pop(peer)
            self._rates[record.stage] = self._rates[record.stage] - rate if members else 0.0

    def view(self) -> View:
        """All records."""
        return View(self._costs.needs, self._records.values())

    def sums(self) -> View:
        """What a newcomer goes by: one record for each stage that has somebody."""
        records = [
            Serving(WHOLE, stage, self._rates[stage] * self._samples)
            for stage in self._stages
            if self.members[stage]
        ]
        return View(self._costs.needs, records)

    @property
    def rates(self) -> list[float]:
        """Microbatches per second of each stage when all on their way have arrived."""
        return list(self._rates)

    def may_gain(self, settings: Settings) -> bool:
        """Whether any move can be worth it at all; ``best_move`` says so too, but not as cheaply:
        a stage lacks somebody, or evenly shared work would make the slowest stage faster."""
        if any(len(members) < settings.least for members in self.members):
            return True
        work = self._costs.work
        return shared_out(self._rates, work) > min(self._rates) * (1 + PAIR_SHARE * settings.gain)
