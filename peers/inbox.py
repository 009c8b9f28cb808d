"""What comes in at a trainer: receipts, votes, wishes; and questions that anybody may ask."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import anyio

from peers import messages as msg
from peers.seed import Seed
from peers.sources import digests
from peers.tensors import RAW, pack
from peers.transport import Frame
from swarm import __version__
from swarm.core.closing import Vote
from swarm.core.flight import NOT_FINITE, Receipt
from swarm.core.intake import Kind
from swarm.core.step import Step
from swarm.errors import BadInput, SwarmError
from swarm.types import PeerId, Replica

if TYPE_CHECKING:
    from peers.trainer import Trainer

log = logging.getLogger("swarm.trainer")

FromReplica = (
    msg.Receipt | msg.Failed | msg.Vote | msg.Trouble | msg.Ready | msg.Leave | msg.Goodbye
)
Reply = tuple[msg.Message, list[memoryview]]


class Inbox:
    """Answers every message that a trainer gets."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    async def handle(self, sender: PeerId, frame: Frame) -> Frame:
        """The transport's handler: never raises for anything that was received."""
        try:
            message = msg.parse_request(frame.header)
            reply, payload = await self._answer(sender, message)
        except BadInput as error:
            return Frame(msg.header(msg.Refused(reason=str(error)[:500])))
        return Frame(msg.header(reply), payload)

    async def _answer(self, sender: PeerId, message: msg.AnyRequest) -> Reply:
        trainer = self._trainer
        if isinstance(message, msg.Question) and not message.run:
            status = self._status(detail=message.detail)
            return status, [memoryview(trainer.manifest.canonical())]
        if message.run != trainer.manifest.run_id:
            return msg.Refused(reason=f"this peer leads run {trainer.manifest.run_id}"), []
        match message:
            case msg.Question():
                return self._status(detail=message.detail), []
            case msg.GetState() | msg.GetDigests():
                return await self._give(message)
        if not isinstance(message, FromReplica):
            return msg.Refused(reason=f"{message.kind} is not for a trainer"), []
        replica = Replica(sender, message.boot)
        member = trainer.roster.get(replica)
        if member is None:
            return msg.Refused(reason="not a member of this run"), []
        answer = self._take(replica, member.stage, message)
        trainer.wake()
        return answer, []

    def _status(self, *, detail: bool) -> msg.Status:
        trainer = self._trainer
        lacks = trainer.lacks
        why = f"waits for ready replicas: {lacks}" if lacks else ""
        return msg.Status(
            boot=trainer.me.boot,
            role="trainer",
            mark=trainer.mark,
            term=trainer.term.number,
            term_boot=trainer.term.boot,
            state="training" if trainer.work is not None else "waiting",
            detail=msg.Detail(why=why[:500], version=__version__) if detail else None,
        )

    def _take(self, replica: Replica, stage: int, message: FromReplica) -> msg.Message:
        trainer, now = self._trainer, anyio.current_time()
        match message:
            case msg.Goodbye():
                trainer.admissions.gone(replica, f"left: {message.reason}")
            case msg.Ready():
                trainer.admissions.ready(replica, message.mark)
            case msg.Leave():
                return self._leave(replica, message)
            case _ if trainer.work is None:
                return msg.Ok()
            case msg.Receipt():
                self._receipt(replica, stage, message, now)
            case msg.Failed():
                work = trainer.work_of(message.stamp) or trainer.work
                work.failed(message.m, message.stamp, message.reason, now)
                work.unreachable(message.skipped)
            case msg.Vote() if isinstance(trainer.work, Step):
                vote = Vote(message.round, message.digest, message.squared_norm, message.finite)
                trainer.work.vote(replica, vote, stage=stage)
            case msg.Trouble() if isinstance(trainer.work, Step):
                trainer.work.trouble(message.round, now, stage=stage)
        return msg.Ok()

    def _leave(self, replica: Replica, message: msg.Leave) -> msg.Message:
        """It may go when the step under way is applied; at once if it has no part in one."""
        trainer = self._trainer
        member = trainer.roster.get(replica)
        assert member is not None
        to_stage = message.to_stage
        before = member.leaving and not trainer.moves.is_on_its_way(replica.peer)
        reason = trainer.moves.refusal(member, to_stage)
        if reason and message.done:
            return msg.Refused(reason=reason)  # this trainer does not know that it was let go
        reason = reason or trainer.roster.leave(replica, *trainer.marks, done=message.done)
        if reason:
            if not message.done:
                trainer.moves.ended(replica.peer)
            return msg.Busy(reason=reason)
        has_part = member.leaving and trainer.work is not None and not message.done
        if to_stage is not None:
            has_part = has_part and trainer.moves.may_wait(to_stage)
            trainer.moves.tell(member, to_stage, wait=has_part)
        elif has_part and not before:
            trainer.on_event(f"{replica.peer[-6:]} (stage {member.stage}) leaves after this step")
        return msg.Granted(wait=has_part)

    def _receipt(self, replica: Replica, stage: int, message: msg.Receipt, now: float) -> None:
        trainer = self._trainer
        trainer.heard_receipt(replica, message)
        blamed, at = (message.blame, stage) if message.blame else (None, stage)
        if blamed is not None:
            # Its input was not finite: whoever sent it has to be looked at, not the receiver.
            last = trainer.stages - 1
            at = stage - 1 if message.pass_ == "forward" or stage == last else stage + 1
            if not 0 <= at < trainer.stages or blamed not in trainer.ready(at):
                blamed, at = None, stage
        receipt = Receipt(
            stamp=message.stamp,
            m=message.m,
            stage=at,
            replica=blamed or replica,
            kind=Kind(message.pass_),
            verdict=message.verdict,
            queue_s=message.queue_s,
            compute_s=message.compute_s,
            link_s=message.link_s,
            loss=message.loss,
            busy=message.busy,
            skipped=tuple(message.skipped),
        )
        if receipt.verdict == NOT_FINITE:
            trainer.on_event(f"{receipt.replica.peer[-6:]} (stage {at}): something not finite")
        work = trainer.work_of(receipt.stamp)
        assert work is not None
        work.receipt(receipt, now)

    # -- a checkpoint for stages that nobody serves any more ---------------------------------

    async def _give(self, message: msg.GetState | msg.GetDigests) -> Reply:
        trainer, seed = self._trainer, self._trainer.seed
        if seed is None or seed.source is None or message.mark != seed.copies:
            return msg.Refused(reason="that state is not kept here"), []
        if message.stage >= trainer.stages:
            return msg.Refused(reason=f"there are {trainer.stages} stages"), []
        try:
            give = partial(_from_seed, seed, message, trainer.manifest.limits.state_piece)
            return await trainer.blocking(give)
        except SwarmError as error:
            log.error("the checkpoint cannot be read: %s", error)
            return msg.Refused(reason=str(error)[:500]), []


def _from_seed(seed: Seed, message: msg.GetState | msg.GetDigests, size: int) -> Reply:
    """Read from the checkpoint's file, in a thread."""
    assert seed.source is not None
    source = seed.source(message.stage)
    if isinstance(message, msg.GetDigests):
        metas, payload = pack([(digests(source.piece(0, source.length), size), RAW)])
        totals = msg.plain(seed.totals)
        answer = msg.Digests(mark=seed.copies, applied=seed.applied, totals=totals, tensors=metas)
        return answer, payload
    stop = message.start + message.count
    if stop > source.length:
        return msg.Refused(reason=f"the stage has {source.length} values"), []
    piece = source.piece(message.start, stop)[: 1 if message.weights_only else None]
    metas, payload = pack([(tensor.contiguous(), RAW) for tensor in piece])
    return msg.Piece(mark=seed.copies, tensors=metas), payload
