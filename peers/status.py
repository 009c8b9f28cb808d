"""What a person sees of a run: the trainer's state as a ``RunView``, a few times a second."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import anyio

from dht.envelope import wall_clock
from peers.balance import settings_of
from peers.board import Curve, Point, document
from peers.report_view import short
from peers.runview import ReplicaView, RunView, StageView
from peers.steps import Heard, StepDone
from peers.trainer import Trainer
from peers.view import LiveView
from swarm.core.evaluation import Evaluation
from swarm.core.rebalancing import Serving, View, choose
from swarm.core.roster import Member, State
from swarm.core.wiring import Load
from swarm.types import PeerId

REFRESH_S = 0.25
LOST_AFTER = 4
"""Failures (a removal is one) after which a replica has no line of its own: about ten seconds."""

EVENTS = 200
"""Of the newest, that are remembered."""

RECENT = 10
"""Steps over which the rate is averaged."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a peer is now. ``serves``: its stage could go on with it alone."""

    stage: int
    serves: bool


class Monitor:
    """Collects events and steps; draws them on ``view`` if there is one.

    ``servers`` run as long as the run is watched: they show it to others. ``listeners`` are told
    of each step.
    """

    def __init__(self, view: LiveView | None = None) -> None:
        self.phase = ""
        self.listeners: list[Callable[[StepDone], None]] = []
        self.servers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._view = view
        self._trainer: Trainer | None = None
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS)
        self.curve = Curve()
        self._losses: deque[float] = deque(maxlen=500)
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._steps = 0
        self._began = 0.0

    def attach(self, trainer: Trainer) -> None:
        self._trainer, self._began = trainer, anyio.current_time()

    @property
    def training(self) -> bool:
        """Whether the first step has begun."""
        return self._steps > 0 or self._working

    @property
    def _working(self) -> bool:
        return self._trainer is not None and self._trainer.work is not None

    @property
    def under_way(self) -> bool:
        """Whether steps are being done."""
        trainer = self._trainer
        return self._working and trainer is not None and trainer.mark.t < trainer.manifest.run.steps

    def members(self) -> dict[PeerId, Seat]:
        """Those that serve or join. Who serves is at the run's mark, or, while a decision is being
        applied, has applied it, and is not about to go."""
        trainer = self._trainer
        if trainer is None:
            return {}
        last = trainer.marks[-1]
        return {
            m.replica.peer: Seat(
                m.stage, m.state is State.READY and m.mark == last and not m.leaving
            )
            for m in trainer.roster.all()
            if m.state in (State.READY, State.JOINING)
        }

    def stage_in_need(
        self, coming: Mapping[PeerId, int], gone: Collection[PeerId], rng: random.Random
    ) -> int:
        """Which stage one more peer is to serve, by the rule that a newcomer goes by.

        ``coming``: peers that will serve a stage, though nobody may know them yet. ``gone``: peers
        that are dead, though the trainer may not have found out.
        """
        trainer = self._trainer
        assert trainer is not None
        view = trainer.moves.expected()
        known = {member.replica.peer for member in trainer.roster.all()}
        known |= {peer.peer for peer in view.peers}
        here = [peer for peer in view.peers if peer.peer not in gone]
        here += [Serving(p, at, settled=False) for p, at in coming.items() if p not in known]
        return choose(View(view.stages, here), None, settings_of(trainer.manifest), rng)

    def event(self, line: str) -> None:
        """Something happened that a person should know."""
        if self._trainer is None and self._view is not None:
            self._view.say(line)  # a standby has no run to draw
            return
        self._events.append((wall_clock(), short(line)))
        self.refresh()

    def step_done(self, done: StepDone) -> None:
        self._steps = done.step + 1
        self._losses.append(done.loss)
        timed = isfinite(done.seconds) and done.seconds > 0
        if timed:
            self._recent.append((done.samples, done.seconds))
        rate = done.samples / done.seconds if timed else None
        self.curve.add(Point(done.step, done.loss, done.eval_loss, rate))
        for tell in self.listeners:
            tell(done)
        self.refresh()

    def document(self) -> dict[str, Any] | None:
        """What the dashboard shows, see ``peers.board``; None: there is nothing yet."""
        if self._trainer is None:
            return None
        batch = self._trainer.manifest.batch
        return document(self.look(), self._events, batch.microbatch * batch.microbatches)

    def refresh(self) -> None:
        if self._view is not None and self._trainer is not None:
            self._view.update(self.look())

    async def run(self) -> None:
        """Until it is cancelled."""
        async with anyio.create_task_group() as tasks:
            for serve in self.servers:
                tasks.start_soon(serve)
            while True:
                self.refresh()
                await anyio.sleep(REFRESH_S)

    def look(self) -> RunView:
        """The run at this moment."""
        trainer = self._trainer
        assert trainer is not None
        manifest, now = trainer.manifest, anyio.current_time()
        seconds = sum(seconds for _, seconds in self._recent)
        samples = sum(samples for samples, _ in self._recent)
        return RunView(
            name=manifest.name,
            run_id=manifest.run_id,
            step=self._steps,
            steps=manifest.run.steps,
            loss=self._losses[-1] if self._losses else None,
            losses=tuple(self._losses),
            samples_per_s=samples / seconds if seconds else 0.0,
            started_s_ago=now - self._began,
            phase=self._phase(trainer),
            stages=tuple(_stage(trainer, stage, now) for stage in range(trainer.stages)),
            events=tuple(text for _, text in list(self._events)[-50:]),
            warnings=self._warnings(trainer),
        )

    def _phase(self, trainer: Trainer) -> str:
        if self.phase != "waiting for replicas":
            return self.phase
        lacks = trainer.lacks
        return f"waiting for replicas: {lacks}" if lacks else "starting"

    def _warnings(self, trainer: Trainer) -> tuple[str, ...]:
        if trainer.work is None:
            return ()
        warnings = []
        for stage in range(trainer.stages):
            ready = [m for m in trainer.roster.all() if m.stage == stage and _serves(m)]
            if not ready:
                patience_s = trainer.manifest.periods.patience_s
                warnings.append(
                    f"stage {stage} has no replica: the run waits for one that was at step "
                    f"{trainer.mark.t}, and goes back to a checkpoint after {patience_s:g} s"
                )
            elif len(ready) == 1 and trainer.manifest.start.replicas > 1:
                warnings.append(f"stage {stage} has one replica left")
        return tuple(warnings)


