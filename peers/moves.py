"""Which replicas the trainer lets move to another stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio

from peers.balance import settings_of
from swarm.core.rebalancing import Grants, Need, Serving, View
from swarm.core.roster import Member, State
from swarm.types import PeerId

if TYPE_CHECKING:
    from dht.records import PeerRecord
    from peers.trainer import Trainer

COUNTS = (State.READY, State.JOINING, State.ANNOUNCED, State.BEHIND)
"""Who serves its stage, or is on the way there."""


class Moves:
    """The trainer's word on moves, from what it knows itself: who answers, and how fast it is.

    Speeds that it has measured count for more than those that peers tell of themselves.
    ``needs``: what each stage takes; all the same if nobody says.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.needs: Sequence[Need] = [Need(1.0)] * trainer.stages
        periods = trainer.manifest.periods
        self._grants = Grants(
            settings_of(trainer.manifest), limit_s=periods.drain_s + periods.patience_s
        )
        self._records: dict[PeerId, PeerRecord] = {}
        self._why: dict[PeerId, str] = {}

    def seen(self, record: PeerRecord) -> None:
        """An announcement, as it is in the directory now."""
        before = self._records.get(record.peer)
        if before is None or before.sequence <= record.sequence:
            self._records[record.peer] = record

    def view(self) -> View:
        """The swarm as this trainer knows it."""
        trainer = self._trainer
        members = trainer.roster.all()
        known = {member.replica.peer for member in members}
        self._records = {p: r for p, r in self._records.items() if p in known}
        loads = [load for stage in range(trainer.stages) for load in trainer.wiring.loads(stage)]
        took = {load.replica: load.service_s for load in loads if load.service_s}
        counted = [m for m in members if m.state in COUNTS and not m.leaving]
        return View(self.needs, [self._serving(m, took.get(m.replica)) for m in counted])

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
            memory_bytes=(record.memory_bytes or None) if record else None,
            settled=member.state is State.READY and member.mark in trainer.marks,
        )

    def refusal(self, member: Member, to_stage: int | None, *, done: bool) -> str:
        """Why ``member`` must not move there; empty: it may, or it does not want to move."""
        peer, now = member.replica.peer, anyio.current_time()
        if to_stage is None:
            self.ended(peer)
            return ""
        if done:
            return ""
        self._arrived()
        if not self._trainer.manifest.rebalancing.enabled:
            return "moves are switched off in this run's manifest"
        view = self.view()
        reason = self._grants.ask(view, peer, to_stage, now)
        if not reason and peer not in self._why:
            self._why[peer] = self._reason(view, member.stage, to_stage)
        return reason

    def _reason(self, view: View, source: int, target: int) -> str:
        if self._trainer.reign.begun and view.measured:
            there, here = (f"{view.rates[stage]:.3g}" for stage in (target, source))
            return f"stage {target} does {there} samples/s, stage {source} {here}"
        there, here = (str(len(view.members[stage])) for stage in (target, source))
        return f"stage {target} has {there} replicas, stage {source} {here}"

    def ended(self, peer: PeerId) -> None:
        """It does not move after all."""
        self._grants.ended(peer)
        self._why.pop(peer, None)

    def _arrived(self) -> None:
        """Who serves where it was to go is on its way no longer."""
        serving = {
            (m.replica.peer, m.stage)
            for m in self._trainer.roster.all()
            if m.state is State.READY and not m.leaving
        }
        for peer, stage in self._grants.under_way.items():
            if (peer, stage) in serving:
                self.ended(peer)

    def is_on_its_way(self, peer: PeerId) -> bool:
        """It goes on purpose, as has been said."""
        return peer in self._grants.under_way

    def may_wait(self, to_stage: int) -> bool:
        """Whether the step under way can be finished first: not if nobody serves ``to_stage``."""
        trainer = self._trainer
        return any(trainer.roster.ready(to_stage, mark) for mark in trainer.marks)

    def tell(self, member: Member, to_stage: int, *, wait: bool) -> None:
        """Say once for people who moves where, and why."""
        peer = member.replica.peer
        why = self._why.get(peer)
        if not why:
            return
        self._why[peer] = ""
        when = "after this step" if wait else "now"
        self._trainer.on_event(
            f"{peer[-6:]} (stage {member.stage}) moves to stage {to_stage} {when}: {why}"
        )
