"""A replica: its queue, its books and the time that it takes, as ``peers.replica`` drives them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarm.core.closing import Prepare, Vote
from swarm.core.flight import COUNTED
from swarm.core.hop import Outcome
from swarm.core.intake import ACCEPTED, Intake, Job, Kind, Reply
from swarm.core.ledger import Ledger, Verdict
from swarm.core.step import Decision
from swarm.sim.network import Host
from swarm.sim.push import Push, receipt_of
from swarm.types import FRESH, Mark, Replica, Stamp

if TYPE_CHECKING:
    from swarm.core.journey import Route
    from swarm.sim.simulation import Simulation

GONE = Reply(Outcome.REFUSED, "this peer has left the run")


@dataclass(slots=True)
class Load:
    """What came with a job. ``origin``: whose output it is; None: the trainer's."""

    rest: Route
    origin: Server | None
    arrived: float


@dataclass(slots=True)
class Pass:
    """A pass that has been computed. ``told_kind``: what its receipt calls it."""

    server: Server
    job: Job
    told_kind: Kind
    verdict: str
    loss: float | None
    queue_s: float
    compute_s: float

    def tell(
        self, at: float, link_s: float, busy: int = 0, skipped: tuple[Replica, ...] = ()
    ) -> None:
        """Send the receipt at ``at``."""
        server = self.server
        sim = server.sim
        there = at + sim.delays.between(server.host, sim.trainer.host)
        receipt = receipt_of(self, link_s, busy, skipped)
        sim.clock.at(there, sim.trainer.hears, receipt, server.host, at)