def _serves(member: Member) -> bool:
    """It takes part, even if it is just applying a decision."""
    return member.state is State.READY


def _stage(trainer: Trainer, stage: int, now: float) -> StageView:
    loads = {load.replica: load for load in trainer.wiring.loads(stage)}
    members = [member for member in trainer.roster.all() if member.stage == stage]
    here = [member for member in members if not _lost(member)]
    total = sum(_counted(trainer, member) for member in here)
    return StageView(
        stage,
        tuple(_replica(trainer, member, loads.get(member.replica), total, now) for member in here),
        tuple(member.replica.peer[-6:] for member in members if _lost(member)),
    )


def _state(trainer: Trainer, member: Member) -> str:
    """In a word."""
    if member.state is not State.READY:
        return str(member.state)
    if member.leaving:
        return "draining"
    late = member.mark != trainer.mark and not isinstance(trainer.work, Evaluation)
    return "applying" if late else "ready"


def _where_to(trainer: Trainer, member: Member) -> str:
    to_stage = trainer.moves.bound_for(member.replica.peer)
    return f"moves to stage {to_stage}" if member.leaving and to_stage is not None else ""


def _lost(member: Member) -> bool:
    """Asked in vain so often that hardly anybody waits for it."""
    gone = (State.REMOVED, State.ANNOUNCED)
    return member.state in gone and member.failures >= LOST_AFTER


def _counted(trainer: Trainer, member: Member) -> int:
    return trainer.heard.get(member.replica, Heard()).counted


def _replica(
    trainer: Trainer, member: Member, load: Load | None, total: int, now: float
) -> ReplicaView:
    heard = trainer.heard.get(member.replica, Heard())
    return ReplicaView(
        name=member.replica.peer[-6:],
        state=_state(trainer, member),
        mark_step=member.mark.t if member.mark is not None else 0,
        share=_counted(trainer, member) / total if total else 0.0,
        mean_time_s=load.service_s if load is not None else None,
        queue=heard.queued,
        note=short(member.note) or _where_to(trainer, member),
        last_work_s_ago=None if heard.last_work is None else now - heard.last_work,
        peer=member.replica.peer,
        address=_address(trainer.addresses.get(member.replica.peer, ())),
        samples_per_s=_speed(trainer, load),
    )


def _speed(trainer: Trainer, load: Load | None) -> float | None:
    if load is None or not load.service_s:
        return None
    return trainer.manifest.batch.microbatch / load.service_s


def _address(addresses: Sequence[str]) -> str:
    """``1.2.3.4:31000`` of the first one; what reads otherwise is left as it is."""
    if not addresses:
        return ""
    words = addresses[0].split("/")
    if len(words) >= 5 and words[1] in ("ip4", "ip6", "dns", "dns4", "dns6"):
        host = f"[{words[2]}]" if words[1] == "ip6" else words[2]
        return f"{host}:{words[4]}"[:64]
    return addresses[0][:64]
