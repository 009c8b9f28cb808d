"""Carries out a schedule of faults in a realm on virtual time, under audit."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any

import anyio

from dht.memory import MemoryDirectoryStore
from peers.leading import Start
from peers.memory import MemoryNetwork
from peers.steps import StepDone
from peers.trainer import Trainer
from swarm.core.rebalancing import Need
from swarm.manifest import Manifest
from swarm.types import PeerId
from tests.chaos.audit_realm import RealmAudit
from tests.chaos.eye import MOST, ChaosTransport, Eye, SkewedStore
from tests.chaos.harness import (
    POINTS,
    TINY,
    Peer,
    digits_manifest,
    identity,
    reference,
    run_on_virtual_time,
)
from tests.chaos.realm import MemoryCheckpoints, Realm, Seat
from tests.chaos.schedule import Schedule

LIMIT_S = 240.0
"""Of virtual time: all faults are over long before."""

REST_S = 120.0
"""So long may it take after the last fault until every node that lives is a member."""

NEEDS = (Need(1.0), Need(1.0))
"""What the stages take, for schedules in which nodes move."""

TRAINERS = 3
PACES = (1.0, 1.0, 1.7, 4.0)


@functools.lru_cache(maxsize=64)
def manifest_of(
    *,
    counting: bool,
    steps: int,
    replicas: int,
    checkpoint_every: int = 0,
    tight: bool = False,
    moves: bool = False,
    delay: bool = False,
    delay_after: int = 0,
) -> Manifest:
    changes: dict[str, object] = {
        "model__kind": TINY,
        "data__source": f"python:{POINTS}",
        "batch__microbatch": 2,
        "batch__microbatches": 4,
        "reproducible__enabled": not counting,
        "limits__state_piece": 16,
        "run__steps": steps,
        "step__delay": int(delay),
        "step__delay_after": delay_after,
        "run__checkpoint_every": checkpoint_every,
        "start__replicas": replicas,
        "trainers": [identity(number + 1).peer_id for number in range(TRAINERS)],
        # All that has a period is quick, so that a run that waits costs little.
        "periods__lease_s": 3.0,
        "periods__patience_s": 12.0,
        "periods__renew_s": 1.0,
        "periods__announce_s": 2.0,
        "periods__record_ttl_s": 6.0,
        "periods__watch_s": 1.0,
        "periods__call_s": 2.0,
        "periods__attempt_s": 2.0,
        "periods__silence_s": 2.0,
        "periods__ban_s": 0.5,
        "periods__drain_s": 10.0,
    }
    if moves:
        changes |= {"rebalancing__period_s": 0.4, "periods__announce_s": 0.5}
        changes |= {"periods__watch_s": 0.3, "start__replicas": 1}
    if tight:
        changes |= {"limits__queue": 1, "limits__contexts": 2, "limits__graphs": 1}
    return digits_manifest(**changes)


@functools.lru_cache(maxsize=16)
def expected(steps: int, delay: bool, delay_after: int) -> tuple[str, list[float]]:
    """SHA-256 of the final weights, and the losses, of the run in one process."""
    manifest = manifest_of(
        counting=False, steps=steps, replicas=1, delay=delay, delay_after=delay_after
    )
    run = reference(manifest, steps)
    return run.sha256, [result.loss for result in run.results]


class ChaosSeat(Seat):
    """A trainer's process under audit."""

    realm: ChaosRealm

    def leads(self, trainer: Trainer) -> None:
        super().leads(trainer)
        self.realm.audit.leads(trainer)
        self.realm.led.append((anyio.current_time(), self.name, trainer.term))

    def step_done(self, trainer: Trainer, done: StepDone) -> None:
        super().step_done(trainer, done)
        schedule = self.realm.schedule
        if not schedule.counting:
            losses = expected(schedule.steps, schedule.delay, schedule.delay_after)[1]
            self.realm.audit.losses(done, losses)

    async def complete(self, trainer: Trainer) -> None:
        """The replicas are still there; the run is over when those that live are all members."""
        await self.realm.come_to_rest(self, trainer)


