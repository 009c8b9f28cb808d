"""The trainer: feeds microbatches and drives steps, as ``peers.trainer`` does, in virtual time."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from swarm.core.closing import Closing, Vote
from swarm.core.flight import Flight, Pace, Receipt, Stamps
from swarm.core.hop import Hop
from swarm.core.journey import Journey
from swarm.core.pace import GRACE
from swarm.core.step import Decision, Remove, Step
from swarm.core.update import Update
from swarm.core.wiring import Window
from swarm.sim.instructions import Instructions
from swarm.sim.members import Members
from swarm.sim.network import Host
from swarm.types import FRESH, Attempt, Mark, Replica, Stamp, Term

if TYPE_CHECKING:
    from swarm.sim.simulation import Simulation


class Trainer:
    """Takes a step after the other for as long as the clock runs."""

    def __init__(self, sim: Simulation, host: Host) -> None:
        self.sim, self.host = sim, host
        world = sim.world
        self.stages = len(world.stages)
        self.mark = FRESH
        self.term = Term(1, "trainer")
        self.stamps = Stamps(lambda n: Stamp(self.term, n))
        self.members = Members(self)
        self.instructions = Instructions(self)
        self.wiring: Any = sim.wiring
        self.pace = Pace(sim.attempt_s())
        self.window: Window | None = None
        self.work: Step | None = None
        self.last_decision: Decision | None = None
        self._applied = 0
        self._step_s = 0.0
        self._began = 0.0
        self.late: set[Replica] = set()
        """Who still applies the last decision."""
        self._grace_until = 0.0
        self._armed = inf
        self._woken = False

    # -- steps --------------------------------------------------------------------------------

    @property
    def standing(self) -> Decision | None:
        """The decision that the step under way has come to, while replicas apply it."""
        return None if self.work is None else self.work.decision

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Where replicas may be: at the run's mark, or beyond it by a decision that stands."""
        return (self.mark,) if self.standing is None else (self.mark, self.standing.to)

    def wake(self) -> None:
        """Something has happened: begin a step, or go on with it, once all of this moment has."""
        if not self._woken:
            self._woken = True
            self.sim.clock.at(self.sim.clock.now, self._go_on)

    def _go_on(self) -> None:
        self._woken = False
        if self.work is None:
            self._begin()
        while self.work is not None and self._drive(self.work):
            self._begin()

    def _begin(self) -> None:
        """The next step, once each stage has somebody and the last one has been applied."""
        now = self.sim.clock.now
        if self.late and now < self._grace_until:
            return
        if not all(self.members.ready(stage) for stage in range(self.stages)):
            return
        self._began = now
        flight = Flight(
            [self._journey(m) for m in range(self.sim.world.microbatches)],
            self.mark,
            wiring=self.wiring,
            window=self._sized_window(),
            pace=self.pace,
            stamps=self.stamps,
            rng=self.sim.rng,
        )
        self.sim.meter.begins(flight)
        self.work = Step(
            flight,
            [self._closing(stage) for stage in range(self.stages)],
            ready=self.members.ready,
            stamps=self.stamps,
            to=Mark(self.term, self.mark.t + 1),
            decider=self._decide_update,
            applied=self._applied,
            serving=self.members.serving,
        )

    def _journey(self, m: int) -> Journey:
        return Journey(m, self.stages, answer_s=self.sim.world.silence_s)

    def _sized_window(self) -> Window:
        if self.window is None:
            replicas = sum(len(self.members.ready(stage)) for stage in range(self.stages))
            world = self.sim.world
            self.window = Window.sized(self.stages, replicas, world.microbatches, world.window)
        return self.window

    def _closing(self, stage: int) -> Closing:
        silence_s = self.sim.world.silence_s
        limit_s = 2 * silence_s + self.sim.averaging_limit_s(stage)
        return Closing(stage, limit_s=limit_s, answer_s=silence_s)

    def _decide_update(self, norms: Any, finite: bool) -> tuple[Update, float]:
        return Update(1.0, 1.0, 1.0, 1.0, not finite), float(len(norms))

    def _drive(self, work: Step) -> bool:
        """Do what is to be done now. True if that has ended the step."""
        clock = self.sim.clock
        todo = work.advance(clock.now)
        for do in todo:
            self.instructions.carry_out(work, do)
        if work.finished:
            self._end(work)
            return True
        if todo:
            self._arm(work.deadline())
        return False

    def _arm(self, deadline: float) -> None:
        """One alarm is enough: when it rings, the next is set. Deadlines move on in between."""
        if deadline < self._armed:
            self._armed = max(deadline, self.sim.clock.now)
            self.sim.clock.at(self._armed, self._ring, self._armed)

    def _ring(self, armed: float) -> None:
        if armed == self._armed:
            self._armed = inf
            self.wake()
            if self.work is not None:
                self._arm(self.work.deadline())

    def _end(self, work: Step) -> None:
        for do in work.advance(self.sim.clock.now):
            if isinstance(do, Remove):
                self.members.removed(do.replica, do.reason)
        decision, now = work.decision, self.sim.clock.now
        assert decision is not None
        self.sim.meter.ended(decision, work.flight.resent)
        self.work, self.last_decision = None, decision
        self._step_s = now - self._began
        self.mark, self._applied = decision.to, decision.applied
        self.sim.rounds.forget()
        self.sim.joins.decided(decision)
        self.members.changed()
        self.late = self.members.at_mark(decision.mark)
        self._grace_until = now + GRACE * self._step_s
        if self.late:
            self.sim.clock.at(self._grace_until, self.wake)
        self.members.ask_when_due()

    def lose(self, replica: Replica, reason: str, *, quietly: bool = False) -> None:
        """``replica`` is silent, or gone: whatever is going on goes on without it."""
        if self.work is not None and not self.work.finished:
            self.work.remove(replica, reason, self.sim.clock.now)
        elif not quietly:
            self.members.removed(replica, reason)
        self.wake()

    # -- what comes in ------------------------------------------------------------------------

    def hears(self, receipt: Receipt, host: Host, sent_at: float) -> None:
        """A receipt, unless its sender died before it was sent."""
        work = self.work
        if work is None or host.dead_at <= sent_at:
            return
        work.receipt(receipt, self.sim.clock.now)
        self.sim.meter.look_at(receipt.m)
        self.wake()

    def hears_vote(self, replica: Replica, stage: int, vote: Vote) -> None:
        if self.work is not None:
            self.work.vote(replica, vote, stage=stage)
            self.wake()

    def hears_trouble(self, stage: int, round_: Stamp) -> None:
        if self.work is not None:
            self.work.trouble(round_, self.sim.clock.now, stage=stage)
            self.wake()

    def hears_of_failure(self, attempt: Attempt, reason: str, skipped: tuple[Replica, ...]) -> None:
        if self.work is not None:
            self.work.failed(attempt.m, attempt.stamp, reason, self.sim.clock.now)
            self.work.unreachable(skipped)
            self.wake()

    def pushed(self, hop: Hop) -> None:
        """A push of ours has ended, after some trouble."""
        if self.work is not None:
            self.work.flight.busy(hop.busy_answers)
            self.work.unreachable(hop.unreachable)
            self.wake()

    def push_failed(self, attempt: Attempt, hop: Hop, reason: str) -> None:
        self.pushed(hop)
        self.hears_of_failure(attempt, reason, ())
