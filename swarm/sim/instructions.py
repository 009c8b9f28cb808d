"""Carries out what ``swarm.core.step`` says, as ``peers.instructions``: calls and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from swarm.core.closing import Fetch, Mismatch, Prepare
from swarm.core.flight import Launch
from swarm.core.journey import Ask, Journey, Phase
from swarm.core.step import Decide, Decision, Instruction, Probe, Remove, Reset, Step
from swarm.sim.calls import Call
from swarm.sim.server import Prepared, Server
from swarm.types import Attempt, Mark, Replica

if TYPE_CHECKING:
    from swarm.sim.trainer import Trainer


class Instructions:
    """What the trainer does; ``carry_out`` starts it and returns at once."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._sim = trainer, trainer.sim
        self._told: Decision | None = None

    def carry_out(self, work: Step, do: Instruction) -> None:
        match do:
            case Launch():
                self._launch(do)
            case Ask():
                self._ask(work, do)
            case Remove():
                self._trainer.members.removed(do.replica, do.reason)
            case Probe():
                self._trainer.members.probe(do.replica)
            case Prepare():
                self._prepare(work, do)
            case Fetch():
                self._sim.rounds.fetch(do)
            case Decide():
                self._tell(do.decision)
                self.decide(do.replica, do.decision)
            case Reset():
                self.call(
                    do.replica,
                    Server.reset,
                    do.stamp,
                    self._trainer.mark,
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
        server = self._sim.servers[replica]

        def bound(reply: Callable[..., None], *given: Any) -> None:
            handle(server, reply, *given)

        def failed() -> None:
            self._trainer.lose(replica, f"{why} (no connection)")

        Call(self._sim, server, bound, args, answered=answered, failed=failed).send()

    def _launch(self, do: Launch) -> None:
        attempt = do.attempt
        if self._sim.log is not None:
            route = " ".join("|".join(r.peer for r in short_list) for short_list in do.route)
            self._sim.tell(f"launch {attempt.m} {attempt.stamp.n} {route}")
        tries = self._trip(attempt).tries
        pause_s = self._sim.launch_pause_s(tries)
        if pause_s:
            self._sim.clock.after(pause_s, self._launch_late, do)
        else:
            self._sim.way.launch(do)

    def _launch_late(self, do: Launch) -> None:
        trip = self._trip(do.attempt)
        if trip.stamp == do.attempt.stamp and trip.phase is Phase.FLYING:
            self._sim.way.launch(do)

    def _trip(self, attempt: Attempt) -> Journey:
        work = self._trainer.work
        assert work is not None
        return work.flight.journeys[attempt.m]

    def _ask(self, work: Step, ask: Ask) -> None:
        stage = self._sim.servers[ask.replica].stage

        def answered(answer: tuple[bool, float | None] | None) -> None:
            holds, loss = answer or (False, None)
            work.answered(ask, stage, holds, loss)
            self._trainer.wake()

        why = "did not answer a cancel"
        self.call(ask.replica, Server.cancel, ask.stamp, ask.m, answered=answered, why=why)

    def _prepare(self, work: Step, do: Prepare) -> None:
        if do.replica == do.members[0]:
            members = " ".join(sorted(member.peer for member in do.members))
            self._sim.tell(f"close {do.stage} {do.round.n} {members}")

        def answered(answer: Prepared | None) -> None:
            now, replica = self._sim.clock.now, do.replica
            if answer is None:
                if work.decision is None:
                    work.remove(replica, "is at another mark", now)
            elif answer.holds is not None:
                work.mismatched(Mismatch(replica, answer.holds), do.round, stage=do.stage)
            else:
                if answer.vote is not None:
                    work.vote(replica, answer.vote, stage=do.stage)
                work.prepared(replica, do.round, answer.missed, now, stage=do.stage)
            self._trainer.wake()

        why = "did not answer a prepare"
        mark = work.flight.mark
        self.call(do.replica, Server.prepare, mark, do, answered=answered, why=why)

    def _tell(self, decision: Decision) -> None:
        """Write it down, once."""
        if decision is self._told:
            return
        self._told = decision
        self._sim.tell(f"decide {decision.mark.t}")
        for counts in decision.counts:
            counted = " ".join(f"{peer}={count}" for peer, count in sorted(counts.items()))
            self._sim.tell(f"counts {counted}")

    def decide(self, replica: Replica, decision: Decision) -> None:
        """Tell the decision until it is answered. Who cannot apply it is behind."""
        roster = self._trainer.members.roster
        roster.asking(replica, True)

        def answered(mark: Mark | None) -> None:
            roster.asking(replica, False)
            if mark == decision.to:
                self._trainer.members.applied(replica, decision)
            else:
                self._trainer.members.behind(replica, mark)
            self._trainer.wake()

        why = "did not answer a decision"
        self.call(replica, Server.decide, decision, answered=answered, why=why)


def _nothing(answer: object) -> None:
    del answer
