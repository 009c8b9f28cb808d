"""Carries out the instructions of ``swarm.core.step``: each is a call, its answer an event."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
import torch

from peers import messages as msg
from peers.passes import BUSY_PAUSE
from peers.rpc import run_hop
from peers.tensors import RAW, pack
from swarm.core.backoff import Backoff
from swarm.core.books import step_of
from swarm.core.closing import Fetch, Mismatch, Prepare, Vote
from swarm.core.evaluation import Evaluation
from swarm.core.flight import Launch
from swarm.core.hop import Hop, Outcome, Tell
from swarm.core.journey import Ask, Phase
from swarm.core.roster import State
from swarm.core.step import Decide, Decision, Instruction, Probe, Remove, Reset, Step
from swarm.errors import BadInput, CallLost, NotConnected, TransportError
from swarm.types import Replica

if TYPE_CHECKING:
    from peers.trainer import Trainer

log = logging.getLogger("swarm.trainer")

Work = Step | Evaluation

FREE_TRIES = 3
AGAIN = Backoff(first_s=0.05, cap_s=2.0)
"""A microbatch that failed so often waits before each further try: where everybody refuses, all
answers are quick, and asking and sending again would take the whole network."""


class Instructions:
    """What the trainer does; ``carry_out`` starts it and returns at once."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._probing: set[Replica] = set()

    def carry_out(self, work: Work, do: Instruction) -> None:
        start = self._trainer.tasks.start_soon
        match do:
            case Launch():
                start(self._launch, work, do)
            case Ask():
                start(self._ask, work, do)
            case Remove():
                self.remove(do)
            case Probe():
                start(self.probe, do.replica)
            case _ if isinstance(work, Step):
                self._close(work, do)

    def _close(self, step: Step, do: Instruction) -> None:
        start = self._trainer.tasks.start_soon
        match do:
            case Prepare():
                start(self._prepare, step, do)
            case Fetch():
                start(self._fetch, do)
            case Decide():
                start(self.decide, do)
            case Reset():
                for work in self._trainer.works:
                    if isinstance(work, Step) and work is not step:
                        work.was_reset(do.replica, do.stamp)
                start(self._reset, step, do)

    # -- microbatches -----------------------------------------------------------------------

    async def _launch(self, work: Work, do: Launch) -> None:
        trainer, attempt = self._trainer, do.attempt
        trip = work.flight.journeys[attempt.m]
        if trip.tries > FREE_TRIES:
            await anyio.sleep(AGAIN.pause(trip.tries - FREE_TRIES, trainer.rng))
            if trip.stamp != attempt.stamp or trip.phase is not Phase.FLYING:
                return
        if attempt.evaluation and isinstance(work, Evaluation):
            inputs, targets = trainer.batches.evaluation(attempt.m)
        else:
            inputs, targets = trainer.batches.train(step_of(attempt), attempt.m)
        metas, payload = pack([(torch.from_numpy(inputs), RAW), (torch.from_numpy(targets), RAW)])
        deadline = anyio.current_time() + do.limit_s
        hop = Hop(do.route[0], deadline, BUSY_PAUSE, trainer.rng)

        async def send(replica: Replica, tries: int) -> tuple[Outcome, str]:
            message = msg.Forward(
                run=trainer.manifest.run_id,
                to=replica.boot,
                stamp=attempt.stamp,
                mark=attempt.mark,
                m=attempt.m,
                mask=attempt.mask,
                ahead=attempt.ahead,
                stage=0,
                sender=trainer.me,
                tries=tries,
                # News renews the limit here, for each stage anew, but not what it carries.
                ttl_s=do.limit_s * trainer.stages,
                route=[list(short_list) for short_list in do.route[1:]],
                tensors=metas,
            )
            return await trainer.caller.push(replica.peer, message, payload)

        end = await run_hop(hop, send)
        now = anyio.current_time()
        work.flight.busy(hop.busy_answers)
        work.unreachable(hop.unreachable)
        if isinstance(end, Tell):
            log.debug("microbatch %d: %s", attempt.m, end.reason)
            work.failed(attempt.m, attempt.stamp, end.reason, now)
        trainer.wake()

    async def _ask(self, work: Work, ask: Ask) -> None:
        trainer, replica = self._trainer, ask.replica
        message = msg.Cancel(
            run=trainer.manifest.run_id,
            to=replica.boot,
            stamp=ask.stamp,
            mark=work.flight.mark,
            ahead=work.flight.ahead,
            m=ask.m,
        )
        member = trainer.roster.get(replica)
        answer = await self._insist(replica, message, "did not answer a cancel")
        if answer is None or member is None:
            return
        holds = isinstance(answer, msg.Holds) and answer.holds
        loss = answer.loss if isinstance(answer, msg.Holds) else None
        work.answered(ask, member.stage, holds, loss)
        trainer.wake()

    async def probe(self, replica: Replica) -> None:
        """Another peer could not reach it. If it answers us it stays, and rests for a while."""
        trainer = self._trainer
        if replica in self._probing:
            return
        self._probing.add(replica)
        try:
            question = msg.Question(run=trainer.manifest.run_id, to=replica.boot)
            answer = await self._insist(replica, question, "cannot be reached")
            if answer is not None:
                trainer.wiring.ban(replica, anyio.current_time(), trainer.rng)
        finally:
            self._probing.discard(replica)

    def remove(self, do: Remove) -> None:
        trainer = self._trainer
        member = trainer.roster.get(do.replica)
        if member is None or member.state is State.REMOVED:
            return  # it has said itself that it goes, has restarted, or was found silent twice
        trainer.on_event(f"{do.replica.peer[-6:]} (stage {member.stage}) was removed: {do.reason}")
        trainer.roster.removed(do.replica, do.reason, anyio.current_time(), trainer.rng)

    # -- the end of a step ------------------------------------------------------------------

    async def _prepare(self, step: Step, do: Prepare) -> None:
        trainer, replica = self._trainer, do.replica
        message = msg.Prepare(
            run=trainer.manifest.run_id,
            to=replica.boot,
            stamp=do.round,
            mark=step.flight.mark,
            stage=do.stage,
            members=list(do.members),
            contributors=list(do.contributors),
            expected=do.expected,
        )
        answer = await self._insist(replica, message, "did not answer a prepare")
        now = anyio.current_time()
        match answer:
            case None:
                return
            case msg.Prepared(takes_part=True):
                if answer.digest:
                    vote = Vote(do.round, answer.digest, answer.squared_norm, answer.finite)
                    step.vote(replica, vote, stage=do.stage)
                step.prepared(replica, do.round, answer.missed, now, stage=do.stage)
            case msg.Prepared():
                step.mismatched(Mismatch(replica, answer.holds), do.round, stage=do.stage)
            case msg.At() if step.decision is None:
                step.remove(replica, "is at another mark", now)
            case msg.Refused() if answer.term is None:
                log.debug("a prepare was refused by %s: %s", replica.peer, answer.reason)
        trainer.wake()

    async def _fetch(self, do: Fetch) -> None:
        message = msg.Fetch(
            run=self._trainer.manifest.run_id,
            to=do.replica.boot,
            round=do.round,
            source=do.source,
        )
        await self._insist(do.replica, message, "did not answer a fetch")

    async def _reset(self, step: Step, do: Reset) -> None:
        message = msg.Reset(
            run=self._trainer.manifest.run_id,
            to=do.replica.boot,
            stamp=do.stamp,
            mark=step.flight.mark,
        )
        await self._insist(do.replica, message, "did not answer a reset")

    async def decide(self, do: Decide) -> None:
        """Tell the decision until it is answered. Who cannot apply it is behind."""
        trainer, replica = self._trainer, do.replica
        message = msg.Decide(
            run=trainer.manifest.run_id,
            to=replica.boot,
            stamp=trainer.stamps.take(),
            decision=msg.WireDecision.of(do.decision),
        )
        trainer.roster.asking(replica, True)
        answer = await self._insist(replica, message, "did not answer a decision")
        trainer.roster.asking(replica, False)
        if answer is None:
            return
        if not isinstance(answer, msg.At):
            trainer.lose(replica, f"refused a decision ({getattr(answer, 'reason', answer.kind)})")
        elif answer.mark == do.decision.to:
            self.applied(replica, do.decision)
        else:
            member = trainer.roster.get(replica)
            if member is not None and member.state is State.READY:
                trainer.lose(replica, "cannot apply the decision")
            trainer.roster.behind(replica, answer.mark, anyio.current_time())
        trainer.wake()

    def applied(self, replica: Replica, decision: Decision) -> None:
        """``replica`` is at the decision's mark. Too late, it is asked where it is, and waits."""
        trainer = self._trainer
        member = trainer.roster.get(replica)
        if member is None:
            return
        if trainer.mark not in (decision.mark, decision.to):
            trainer.roster.behind(replica, decision.to, anyio.current_time())
            return
        trainer.roster.admitted(replica, decision.to)
        work = trainer.work
        if isinstance(work, Step) and work.decision is decision:
            work.applied(replica, stage=member.stage)
        else:
            for each in trainer.works:  # the next step is under way
                each.admitted(replica, stage=member.stage)

    async def _insist(
        self, replica: Replica, message: msg.Message, else_removed: str
    ) -> msg.AnyReply | None:
        """Call, and again; whoever does not answer is removed."""
        trainer = self._trainer
        try:
            answer = await trainer.caller.insist(replica.peer, message, tries=2)
        except (TransportError, BadInput) as error:
            log.debug("%s %s: %s", replica.peer, else_removed, error)
            trainer.lose(replica, f"{else_removed} ({_brief(error)})")
            return None
        return None if trainer.reign.refused(replica, answer) else answer


def _brief(error: TransportError | BadInput) -> str:
    """Transports tell all that they tried; a person who watches wants a few words."""
    match error:
        case NotConnected():
            return "no connection"
        case CallLost():
            return "silence, or a connection that broke"
    return str(error)[:80]
