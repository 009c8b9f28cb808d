"""The swarm as rates: what flows through the stages from one event to the next, and who did it.

All that is summed is linear in time between two events, so it is summed by stage; a peer's own
share is read off when it leaves. An event costs the number of stages, not that of peers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import floor

from swarm.sim.costs import Costs, link_of
from swarm.sim.links import Smallest, delays
from swarm.sim.pace import Pace, Stage
from swarm.sim.world import Machine, Outcome
from swarm.types import PeerId

EARLY = 1 - 1e-9
"""A step has ended if all but this little of it is done: time comes in rounded numbers."""


@dataclass(slots=True, eq=False)
class Worker:
    """A machine at a stage. ``rate``: microbatches per second; the rest: the stage's sums of when
    it entered."""

    machine: Machine
    stage: int
    rate: float
    worked: float = 0.0
    sent: float = 0.0
    received: float = 0.0


class _Books(Stage):
    """One stage: who serves, and sums over time of what each did for each unit of its rate."""

    def __init__(self) -> None:
        super().__init__()
        self.links = Smallest()
        self.regions: Counter[str] = Counter()
        self.worked = 0.0
        """Microbatches by rate."""
        self.sent = 0.0
        """Bytes of each replica, averaging and gifts of state."""
        self.received = 0.0


class Flow:
    """Rates, and what was done with them. ``now`` never goes back.

    ``done``: microbatches; ``left``: those that the step under way still takes; ``steps``: those
    that have ended.
    """

    def __init__(self, costs: Costs, outcome: Outcome) -> None:
        self._costs, self._outcome = costs, outcome
        self._world = costs.world
        self._pace = Pace(costs)
        self._books = [_Books() for _ in self._world.stages]
        self._workers: dict[PeerId, Worker] = {}
        self.now = 0.0
        self.done = 0.0
        self.left = float(self._world.microbatches)
        self.steps = 0
        self._owed = [0.0 for _ in self._books]
        """Microbatches of this step that a stage has to do again."""
        self._found_s = 0.0
        """When the last loss in this step is found out; 0: there is none."""
        self._rate: float | None = None

    # -- who serves -------------------------------------------------------------------------

    def enter(self, machine: Machine, stage: int) -> Worker:
        """``machine`` serves ``stage`` from now on."""
        books = self._books[stage]
        rate = self._costs.rate(machine, stage)
        books.rate += rate
        books.count += 1
        books.links.add(link_of(machine))
        books.link = books.links.value
        books.regions[machine.region] += 1
        self._rate = None
        worker = Worker(machine, stage, rate, books.worked, books.sent, books.received)
        self._workers[machine.peer] = worker
        return worker

    def leave(self, worker: Worker) -> None:
        """It serves no longer; what it sent and received is booked."""
        books = self._books[worker.stage]
        self._settle(worker)
        del self._workers[worker.machine.peer]
        books.count -= 1
        books.rate = books.rate - worker.rate if books.count else 0.0
        books.links.discard(link_of(worker.machine))
        books.link = books.links.value
        books.regions[worker.machine.region] -= 1
        self._rate = None

    def _settle(self, worker: Worker) -> None:
        books, stage, peer = self._books[worker.stage], worker.stage, worker.machine.peer
        microbatches = worker.rate * (books.worked - worker.worked)
        sent = microbatches * self._costs.up_bytes[stage] + books.sent - worker.sent
        received = microbatches * self._costs.down_bytes[stage] + books.received - worker.received
        self._outcome.sent_bytes[peer] = self._outcome.sent_bytes.get(peer, 0.0) + sent
        self._outcome.received_bytes[peer] = self._outcome.received_bytes.get(peer, 0.0) + received

    def close(self) -> None:
        """Book what those did that serve to the end."""
        for worker in list(self._workers.values()):
            self.leave(worker)

    @property
    def peers(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return tuple(round(books.count) for books in self._books)

    @property
    def rates(self) -> list[float]:
        """Microbatches per second of each stage, if it never has to wait."""
        return [books.rate for books in self._books]

    @property
    def window(self) -> int:
        """Microbatches in flight."""
        return self._pace.window(self._books)

    @property
    def waiting(self) -> float:
        """Microbatches in flight that nobody works on, about: those beyond one for each replica."""
        return max(1.0, self.window - sum(self.peers))

    # -- what is done -----------------------------------------------------------------------

    @property
    def rate(self) -> float:
        """Microbatches per second over whole steps, as long as nothing changes."""
        if self._rate is None:
            self._rate = self._pace.effective(self._books, *self._delays())
        return self._rate

    def advance(self, now: float) -> None:
        """Time passes until ``now``."""
        passed, self.now = now - self.now, now
        if self.rate and self._held_up:
            passed = self._end_step(passed)
        if not passed or not self.rate or self._held_up:
            return
        done, size = self.rate * passed, self._world.microbatches
        self._do(done)
        ended = 1 + floor((done - self.left * EARLY) / size) if done >= self.left * EARLY else 0
        self.steps += ended
        self.left = min(size, max(0.0, self.left + ended * size - done))

    def _end_step(self, passed: float) -> float:
        """The rest of a step that is held up by losses. Returns the time that is left over."""
        went_on_s = min(passed, self.left / self.rate)
        done = went_on_s * self.rate
        slowest = min(self.rates)
        self._owed = [
            max(0.0, owed - went_on_s * (rate - slowest))
            for owed, rate in zip(self._owed, self.rates, strict=True)
        ]
        self._do(done)
        self.left = max(0.0, self.left - done)
        passed -= went_on_s
        if not passed:
            return 0.0
        self.left = 0.0
        since = self.now - passed
        waits_s = max(self._found_s - since, self._again_s())
        if passed < waits_s:
            self._owed = [
                max(0.0, owed - passed * rate)
                for owed, rate in zip(self._owed, self.rates, strict=True)
            ]
            return 0.0
        self._owed = [0.0 for _ in self._owed]
        self._found_s = 0.0
        self.steps += 1
        self.left = float(self._world.microbatches)
        return passed - waits_s

    def _do(self, done: float) -> None:
        self.done += done
        steps = done / self._world.microbatches
        for stage, books in enumerate(self._books):
            averaged = steps * self._pace.averaged_bytes(stage, books.count)
            books.worked += done / books.rate
            books.sent += averaged
            books.received += averaged

    @property
    def _held_up(self) -> bool:
        """Work of this step has to be done again, or a loss has not been found out."""
        return self._found_s > 0 or any(self._owed)

    def _again_s(self) -> float:
        """How long the stages take for what is to be done again, beside nothing else."""
        return max(
            owed / rate if rate else 0.0 for owed, rate in zip(self._owed, self.rates, strict=True)
        )

    @property
    def step_ends_s(self) -> float:
        """When the step under way will have ended; now if it cannot."""
        if not self.rate:
            return self.now
        slowest = min(self.rates)
        again_s = max(
            (self.left + owed) / rate - self.left / slowest
            for owed, rate in zip(self._owed, self.rates, strict=True)
        )
        return max(self._found_s, self.now + self.left / self.rate + again_s)

    def lost(self, worker: Worker, found_s: float) -> float:
        """``worker`` has died. Its stage does again what it had counted in this step, as far as
        possible beside the rest; and no step ends before it is found out, at ``found_s``.

        Returns how many microbatches are sent again. To be called before ``leave``.
        """
        counted = self._world.microbatches - self.left
        again = counted * worker.rate / self._books[worker.stage].rate
        self._owed[worker.stage] += again
        self._found_s = max(self._found_s, found_s)
        return again + self.window / sum(self.peers)

    def give_state(self, peer: PeerId, stage: int) -> None:
        """The replicas of ``stage`` have given ``peer`` its state, each a part."""
        books, size = self._books[stage], self._world.stages[stage].state_bytes
        if books.count:
            books.sent += size / books.count
        self._outcome.received_bytes[peer] = self._outcome.received_bytes.get(peer, 0.0) + size

    # -- the links --------------------------------------------------------------------------

    def link_of(self, stage: int) -> float:
        """The slowest link of ``stage``, in bytes per second."""
        return self._books[stage].link

    def _delays(self) -> tuple[float, float]:
        regions = [books.regions for books in self._books]
        return delays(self._world.latency, regions, self._world.trainer_region)
