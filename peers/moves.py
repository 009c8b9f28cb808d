"""Which replicas the trainer lets move to another stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from peers.balance import room_of, settings_of
from swarm.core.grants import Grants
from swarm.core.rebalancing import Need, Serving, View
from swarm.core.roster import Member, State
from swarm.types import PeerId, Replica

if TYPE_CHECKING:
    from dht.records import PeerRecord
    from peers.trainer import Trainer

COUNTS = (State.READY, State.JOINING, State.ANNOUNCED, State.BEHIND)
"""Who serves its stage, or is on the way there."""


IN_VAIN = 3
"""Questions without an answer after which an announcement is no longer believed."""


@dataclass(slots=True)
class _Move:
    """Who was let go. ``why``: in plain words, until that has been told."""

    replica: Replica
    why: str


class Moves:
    """The trainer's word on moves, from what it knows itself: who answers, and how fast it is.

    Speeds that it has measured count for more than those that peers tell of themselves.
    ``needs``: what each stage takes; all the same if nobody says.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.needs: Sequence[Need] = [Need(1.0)] * trainer.stages
        periods = trainer.manifest.periods
        limit_s = periods.drain_s + periods.patience_s
        self._grants = Grants(settings_of(trainer.manifest), limit_s=limit_s)
        self._records: dict[PeerId, PeerRecord] = {}
        self._moves: dict[PeerId, _Move] = {}

    def seen(self, record: PeerRecord) -> None:
        """An announcement, as it is in the directory now."""
        before = self._records.get(record.peer)
        if before is None or before.sequence <= record.sequence:
            self._records[record.peer] = record

    def forget_all_but(self, known: Iterable[PeerId]) -> None:
        """What others have announced is of no use any more."""
        kept = set(known)
        self._records = {p: r for p, r in self._records.items() if p in kept}

    def view(self) -> View:
        """The swarm as this trainer knows it."""
        trainer = self._trainer
        loads = [load for stage in range(trainer.stages) for load in trainer.wiring.loads(stage)]
        took = {load.replica: load.service_s for load in loads if load.service_s}
        counted = [m for m in trainer.roster.all() if _counts(m) and not m.leaving]
        return View(self.needs, [self._serving(m, took.get(m.replica)) for m in counted])

    def expected(self) -> View:
        """``view``, with those who are on their way where they are going."""
        return self._grants.applied_to(self.view())

    def bound_for(self, peer: PeerId) -> int | None:
        """The stage that it has been let go to; None: it stays."""
        return self._grants.under_way.get(peer)

    def _serving(self, member: Member, service_s: float | None) -> Serving:
        trainer, replica = self._trainer, member.replica
        microbatch = trainer.manifest.batch.microbatch
        record = self._records.get(replica.peer)
        if record is not None and record.boot != replica.boot:
            record = None  # of another stage
        return Serving(
            peer=replica.peer,
            stage=member.stage,
            samples_per_s=microbatch / service_s
            if service_s
            else (record.samples_per_s if record else 0.0),
            queued=record.queued if record else 0.0,
            memory_bytes=room_of(record) if record else None,
            settled=member.state is State.READY and member.mark in trainer.marks,
        )

    def refusal(self, member: Member, to_stage: int | None) -> str:
        """Why ``member`` must not move there; empty: it may, or it does not want to move."""
        peer, now = member.replica.peer, anyio.current_time()
        if to_stage is None:
            self.ended(peer)
            return ""
        self.tidy()
        if not self._trainer.manifest.rebalancing.enabled:
            return "moves are switched off in this run's manifest"
        view = self.view()
        reason = self._grants.ask(view, peer, to_stage, now, self._trainer.mark)
        if not reason and peer not in self._moves:
            why = self._reason(view, member.stage, to_stage)
            self._moves[peer] = _Move(member.replica, why)
        return reason

    def _reason(self, view: View, source: int, target: int) -> str:
        if self._trainer.reign.begun and view.measured:
            there, here = (f"{view.rates[stage]:.3g}" for stage in (target, source))
            return f"stage {target} does {there} samples/s, stage {source} {here}"
        there, here = (str(len(view.members[stage])) for stage in (target, source))
        return f"stage {target} has {there} replicas, stage {source} {here}"

    def ended(self, peer: PeerId) -> None:
        """It has arrived, or does not move after all; then it gets work where it is."""
        self._grants.ended(peer)
        move = self._moves.pop(peer, None)
        if move is not None:
            self._trainer.roster.stays(move.replica)

    def tidy(self) -> None:
        """End what is over: moves of those who have arrived, are gone, or take too long.

        A reply may be lost: who was let go and does not know it must not wait for work for ever.
        """
        now = anyio.current_time()
        for peer in self._grants.tidy(now, self._trainer.mark, self._is_over):
            self.ended(peer)

    def _is_over(self, peer: PeerId, to_stage: int) -> bool:
        """It serves where it wanted to go, or has fallen silent or begun anew elsewhere."""
        move = self._moves[peer]
        for member in self._trainer.roster.all():
            if member.replica == move.replica:
                if member.state is State.REMOVED:
                    return True
            elif member.replica.peer == move.replica.peer and (
                member.stage != to_stage or (member.state is State.READY and not member.leaving)
            ):
                return True
        return False

    def is_on_its_way(self, peer: PeerId) -> bool:
        """It goes on purpose, as has been said."""
        return peer in self._moves

    def may_wait(self, to_stage: int) -> bool:
        """Whether the step under way can be finished first: not if nobody serves ``to_stage``."""
        trainer = self._trainer
        return any(trainer.roster.ready(to_stage, mark) for mark in trainer.marks)

    def tell(self, member: Member, to_stage: int, *, wait: bool) -> None:
        """Say once for people who moves where, and why."""
        peer = member.replica.peer
        move = self._moves.get(peer)
        if move is None or not move.why:
            return
        why, move.why = move.why, ""
        when = "after this step" if wait else "now"
        self._trainer.on_event(
            f"{peer[-6:]} (stage {member.stage}) moves to stage {to_stage} {when}: {why}"
        )


def _counts(member: Member) -> bool:
    """Whether it serves its stage, or can be believed to be on the way there."""
    if member.state is State.READY:
        return True
    return member.state in COUNTS and member.failures < IN_VAIN