@dataclass
class ChaosRealm(Realm):
    """A realm with a schedule. ``busy`` counts the faults that are not over yet."""

    schedule: Schedule = field(kw_only=True)
    audit: RealmAudit = field(init=False)
    failed: list[str] = field(default_factory=list)
    led: list[tuple[float, int, object]] = field(default_factory=list)
    busy: int = 0
    resting: bool = False

    def seat(self, start: Start = Start.FRESH, *, key: int = 1, disk: Any = None) -> Seat:
        if disk is None and self.schedule.checkpoint_every:
            disk = MemoryCheckpoints()
        seat = super().seat(start, key=key, disk=disk)
        seat.__class__ = ChaosSeat
        seat.transport.__class__ = ChaosTransport
        return seat

    async def node(self, stage: int, *, key: int | None = None) -> Peer:
        pace = PACES[random.Random(self.seed * 31 + self.started).randrange(len(PACES))]
        peer = await self.start(stage, unit_s=0.01 * pace, key=key, may_fail=self.failed)
        peer.transport.__class__ = ChaosTransport
        return peer

    def living(self, stage: int) -> list[Peer]:
        return [peer for peer in self.of_stage(stage) if lives(peer)]

    # -- the end ----------------------------------------------------------------------------

    async def come_to_rest(self, seat: Seat, trainer: Trainer) -> None:
        """Wait until each node that lives is READY at the run's mark."""
        self.resting = True
        give_up = anyio.current_time() + REST_S
        outranked = False
        while True:
            if self.finished.is_set():
                return
            if self._leads_another(trainer):  # its end counts, unless it dies before that
                outranked = True
                await anyio.sleep(0.25)
                continue
            if outranked:  # the others still obey the one that died, and this run is over
                self.finished.set()
                return
            trainer.admissions.ask()
            astray = self._astray(trainer)
            if self.busy == 0 and not astray:
                break
            if self.busy:
                give_up = anyio.current_time() + REST_S
            if anyio.current_time() > give_up:
                self.audit.found("no rest: " + "; ".join(astray))
                break
            await anyio.sleep(0.25)
        self.audit.complete(trainer)
        if any(self._is_lost(stage, trainer) for stage in range(trainer.stages)):
            self.finished.set()
            return
        try:
            self.complete(trainer)
        except AssertionError as error:
            self.audit.found(str(error))
            self.finished.set()

    def _leads_another(self, trainer: Trainer) -> bool:
        leading = self.leading()
        other = None if leading is None or leading.leader is None else leading.leader.trainer
        return other is not None and other is not trainer and other.term > trainer.term

    def _is_lost(self, stage: int, trainer: Trainer) -> bool:
        """All its replicas have died since the last step: the run ends without it."""
        return not any(peer.stage.mark == trainer.mark for peer in self.living(stage))

    def _astray(self, trainer: Trainer) -> list[str]:
        """Nodes that live, and are no members."""
        found = []
        for stage in range(self.manifest.stages.count):
            ready = set(trainer.ready(stage))
            if self._is_lost(stage, trainer):
                continue
            for peer in self.living(stage):
                if peer.node.me not in ready and not peer.node.server.draining:  # type: ignore[union-attr]
                    member = trainer.roster.get(peer.node.me)
                    state = "unknown" if member is None else f"{member.state} ({member.note})"
                    found.append(f"a node of stage {stage} is {state}")
        return found


