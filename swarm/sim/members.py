"""Who is a member, as the trainer knows it: ``swarm.core.roster``, and the questions it asks."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from swarm.core.backoff import Backoff
from swarm.core.roster import Admission, Roster, State
from swarm.core.step import Decision
from swarm.sim.calls import Call
from swarm.sim.server import Server
from swarm.types import Mark, Replica

if TYPE_CHECKING:
    from swarm.sim.trainer import Trainer

WATCH_S = 2.0
"""How often the trainer looks the directory up, and asks those that are not ready."""

RENEW_S = 3.0
"""How often the trainer speaks to every replica: so a dead one that nobody needs is found."""


class Members:
    """The trainer's roster, with lists of who is ready that are made anew only after a change."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.roster = Roster(Backoff(first_s=WATCH_S, cap_s=30.0))
        self._ready: list[tuple[Replica, ...] | None] = [None] * trainer.stages
        self._serving: list[tuple[Replica, ...] | None] = [None] * trainer.stages
        self._probing: set[Replica] = set()
        self._alarm = inf

    # -- who is ready -------------------------------------------------------------------------

    def changed(self, replica: Replica | None = None) -> None:
        """Lists are out of date; ``replica`` is no longer one that applies the last decision."""
        if replica is not None:
            self._trainer.late.discard(replica)
        self._ready = [None] * self._trainer.stages
        self._serving = [None] * self._trainer.stages

    def ready(self, stage: int) -> tuple[Replica, ...]:
        found = self._ready[stage]
        if found is None:
            found = self._ready[stage] = tuple(self.roster.ready(stage, self._trainer.mark))
        return found

    def serving(self, stage: int) -> tuple[Replica, ...]:
        found = self._serving[stage]
        if found is None:
            found = self._serving[stage] = tuple(self.roster.serving(stage, self._trainer.mark))
        return found

    def at_mark(self, mark: Mark) -> set[Replica]:
        return {
            member.replica
            for member in self.roster.all()
            if member.state is State.READY and member.mark == mark
        }

    # -- changes ------------------------------------------------------------------------------

    def begin_with(self, server: Server) -> None:
        """It is there when the run begins, with the initial weights."""
        now = self._trainer.sim.clock.now
        self.roster.announced(server.me, server.stage, now)
        server.arrive(self._trainer.mark)
        self.roster.admitted(server.me, self._trainer.mark)
        self.changed()

    def found(self, server: Server) -> None:
        """The directory shows it."""
        sim = self._trainer.sim
        for dead in self.roster.announced(server.me, server.stage, sim.clock.now):
            self.gone(dead, "restarted")
        self.ask_when_due()

    def gone(self, replica: Replica, reason: str) -> None:
        """``replica`` will not be heard of again."""
        member = self.roster.get(replica)
        if member is None:
            return
        self._trainer.lose(replica, reason, quietly=True)
        self.roster.forget(replica, self._trainer.sim.clock.now)
        self.changed(replica)
        self._look_at(member.stage)
        self._trainer.wake()

    def removed(self, replica: Replica, reason: str) -> None:
        sim, member = self._trainer.sim, self.roster.get(replica)
        if member is None or member.state is State.REMOVED:
            return
        sim.tell(f"remove {replica.peer} {reason}")
        self.roster.removed(replica, reason, sim.clock.now, sim.rng)
        self.changed(replica)
        self._look_at(member.stage)
        self.ask_when_due()

    def _look_at(self, stage: int) -> None:
        """Somebody of ``stage`` is gone: was it the last one?"""
        if not self.ready(stage):
            self._trainer.sim.joins.emptied(stage)

    def applied(self, replica: Replica, decision: Decision) -> None:
        """``replica`` is at the decision's mark. Too late, it is asked where it is, and waits."""
        trainer, member = self._trainer, self.roster.get(replica)
        if member is None:
            return
        if trainer.mark not in (decision.mark, decision.to):
            self.behind(replica, decision.to)
            return
        self.roster.admitted(replica, decision.to)
        self.changed(replica)
        work = trainer.work
        if work is not None and work.decision is decision:
            work.applied(replica, stage=member.stage)
        elif work is not None:
            work.admitted(replica, stage=member.stage)  # the next step is under way

    def behind(self, replica: Replica, mark: Mark | None) -> None:
        member = self.roster.get(replica)
        if member is not None and member.state is State.READY:
            self._trainer.lose(replica, "cannot apply the decision")
        self.roster.behind(replica, mark, self._trainer.sim.clock.now)
        self.changed(replica)
        self.ask_when_due()

    # -- questions ----------------------------------------------------------------------------

    def ask_when_due(self) -> None:
        """Ask all that are due, and be back for the others."""
        sim = self._trainer.sim
        for member in self.roster.to_ask(sim.clock.now, *self._trainer.marks):
            self._ask(member.replica)
        due = self.roster.next_ask(*self._trainer.marks)
        if due < self._alarm:
            self._alarm = max(due, sim.clock.now)
            sim.clock.at(self._alarm, self._ring, self._alarm)

    def _ring(self, alarm: float) -> None:
        if alarm == self._alarm:
            self._alarm = inf
            self.ask_when_due()

    def _ask(self, replica: Replica) -> None:
        server = self._trainer.sim.servers[replica]

        def answered(mark: Mark | None) -> None:
            if server.gone:
                self.unanswered(replica, "has left")
            else:
                self._answered(server, mark)
            self._trainer.wake()

        self._call(server, lambda reply: reply(server.mark), answered)

    def _call(
        self, server: Server, handle: Callable[..., None], answered: Callable[..., None]
    ) -> None:
        def failed() -> None:
            self.unanswered(server.me, "no connection")

        sim = self._trainer.sim
        Call(sim, server, handle, (), answered=answered, failed=failed, tries=1).send()

    def unanswered(self, replica: Replica, reason: str) -> None:
        sim = self._trainer.sim
        self.roster.unanswered(replica, reason, sim.clock.now, sim.rng)
        self.ask_when_due()

    def _answered(self, server: Server, mark: Mark | None) -> None:
        trainer, sim, replica = self._trainer, self._trainer.sim, server.me
        stands = trainer.standing
        if stands is not None and mark == stands.to:
            self.applied(replica, stands)
            return
        decision = stands or trainer.last_decision
        member = self.roster.get(replica)
        may_follow = member is not None and member.state is not State.BEHIND
        if decision is not None and mark == decision.mark and may_follow:
            trainer.instructions.decide(replica, decision)
            return
        if stands is not None and mark == stands.mark:
            self.roster.behind(replica, mark, sim.clock.now + WATCH_S)
            self.ask_when_due()
            return
        match self.roster.answered(replica, mark, trainer.mark, sim.clock.now, sim.rng):
            case Admission.BEGIN:
                self._admit(server, begin=True)
            case Admission.RESET:
                self._admit(server, begin=False)
            case Admission.JOIN:
                sim.joins.order(server)
        self.ask_when_due()

    def says_ready(self, server: Server, mark: Mark) -> None:
        """It has the whole state at ``mark``: admit it, or ask it again."""
        trainer, member = self._trainer, self.roster.get(server.me)
        if member is None:
            return
        if member.asking or mark != trainer.mark or trainer.standing is not None:
            self.roster.ask_soon(server.me, trainer.sim.clock.now)
            self.ask_when_due()
            return
        member.asking = True
        self._admit(server, begin=False)

    def _admit(self, server: Server, *, begin: bool) -> None:
        trainer = self._trainer
        mark, stamp = trainer.mark, trainer.stamps.take()

        def answered(there: Mark | None) -> None:
            member = self.roster.get(server.me)
            if member is None or there != mark or trainer.mark != mark:
                self.unanswered(server.me, "the run went on meanwhile")
                return
            self.roster.admitted(server.me, mark)
            self.changed()
            if trainer.work is not None:
                trainer.work.admitted(server.me, stage=member.stage)
            trainer.sim.serves(server)
            trainer.wake()

        self._call(server, lambda reply: server.reset(reply, stamp, mark, begin), answered)

    # -- is it there? -------------------------------------------------------------------------

    def probe(self, replica: Replica) -> None:
        """Another could not reach it. If it answers us it stays, and rests for a while."""
        if replica in self._probing:
            return
        self._probing.add(replica)
        trainer, sim = self._trainer, self._trainer.sim
        server = sim.servers[replica]

        def answered(mark: Mark | None) -> None:
            self._probing.discard(replica)
            trainer.wiring.ban(replica, sim.clock.now, sim.rng)

        def failed() -> None:
            self._probing.discard(replica)
            trainer.lose(replica, "cannot be reached (no connection)")

        handle = lambda reply: reply(server.mark)  # noqa: E731
        Call(sim, server, handle, (), answered=answered, failed=failed).send()

    def renew(self, server: Server) -> None:
        """``server`` has died: the next word that all get will not reach it."""
        now = self._trainer.sim.clock.now
        at = (now // RENEW_S + 1) * RENEW_S
        self._trainer.sim.clock.at(at, self._renewed, server)

    def _renewed(self, server: Server) -> None:
        member = self.roster.get(server.me)
        if member is not None and member.state in (State.READY, State.JOINING):
            self.probe(server.me)
