"""The trainer: feeds microbatches and drives steps, as ``peers.trainer`` does, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

from swarm.core.closing import Closing, Fetch, Mismatch, Prepare, Vote
from swarm.core.flight import Flight, Launch, Pace, Receipt, Stamps
from swarm.core.hop import Hop
from swarm.core.journey import Ask, Journey, Phase
from swarm.core.step import Decide, Decision, Instruction, Probe, Remove, Reset, Step
from swarm.core.update import Update
from swarm.core.wiring import Window
from swarm.sim.calls import Call
from swarm.sim.members import Members
from swarm.sim.network import Host
from swarm.sim.server import Prepared, Server
from swarm.types import FRESH, Attempt, Mark, Replica, Stamp, Term

if TYPE_CHECKING:
    from swarm.sim.simulation import Simulation

GRACE = 0.1
"""Share of the last step's time for which a step waits for those that still apply the last one."""


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
        self.wiring: Any = sim.wiring
        self.pace = Pace(sim.attempt_s())
        self.window: Window | None = None
        self.work: Step | None = None
        self.last_decision: Decision | None = None
        self._told: Decision | None = None
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
        """Twice as many microbatches in flight as there are replicas, unless the world says."""
        most = self.sim.world.microbatches
        if self.window is None:
            replicas = sum(len(self.members.ready(stage)) for stage in range(self.stages))
            size = self.sim.world.window or max(2 * self.stages, 2 * replicas)
            self.window = Window(min(size, most), least=min(self.stages, most), most=most)
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
            self._carry_out(work, do)
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

    # -- instructions -------------------------------------------------------------------------

    def _carry_out(self, work: Step, do: Instruction) -> None:
        match do:
            case Launch():
                self._launch(do)
            case Ask():
                self._ask(work, do)
            case Remove():
                self.members.removed(do.replica, do.reason)
            case Probe():
                self.members.probe(do.replica)
            case Prepare():
                self._prepare(work, do)
            case Fetch():
                self.sim.rounds.fetch(do)
            case Decide():
                self._tell(do.decision)
                self.decide(do.replica, do.decision)
            case Reset():
                self.call(
                    do.replica,
                    Server.reset,
                    do.stamp,
                    self.mark,
                    False,
                    answered=_nothing,
                    why="did not answer a reset",
                )

    def call(
        self,
        replica: Replica,
        handle: Callable[..., None],
        *args: Any,
        answered: Callable[..., None],
        why: str,
    ) -> None:
        """Call ``replica``; who does not answer is removed."""
        server = self.sim.servers[replica]

        def bound(reply: Callable[..., None], *given: Any) -> None:
            handle(server, reply, *given)

        def failed() -> None:
            self.lose(replica, f"{why} (no connection)")

        Call(self.sim, server, bound, args, answered=answered, failed=failed).send()

    def lose(self, replica: Replica, reason: str, *, quietly: bool = False) -> None:
        """``replica`` is silent, or gone: whatever is going on goes on without it."""
        if self.work is not None and not self.work.finished:
            self.work.remove(replica, reason, self.sim.clock.now)
        elif not quietly:
            self.members.removed(replica, reason)
        self.wake()

    def _launch(self, do: Launch) -> None:
        attempt = do.attempt
        if self.sim.log is not None:
            route = " ".join("|".join(r.peer for r in short_list) for short_list in do.route)
            self.sim.tell(f"launch {attempt.m} {attempt.stamp.n} {route}")
        tries = self._trip(attempt).tries
        pause_s = self.sim.launch_pause_s(tries)
        if pause_s:
            self.sim.clock.after(pause_s, self._launch_late, do)
        else:
            self.sim.way.launch(do)

    def _launch_late(self, do: Launch) -> None:
        trip = self._trip(do.attempt)
        if trip.stamp == do.attempt.stamp and trip.phase is Phase.FLYING:
            self.sim.way.launch(do)

    def _trip(self, attempt: Attempt) -> Journey:
        assert self.work is not None
        return self.work.flight.journeys[attempt.m]

    def _ask(self, work: Step, ask: Ask) -> None:
        stage = self.sim.servers[ask.replica].stage

        def answered(answer: tuple[bool, float | None] | None) -> None:
            holds, loss = answer or (False, None)
            work.answered(ask, stage, holds, loss)
            self.wake()

        why = "did not answer a cancel"
        self.call(ask.replica, Server.cancel, ask.stamp, ask.m, answered=answered, why=why)

    def _prepare(self, work: Step, do: Prepare) -> None:
        if do.replica == do.members[0]:
            members = " ".join(sorted(member.peer for member in do.members))
            self.sim.tell(f"close {do.stage} {do.round.n} {members}")

        def answered(answer: Prepared | None) -> None:
            now, replica = self.sim.clock.now, do.replica
            if answer is None:
                if work.decision is None:
                    work.remove(replica, "is at another mark", now)
            elif answer.holds is not None:
                work.mismatched(Mismatch(replica, answer.holds), do.round, stage=do.stage)
            else:
                if answer.vote is not None:
                    work.vote(replica, answer.vote, stage=do.stage)
                work.prepared(replica, do.round, answer.missed, now, stage=do.stage)
            self.wake()

        why = "did not answer a prepare"
        mark = work.flight.mark
        self.call(do.replica, Server.prepare, mark, do, answered=answered, why=why)

    def _tell(self, decision: Decision) -> None:
        """Write it down, once."""
        if decision is self._told:
            return
        self._told = decision
        self.sim.tell(f"decide {decision.mark.t}")
        for counts in decision.counts:
            counted = " ".join(f"{peer}={count}" for peer, count in sorted(counts.items()))
            self.sim.tell(f"counts {counted}")

    def decide(self, replica: Replica, decision: Decision) -> None:
        """Tell the decision until it is answered. Who cannot apply it is behind."""
        roster = self.members.roster
        roster.asking(replica, True)

        def answered(mark: Mark | None) -> None:
            roster.asking(replica, False)
            if mark == decision.to:
                self.members.applied(replica, decision)
            else:
                self.members.behind(replica, mark)
            self.wake()

        why = "did not answer a decision"
        self.call(replica, Server.decide, decision, answered=answered, why=why)

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


def _nothing(answer: object) -> None:
    del answer