def lives(peer: Peer) -> bool:
    server = peer.node.server
    gone = server is None or server.orders.finished.is_set()
    return not gone and not peer.scope.cancel_called


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went. ``problems`` empty: well. ``digest`` is equal for equal runs."""

    schedule: Schedule
    problems: tuple[str, ...]
    digest: str
    messages: int
    seconds: float
    befell: tuple[str, ...]
    events: tuple[str, ...]


def run(schedule: Schedule) -> Outcome:
    """Carry ``schedule`` out, in a fresh realm."""
    from tests.chaos.violence import Violence

    manifest = manifest_of(
        counting=schedule.counting,
        steps=schedule.steps,
        replicas=schedule.replicas,
        checkpoint_every=schedule.checkpoint_every,
        tight=schedule.tight,
        moves=schedule.moves,
        delay=schedule.delay,
        delay_after=schedule.delay_after,
    )
    eye = Eye(random.Random(schedule.seed + 1))
    kept: list[ChaosRealm] = []
    befell: list[str] = []
    ended: list[float] = []

    async def main() -> None:
        async with MemoryNetwork() as network, eye, anyio.create_task_group() as tasks:
            realm = ChaosRealm(
                manifest, network, _store(schedule), eye, tasks, schedule.seed, schedule=schedule
            )
            if schedule.moves:
                realm.needs = NEEDS
            realm.audit = RealmAudit(realm, counting=schedule.counting)
            kept.append(realm)
            violence = Violence(realm, eye, befell)
            with anyio.move_on_after(LIMIT_S) as limit:
                eye.too_many = limit.cancel
                await _live(realm, violence)
            if limit.cancelled_caught:
                endless = eye.messages > MOST
                realm.audit.found(f"more than {MOST} messages" if endless else "stuck")
            ended.append(anyio.current_time())
            tasks.cancel_scope.cancel()

    crashes: list[str] = []
    try:
        run_on_virtual_time(main, schedule.seed)
    except* Exception as errors:  # noqa: BLE001 (whatever it is, the seed has found it)
        crashes += [f"crash: {error!r}" for error in leaves(errors)]
    problems = [*crashes, *(_verdict(kept[0]) if kept else [])]
    return Outcome(
        schedule=schedule,
        problems=tuple(problems),
        digest=eye.digest.hexdigest(),
        messages=eye.messages,
        seconds=ended[0] if ended else float("nan"),
        befell=tuple(befell),
        events=tuple(kept[0].events) if kept else (),
    )


async def _live(realm: ChaosRealm, violence: Any) -> None:
    schedule = realm.schedule
    for fault in schedule.faults:
        violence.expect(fault)
    realm.seat()
    for number in range(schedule.standbys):
        realm.seat(Start.STANDBY, key=2 + number)
    for stage in _first_stages(schedule, realm.manifest.stages.count):
        await realm.node(stage)
    await realm.finished.wait()


def _first_stages(schedule: Schedule, stages: int) -> list[int]:
    """Where the first nodes begin: where they move, in no good order."""
    if not schedule.moves:
        return list(range(stages)) * schedule.replicas
    rng = random.Random(schedule.seed + 3)
    return [rng.randrange(stages) for _ in range(stages * schedule.replicas)]


def _store(schedule: Schedule) -> MemoryDirectoryStore:
    if not schedule.skew:
        return MemoryDirectoryStore(schedule.staleness_s)
    skews: dict[PeerId, float] = {}
    rng = random.Random(schedule.seed + 2)

    def skew(peer: PeerId) -> float:
        return skews.setdefault(peer, rng.choice([0.0, rng.uniform(-600, 600)]))

    return SkewedStore(schedule.staleness_s, skew)


def _verdict(realm: ChaosRealm) -> list[str]:
    schedule, audit = realm.schedule, realm.audit
    if realm.weights and not schedule.counting:
        sha256, _ = expected(schedule.steps, schedule.delay, schedule.delay_after)
        if realm.weights != sha256:
            audit.found("the final weights are not those of the reference")
    takeovers = {(seat, term) for _, seat, term in realm.led if seat != 1}
    if takeovers and schedule.spares_trainers:
        audit.found("a standby took over from a live trainer")
    return list(dict.fromkeys(audit.problems))


def leaves(errors: BaseExceptionGroup[Any]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in errors.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
