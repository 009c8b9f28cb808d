"""The trainer: feeds microbatches and drives steps. Carries out what ``swarm.core.step`` says."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from peers import messages as msg
from peers.admission import Admissions
from peers.contact import Contact
from peers.executor import Blocking, in_thread
from peers.inbox import Inbox
from peers.instructions import Instructions
from peers.moves import Moves
from peers.reign import Reign
from peers.rpc import Caller
from peers.seed import Seed
from peers.steps import Heard, StepDone
from swarm.core.backoff import Backoff
from swarm.core.closing import Closing
from swarm.core.evaluation import Evaluation
from swarm.core.flight import COUNTED, Flight, Pace, Stamps
from swarm.core.journey import Journey
from swarm.core.pace import GRACE
from swarm.core.roster import Roster
from swarm.core.step import Decision, Remove, Step
from swarm.core.takeover import Found
from swarm.core.totals import Totals, fold
from swarm.core.update import Update, global_norm, make_update
from swarm.core.wiring import Window, Wiring
from swarm.data import Batches
from swarm.manifest import Manifest
from swarm.types import FRESH, Mark, PeerId, Replica, Stamp, Term

log = logging.getLogger("swarm.trainer")

PHASES = ("queue_s", "compute_s", "encode_s", "link_s", "sent_bytes")


class Trainer:
    """One trainer of one run.

    A fresh run's begins at ``FRESH``; another calls ``peers.takeover.settle`` first, which says
    where to go on. ``applied`` counts updates that were not skipped, ``totals`` the microbatches
    of each peer; ``seed`` is the checkpoint from which stages begin that nobody serves any more.

    Args:
        term: its reign: a number above all that were heard, and its process's boot.
        tasks: where its calls run.
        on_event: called with a line of plain words when something happens that a person should
            know.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        caller: Caller,
        batches: Batches,
        term: Term,
        tasks: TaskGroup,
        rng: random.Random,
        on_event: Callable[[str], None] = log.info,
        blocking: Blocking = in_thread,
    ) -> None:
        self.manifest, self.caller, self.batches = manifest, caller, batches
        self.tasks, self.rng, self.on_event = tasks, rng, on_event
        self.blocking = blocking
        self.me = Replica(caller.peer, term.boot)
        self.mark = FRESH
        self.term = term
        self.applied = 0
        self.stages = manifest.stages.count
        self._delay = manifest.step.delay > 0
        periods = manifest.periods
        self.roster = Roster(Backoff(first_s=periods.watch_s, cap_s=30.0))
        self.wiring = Wiring(self.stages, ban=Backoff(first_s=periods.ban_s, cap_s=60.0))
        self.pace = Pace(periods.attempt_s)
        self.stamps = Stamps(lambda n: Stamp(self.term, n))
        self.heard: dict[Replica, Heard] = {}
        self.addresses: dict[PeerId, tuple[str, ...]] = {}
        self.work: Step | Evaluation | None = None
        self.beside: Step | None = None
        self.last_decision: Decision | None = None
        self.totals: Totals = tuple({} for _ in range(self.stages))
        self.seed: Seed | None = None
        self.settled = True
        self.polled: set[Replica] = set()
        self._inherited: list[Found] = []
        self._window: Window | None = None
        self._phases: dict[str, float] = {}
        self._counted_at = float("inf")
        self._step_s = 0.0
        self._wake = anyio.Event()
        self.moves = Moves(self)
        self.admissions = Admissions(self)
        self.instructions = Instructions(self)
        self.inbox = Inbox(self)
        self.contact = Contact(self)
        self.reign = Reign(self)

    # -- stages -----------------------------------------------------------------------------

    def ready(self, stage: int) -> list[Replica]:
        return self.roster.ready(stage, self.mark)

    def serving(self, stage: int) -> list[Replica]:
        return self.roster.serving(stage, self.mark)

    def missing(self) -> list[tuple[int, int]]:
        """Stages that have fewer replicas than a start needs: (stage, how many it has)."""
        have = [(stage, len(self.ready(stage))) for stage in range(self.stages)]
        return [(stage, count) for stage, count in have if count < self.needed]

    @property
    def lacks(self) -> str:
        """``missing`` in words; empty if nothing is."""
        return ", ".join(
            f"stage {stage} has {count} of {self.needed}" for stage, count in self.missing()
        )

    @property
    def needed(self) -> int:
        """How many replicas each stage has to have before the next step begins."""
        return 1 if self.reign.begun else self.manifest.start.replicas

    @property
    def standing(self) -> Decision | None:
        """The decision that the step under way has come to, while replicas apply it."""
        decision = self.work.decision if isinstance(self.work, Step) else None
        return decision if decision is not None and decision.mark == self.mark else None

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Where replicas may be: at the run's mark, or beyond it by a decision that stands."""
        return (self.mark,) if self.standing is None else (self.mark, self.standing.to)

    @property
    def works(self) -> list[Step | Evaluation]:
        """What is under way; with delayed updates there is a step beside."""
        return [work for work in (self.work, self.beside) if work is not None]

    def work_of(self, stamp: Stamp) -> Step | Evaluation | None:
        """What the attempt ``stamp`` belongs to; the first of ``works`` if it is not known."""
        beside = self.beside
        return beside if beside is not None and beside.flight.knows(stamp) else self.work

    def wake(self) -> None:
        self._wake.set()

    async def wait_for_start(self) -> None:
        """Until each stage has its replicas at the run's mark."""
        while self.missing():
            self.reign.check()
            await self._pause(float("inf"))

    async def members(self, stage: int) -> list[Replica]:
        """The replicas of ``stage`` at the run's mark, once there are any."""
        while not self.ready(stage):
            self.reign.check()
            await self._pause(float("inf"))
        return self.ready(stage)

    async def _pause(self, until: float) -> None:
        """Until something happens, ``until``, or the next question to a stranger is due."""
        self.admissions.ask()
        until = min(until, self.roster.next_ask(*self.marks), self.reign.lost_at())
        with anyio.move_on_at(until) if until < float("inf") else anyio.CancelScope():
            await self._wake.wait()
        if self._wake.is_set():
            self._wake = anyio.Event()

    # -- steps ------------------------------------------------------------------------------

    async def step(self) -> StepDone:
        """One optimizer step, from the first microbatch to a replica of each stage applying it."""
        await self._let_all_apply()
        started = anyio.current_time()
        self.reign.begun = True
        t, batch = self.mark.t, self.manifest.batch
        step = self.beside or self._new_step()
        step.may_close = True
        further = t + 1 < self.manifest.run.steps
        self.beside = self._new_step(step) if further and self.manifest.step.delays(t + 1) else None
        self._inherit(step)
        self._phases, self._counted_at = {}, float("inf")
        await self._drive(step)
        decision = step.decision
        assert decision is not None
        self.last_decision = decision
        self._step_s = anyio.current_time() - started
        self.mark = decision.to
        self.applied = decision.applied
        self.totals = fold(self.totals, decision.counts)
        self.seed = None  # each stage has a replica that has gone on from it
        if self.beside is not None:
            self.beside.promote(self.mark, self._decider(self.mark.t), self.applied)
        self._tell_skip(decision)
        return StepDone(
            step=t,
            loss=decision.loss,
            samples=batch.microbatches * batch.microbatch,
            seconds=anyio.current_time() - started,
            lr=decision.update.lr,
            norm=decision.norm,
            skipped=decision.update.skip,
            resent=step.flight.resent,
            counts=tuple(dict(counts) for counts in decision.counts),
            phases={
                **self._phases,
                "close_s": anyio.current_time() - self._counted_at,
                "window": self._sized_window().size,
            },
        )

    def _new_step(self, before: Step | None = None) -> Step:
        """The next step; ``before`` (with delayed updates): of the one after this, ahead of it."""
        t = self.mark.t + (before is not None)
        count = self.manifest.batch.microbatches
        flight = self._flight([self._journey(m) for m in range(count)], ahead=before is not None)
        if before is not None:
            flight.beside = before.flight
        step = Step(
            flight,
            [self._closing(stage) for stage in range(self.stages)],
            ready=self._ready_by_now,
            stamps=self.stamps,
            to=Mark(self.term, t + 1),
            decider=self._decider(t),
            applied=self.applied,
            serving=self._serving_by_now,
        )
        step.all_apply = self._delay
        return step

    def _ready_by_now(self, stage: int) -> list[Replica]:
        """READY for the steps under way: with delayed updates, beyond a standing decision too."""
        if not self._delay:
            return self.ready(stage)
        return sorted(r for mark in self.marks for r in self.roster.ready(stage, mark))

    def _serving_by_now(self, stage: int) -> list[Replica]:
        if not self._delay:
            return self.serving(stage)
        ready = self._ready_by_now(stage)
        return [r for r in ready if not self.roster.is_leaving(r)] or ready

    def _inherit(self, step: Step) -> None:
        """What replicas hold of this step from before our time."""
        inherited, self._inherited = self._inherited, []
        for found in inherited:
            if found.mark == self.mark and found.replica in self.ready(found.stage):
                step.inherit(found.replica, found.held, found.losses, stage=found.stage)

    def go_on(self, mark: Mark, applied: int, totals: Totals, inherited: Sequence[Found]) -> None:
        """The run is at ``mark``; ``inherited``: what its replicas there hold of the next step."""
        self.reign.begun = True
        self.mark, self.applied, self.totals = mark, applied, totals
        self._inherited = list(inherited)
        self.settled = True
        self.wake()

    async def _let_all_apply(self) -> None:
        """Give those a moment that are still applying the last decision.

        The first microbatches would all go to whoever has applied it first, and its mates would
        have nothing to do for most of the step.
        """
        last = self.last_decision
        until = anyio.current_time() + GRACE * self._step_s
        while last is not None and last.to == self.mark and anyio.current_time() < until:
            if not any(self.roster.ready(stage, last.mark) for stage in range(self.stages)):
                return
            self.reign.check()
            await self._pause(until)

    async def evaluate(self, microbatches: int) -> float:
        """Mean loss over held-out microbatches at the present mark."""
        trips = [self._journey(m, evaluation=True) for m in range(microbatches)]
        flight = self._flight(trips, ahead=self._delay)  # of the weights of the mark
        if self.beside is not None:
            self.beside.flight.beside = flight
        await self._drive(Evaluation(flight, self.stages, ready=self.ready, serving=self.serving))
        if self.beside is not None:
            self.beside.flight.beside = None
        flight.end()
        # A part of the loss is scaled by the microbatch's share of a whole batch.
        return flight.loss() * self.manifest.batch.microbatches / microbatches

    async def _drive(self, work: Step | Evaluation) -> None:
        self.work = work
        while not work.finished:
            self.reign.check()
            now = anyio.current_time()
            if work.flight.done:
                self._counted_at = min(self._counted_at, now)
            for each in self.works:
                for do in each.advance(now):
                    self.instructions.carry_out(each, do)
            if not work.finished:
                await self._pause(min(each.deadline() for each in self.works))
        for do in work.advance(anyio.current_time()):
            if isinstance(do, Remove):
                self.instructions.carry_out(work, do)

    def lose(self, replica: Replica, reason: str, *, quietly: bool = False) -> None:
        """``replica`` is silent, or gone: whatever is going on goes on without it."""
        now = anyio.current_time()
        going_on = [work for work in self.works if not work.finished]
        for work in going_on:
            work.remove(replica, reason, now)
        if not going_on and not quietly:
            self.instructions.remove(Remove(replica, reason))
        self.wake()

    def _journey(self, m: int, *, evaluation: bool = False) -> Journey:
        answer_s = self.manifest.periods.silence_s
        return Journey(m, self.stages, answer_s=answer_s, evaluation=evaluation)

    def _flight(self, journeys: Sequence[Journey], *, ahead: bool) -> Flight:
        return Flight(
            journeys,
            self.mark,
            wiring=self.wiring,
            window=self._sized_window(),
            pace=self.pace,
            stamps=self.stamps,
            rng=self.rng,
            ahead=ahead,
        )

    def _sized_window(self) -> Window:
        if self._window is None:
            replicas = sum(len(self.ready(stage)) for stage in range(self.stages))
            microbatches, limit = self.manifest.batch.microbatches, self.manifest.limits.window
            self._window = Window.sized(self.stages, replicas, microbatches, limit)
        return self._window

    def _closing(self, stage: int) -> Closing:
        periods = self.manifest.periods
        limit_s = 2 * periods.silence_s + self.admissions.averaging_s(stage)
        return Closing(stage, limit_s=limit_s, answer_s=periods.silence_s)

    def _decider(self, t: int) -> Callable[[Sequence[float], bool], tuple[Update, float]]:
        optimizer, applied = self.manifest.optimizer, self.applied

        def decide(squared_norms: Sequence[float], finite: bool) -> tuple[Update, float]:
            norm = global_norm(squared_norms) if finite else float("nan")
            return make_update(optimizer, t, applied, squared_norms, finite), norm

        return decide

    def _tell_skip(self, decision: Decision) -> None:
        if decision.update.skip:
            what = (
                "the sum of the gradients is not finite, or too large for its norm"
                if decision.rounds
                else "a microbatch's gradient was not finite on two ways"
            )
            self.on_event(
                f"step {decision.mark.t} was skipped: {what} (lower the learning rate, or look at "
                "the data)"
            )

    def heard_receipt(self, replica: Replica, message: msg.Receipt) -> None:
        """For the view, and for where the time goes."""
        heard = self.heard.setdefault(replica, Heard())
        heard.last_work, heard.queued = anyio.current_time(), message.queued
        heard.counted += message.verdict == COUNTED
        for name in PHASES:
            self._phases[name] = self._phases.get(name, 0.0) + getattr(message, name)