class Server:
    """One stage served by one host. ``mark`` is None until it has the stage's state.

    ``counted``, ``queue_s``: microbatches, and how long all of them waited here; ``since``: when it
    was admitted. For what it announces.
    """

    def __init__(self, sim: Simulation, host: Host, me: Replica, stage: int) -> None:
        world = sim.world
        work, tflops = world.stages[stage], sim.machines[host.peer].tflops
        self.sim, self.host, self.me, self.stage = sim, host, me, stage
        self.forward_s = work.forward_tflop / tflops
        self.backward_s = work.backward_tflop / tflops
        self.last = len(world.stages) - 1
        # Relayed, the last stage hands its output over too, and waits for its own backward.
        ends_at = self.last + world.relayed
        self.intake = Intake(stage, ends_at, queue=world.queue, contexts=world.contexts)
        self.intake.adopt(sim.trainer.term)  # it hears of nobody else
        self.ledger = Ledger(stage, FRESH)
        self.mark: Mark | None = None
        self.round: Stamp | None = None
        self.sealed = False
        self.gone = False
        self.counted = 0
        self.queue_s = 0.0
        self.since = sim.clock.now
        self.calls: dict[Any, None] = {}
        """Calls that have come in and wait for their answer."""
        # By the number of the stamp: there is one term.
        self._forwards: dict[int, Load] = {}
        self._backwards: dict[int, Load] = {}
        self._origins: dict[int, Load] = {}
        self._controls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._busy = self._woken = False

    # -- in -----------------------------------------------------------------------------------

    def offer(self, push: Push, tries: int) -> Reply:
        """Answer a push, whose payload is here."""
        now = self.sim.clock.now
        if self.gone:
            return GONE
        intake, kind, stamp = self.intake, push.kind, push.attempt.stamp
        job = Job(kind, push.attempt, now + max(0.0, push.expires_at - push.called))
        reply = intake.offer(job, tries, now)
        self._free()
        if reply is not ACCEPTED or not intake.decoded(kind, stamp):
            return reply
        loads = self._forwards if kind is Kind.FORWARD else self._backwards
        if stamp.n not in loads:
            loads[stamp.n] = Load(push.rest, push.origin, now)
            if kind is Kind.FORWARD:
                self._origins[stamp.n] = loads[stamp.n]
            if not self._busy and not self._woken:
                # Whatever else comes at this moment is in the queue before the next pass is chosen.
                self._woken = True
                self.sim.clock.at(now, self._wake)
        return reply

    def _wake(self) -> None:
        self._woken = False
        if not self._busy:
            self._next()

    def _free(self) -> None:
        for stamp in self.intake.take_freed():
            self._forwards.pop(stamp.n, None)
            self._backwards.pop(stamp.n, None)
            self._origins.pop(stamp.n, None)

    # -- through ------------------------------------------------------------------------------

    def control(self, call: Callable[..., None], *args: Any) -> None:
        """Run ``call`` before any further pass, when the one under way has ended."""
        self._controls.append((call, args))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        """Control, then the next pass, then sleep."""
        self._busy = True
        while self._controls:
            call, args = self._controls.popleft()
            call(*args)
        clock = self.sim.clock
        job = self.intake.next(clock.now)
        self._free()
        if job is None:
            self._busy = False
            return
        loads = self._forwards if job.kind is Kind.FORWARD else self._backwards
        load = loads.pop(job.attempt.stamp.n)
        clock.at(clock.now + self._cost_s(job), self._computed, job, load, clock.now)

    def _cost_s(self, job: Job) -> float:
        relayed = self.sim.world.relayed
        if job.kind is Kind.BACKWARD:
            return self.backward_s + (self.forward_s if relayed else 0.0)
        at_once = self.stage == self.last and not relayed and not job.attempt.evaluation
        return self.forward_s + (self.backward_s if at_once else 0.0)

    def _computed(self, job: Job, load: Load, started: float) -> None:
        now = self.sim.clock.now
        if self.host.dead_at <= now:
            return
        self.queue_s += started - load.arrived
        done = self._passed(job, started - load.arrived, now - started)
        alive = self.intake.finished(job)
        origin = self._origins.get(job.attempt.stamp.n)
        self._free()
        if alive:
            self.sim.send_on(done, load, origin)
        else:
            done.tell(now, 0.0)
        self._next()

    def _passed(self, job: Job, queue_s: float, compute_s: float) -> Pass:
        """What the books say of the pass that has just been computed."""
        forward = job.kind is Kind.FORWARD
        loss = self.sim.loss if forward and self.stage == self.last else None
        counts = not forward or (self.stage == self.last and not self.sim.world.relayed)
        if not counts or job.attempt.evaluation:
            verdict = str(Verdict.NOT_ASKED)
            return Pass(self, job, job.kind, verdict, loss, queue_s, compute_s)
        return Pass(self, job, Kind.BACKWARD, self._count(job), loss, queue_s, compute_s)

    def _count(self, job: Job) -> str:
        verdict = self.ledger.verdict(job.attempt)
        if verdict is not Verdict.COUNT:
            return str(verdict)
        self.end_round()
        self.ledger.count(job.attempt)
        self.counted += 1
        return COUNTED

    def end_round(self) -> None:
        self.round, self.sealed = None, False

    # -- orders -------------------------------------------------------------------------------

    def cancel(self, reply: Callable[..., None], stamp: Stamp, m: int) -> None:
        self.intake.cancel(stamp)
        self.control(self._cancel, reply, stamp, m)

    def _cancel(self, reply: Callable[..., None], stamp: Stamp, m: int) -> None:
        holds = self.ledger.cancel(stamp, m)
        reply((holds, self.sim.loss if holds and self.stage == self.last else None))

    def reset(self, reply: Callable[..., None], stamp: Stamp, mark: Mark, begin: bool) -> None:
        """At the trainer's mark this admits: what was held is dropped, and work may come."""
        if self.mark is None and begin:
            self.arrive(mark)
        if self.mark == mark:
            self.intake.raise_bar(stamp)
            self.control(self._reset, reply, stamp, mark)
        else:
            reply(self.mark)

    def _reset(self, reply: Callable[..., None], stamp: Stamp, mark: Mark) -> None:
        if self.mark == mark and (self.ledger.bar is None or stamp > self.ledger.bar):
            self.ledger.raise_bar(stamp)
            self.end_round()
            self.ledger.drop()
        reply(self.mark)

    def decide(self, reply: Callable[..., None], decision: Decision) -> None:
        self.control(self._decide, reply, decision)

    def _decide(self, reply: Callable[..., None], decision: Decision) -> None:
        """Apply the decision if it can be applied here; told is the mark afterwards."""
        if self.mark == decision.mark and self._may_apply(decision):
            self.arrive(decision.to)
        reply(self.mark)

    def _may_apply(self, decision: Decision) -> bool:
        if decision.update.skip:
            return True
        return self.sealed and decision.rounds[self.stage][0] == self.round

    def arrive(self, mark: Mark) -> None:
        """The weights are those of ``mark``; what belonged to the version before is over."""
        self.mark = mark
        self.end_round()
        self.ledger.advance(mark)
        self.intake.advance(mark)
        self._free()
        self.sim.leaving.applied(self)

    def vote(self, round_: Stamp) -> None:
        """The sum of the round is whole here, unless the round has ended meanwhile."""
        self.control(self._vote, round_)

    def _vote(self, round_: Stamp) -> None:
        sim = self.sim
        if self.round != round_ or self.host.dead_at <= sim.clock.now:
            return
        self.sealed = True
        at = sim.clock.now + sim.delays.between(self.host, sim.trainer.host)
        sim.clock.at(at, sim.trainer.hears_vote, self.me, self.stage, self.sum_vote(round_))

    def sum_vote(self, round_: Stamp) -> Vote:
        """All members of a round hold the same sum, so one name serves."""
        return Vote(round_, str(round_.n), 1.0, True)

    def prepare(self, reply: Callable[..., None], mark: Mark, do: Prepare) -> None:
        """Take part in a round, or say what is held. Asked again: how far it is."""
        if self.mark != mark:
            reply(None)
            return
        self.intake.raise_bar(do.round)
        if self.round == do.round:
            self._progress(reply, do.round)
        else:
            self.control(self._prepare, reply, do)

    def _prepare(self, reply: Callable[..., None], do: Prepare) -> None:
        ledger = self.ledger
        if (ledger.bar is None or do.round >= ledger.bar) and self.round != do.round:
            ledger.raise_bar(do.round)
            self.end_round()
            if ledger.held == do.expected:
                self.round = do.round
                self.sim.rounds.begun(self, do)
        self._progress(reply, do.round)

    def _progress(self, reply: Callable[..., None], round_: Stamp) -> None:
        if self.round != round_:
            reply(Prepared(holds=frozenset(self.ledger.held)))
        elif self.sealed:
            reply(Prepared(vote=self.sum_vote(round_)))
        else:
            reply(Prepared(missed=self.sim.rounds.missed(self, round_)))


@dataclass(frozen=True, slots=True)
class Prepared:
    """The answer to a prepare: its vote, else whom it misses, or what it ``holds`` instead."""

    vote: Vote | None = None
    missed: tuple[Replica, ...] = ()
    holds: frozenset[int] | None = None
