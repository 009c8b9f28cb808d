"""One who can lead a run: stands by, takes over, trains, and steps back when another leads."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from dht.records import RunRecord, TrainerRecord, TrainerState, encode
from peers import messages as msg
from peers.checkpoints import Checkpoint, CheckpointStore
from peers.entering import Entered
from peers.executor import Blocking, in_thread
from peers.keeping import Files, Keeper
from peers.lookout import Lookout
from peers.reign import RunGoesOn, StageLost, Superseded
from peers.rpc import Caller
from peers.seed import Seed
from peers.standby import RunOver, StandbyInbox, led_by_another, next_term, stand_by
from peers.steps import StepDone, told_of
from peers.takeover import settle
from peers.trainer import Trainer
from swarm.core.rebalancing import Need
from swarm.data import Batches
from swarm.errors import SwarmError, UserError
from swarm.manifest import Manifest
from swarm.types import FRESH, Mark, Replica, Term

log = logging.getLogger("swarm.coordinator")


class Start(StrEnum):
    """FRESH: the run begins here, unless it is found to go on already. STANDBY: another leads.
    RESUME: its trainer is gone, perhaps all its nodes too."""

    FRESH = "fresh"
    STANDBY = "standby"
    RESUME = "resume"


class Audience(Protocol):
    """Who is told how a run goes."""

    def event(self, line: str) -> None:
        """Something happened that a person should know."""

    def phase(self, text: str) -> None:
        """What is going on, if not steps."""

    def leads(self, trainer: Trainer) -> None:
        """This process leads the run from now on; it is at ``trainer.mark``."""

    def step_done(self, trainer: Trainer, done: StepDone) -> None: ...

    async def complete(self, trainer: Trainer) -> None:
        """All steps are done; the replicas are still there."""


class Leader:
    """Leads ``manifest``'s run to its end, or watches over whoever does.

    Args:
        store: where checkpoints are kept; None: there are none.

    ``needs``: what each stage takes, to judge who may move; None: all the same.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        swarm: Entered,
        batches: Batches,
        rng: random.Random,
        store: CheckpointStore | None,
        audience: Audience,
        blocking: Blocking = in_thread,
    ) -> None:
        self.manifest = manifest
        self.trainer: Trainer | None = None
        self.needs: Sequence[Need] | None = None
        self.complete = False
        self._swarm, self._batches, self._rng = swarm, batches, rng
        self._store, self._audience, self._blocking = store, audience, blocking
        self._caller = Caller(swarm.transport, timeout_s=manifest.periods.call_s)
        self._lookout = Lookout(manifest, self._caller, swarm.directory)
        self._state = TrainerState.WAITING
        self._changed = anyio.Event()
        self._waited = False
        self._used = 0  # the highest number that this process has reigned under

    @property
    def me(self) -> str:
        return self._swarm.identity.peer_id

    async def run(self, start: Start) -> None:
        """Until the run is complete, here or elsewhere."""
        async with anyio.create_task_group() as tasks:
            await self._announce()
            tasks.start_soon(self._announce_for_ever)
            term = await self._begin(start)
            while term is not None:
                term = await self._reign(start, term)
                start = Start.STANDBY
            tasks.cancel_scope.cancel()

    async def _begin(self, start: Start) -> int | None:
        """The number of the first reign; None if the run is over."""
        if start is Start.STANDBY:
            return await self._stand_by()
        sight = await self._lookout.look()
        other = led_by_another(sight, self.manifest, self.me)
        if other is None:
            return next_term(sight)
        self._audience.event(f"{other[-6:]} leads this run already: standing by")
        return await self._stand_by()

    # -- standing by ------------------------------------------------------------------------

    async def _stand_by(self) -> int | None:
        """The number of the reign to take; None if the run is over."""
        self._turn(TrainerState.STANDBY)
        self._audience.phase("standing by")
        inbox = StandbyInbox(self.manifest, self._swarm.boot)
        await self._swarm.transport.serve(inbox.handle)
        async with anyio.create_task_group() as tasks:
            keeper = self._keeper(tasks)
            outcome = await stand_by(
                self.manifest,
                self._lookout,
                me=self.me,
                look=(lambda sight: None) if keeper is None else keeper.saw,
                say=self._audience.event,
            )
            tasks.cancel_scope.cancel()
        if isinstance(outcome, RunOver):
            self._audience.event(f"{outcome.peer[-6:]} has brought the run to its end")
            return None
        self._audience.event(f"taking over (term {outcome.term}): {outcome.reason}")
        self._waited = outcome.waited
        return outcome.term

    def _keeper(self, tasks: TaskGroup) -> Keeper | None:
        if self._store is None or not self.manifest.run.checkpoint_every:
            return None
        return Keeper(
            self.manifest,
            self._caller,
            self._store,
            tasks=tasks,
            say=self._audience.event,
            blocking=self._blocking,
        )

    # -- leading ----------------------------------------------------------------------------

    async def _reign(self, start: Start, term: int) -> int | None:
        """Lead until it is over (None), or another reign has to begin (its number)."""
        ended: SwarmError | None = None
        # A number that was used here, though no replica may have heard of it, is never used again:
        # stamps are counted from 1 in each reign.
        term = max(term, self._used + 1)
        async with anyio.create_task_group() as tasks:
            trainer = self.trainer = self._trainer(tasks, term)
            try:
                await self._lead(trainer, tasks, start)
            except (Superseded, StageLost, RunGoesOn) as error:
                ended = error
            tasks.cancel_scope.cancel()
        self._used = trainer.term.number
        self.trainer = None
        match ended:
            case None:
                return None
            case Superseded():
                self._audience.event(f"{ended}: standing by")
                return await self._stand_by()
            case RunGoesOn():
                self._audience.event(str(ended))
                return await self._begin(Start.RESUME)
            case StageLost():
                self._audience.event(f"{ended} for {self.manifest.periods.patience_s:.0f} s")
                self._waited = True
        return 1 + self._used

    def _trainer(self, tasks: TaskGroup, term: int) -> Trainer:
        trainer = Trainer(
            self.manifest,
            caller=self._caller,
            batches=self._batches,
            term=Term(term, self._swarm.boot),
            tasks=tasks,
            rng=self._rng,
            on_event=self._audience.event,
            blocking=self._blocking,
        )
        if self.needs is not None:
            trainer.moves.needs = self.needs
        return trainer

    async def _lead(self, trainer: Trainer, tasks: TaskGroup, start: Start) -> None:
        self._turn(TrainerState.WAITING)
        self._audience.leads(trainer)
        self._audience.phase("looking for the run's replicas")
        await self._swarm.transport.serve(trainer.inbox.handle)
        tasks.start_soon(trainer.contact.renew_for_ever)
        await settle(
            trainer,
            self._lookout,
            fresh=start is Start.FRESH,
            patience_s=self._settle_s(start),
            seed=self._seed,
            say=self._audience.event,
        )
        self._waited = False
        if trainer.mark != FRESH:
            self._audience.event(f"the run goes on from step {trainer.mark.t}")
        self._audience.leads(trainer)
        if trainer.last_decision is not None:
            self._audience.step_done(trainer, told_of(trainer.last_decision, self.manifest.batch))
        tasks.start_soon(trainer.admissions.watch, self._swarm.directory)
        await self._steps(trainer, self._keeper(tasks))
        await self._audience.complete(trainer)
        self.complete = True
        self._turn(TrainerState.DONE)
        await self._announce()
        await trainer.contact.finish("the run is complete")

    def _settle_s(self, start: Start) -> float:
        """How long replicas may take to show up before the run goes back to a checkpoint."""
        periods = self.manifest.periods
        if self._waited:
            return periods.call_s
        return periods.lease_s if start is Start.RESUME else periods.patience_s

    async def _steps(self, trainer: Trainer, keeper: Keeper | None) -> None:
        run, audience = self.manifest.run, self._audience
        audience.phase("waiting for replicas")
        await trainer.wait_for_start()
        audience.phase("")
        self._turn(TrainerState.TRAINING)
        while trainer.mark.t < run.steps:
            done = await trainer.step()
            if keeper is not None and trainer.mark.t % run.checkpoint_every == 0:
                keeper.keep(trainer)
            if run.eval_every and self._is_eval_due(trainer.mark.t):
                audience.phase("evaluating")
                eval_loss = await trainer.evaluate(run.eval_microbatches)
                audience.phase("")
                done = replace(done, eval_loss=eval_loss)
            audience.step_done(trainer, done)

    def _is_eval_due(self, t: int) -> bool:
        run = self.manifest.run
        return t % run.eval_every == 0 or t == run.steps

    # -- going back -------------------------------------------------------------------------

    async def _seed(self, held: Mapping[Replica, msg.Held]) -> Seed:
        """The newest checkpoint: our own, or one that replicas keep; else the beginning."""
        seeds = [await self._blocking(self._own_seed), kept_seed(held, self.manifest.stages.count)]
        beginning = Seed(FRESH, 0, self._no_totals(), None)
        seed = max((s for s in seeds if s is not None), key=lambda s: s.copies, default=beginning)
        fresh = seed.copies == FRESH
        what = "its beginning" if fresh else f"the checkpoint of step {seed.copies.t}"
        self._audience.event(f"no step can be reached by all stages: the run goes back to {what}")
        return seed

    def _no_totals(self) -> tuple[dict[str, int], ...]:
        return tuple({} for _ in range(self.manifest.stages.count))

    def _own_seed(self) -> Seed | None:
        """The newest of our own that is whole in every file. Blocks."""
        if self._store is None:
            return None
        for checkpoint in self._all_checkpoints(self._store):
            files = Files(self._store, checkpoint)
            try:
                for stage in range(self.manifest.stages.count):
                    files(stage)
            except (SwarmError, IndexError) as error:
                files.close()
                self._audience.event(
                    f"the checkpoint of step {checkpoint.mark.t} is of no use: {error}"
                )
                continue
            return Seed(checkpoint.mark, checkpoint.applied, checkpoint.totals, files)
        return None

    def _all_checkpoints(self, store: CheckpointStore) -> list[Checkpoint]:
        """Newest first."""
        try:
            return list(reversed(store.all()))
        except SwarmError as error:
            self._audience.event(str(error))
            return []

    # -- the directory ----------------------------------------------------------------------

    def _turn(self, state: TrainerState) -> None:
        if state is not self._state:
            self._state = state
            self._changed.set()

    async def _announce_for_ever(self) -> None:
        while True:
            self._changed = anyio.Event()
            with anyio.move_on_after(self.manifest.periods.announce_s):
                await self._changed.wait()
            if not await self._announce():
                log.warning("nobody stored the run's announcement; trying again")

    async def _announce(self) -> bool:
        """The run, so that others find it, and what we are to it."""
        swarm, run_id = self._swarm, self.manifest.run_id
        ttl_s = self.manifest.periods.record_ttl_s
        trainer = self.trainer
        run = RunRecord(peer=self.me, run_id=run_id, manifest=self.manifest.canonical())
        reign = TrainerRecord(
            peer=self.me,
            run_id=run_id,
            boot=swarm.boot,
            term=0 if trainer is None else trainer.term.number,
            state=self._state,
            step=0 if trainer is None else trainer.mark.t,
        )
        stored = True
        for record in (run, reign):
            value = encode(record, swarm.identity, ttl_s=ttl_s)
            stored &= await swarm.directory.announce(record.key, self.me, value, ttl_s=ttl_s)
        return stored


def kept_seed(held: Mapping[Replica, msg.Held], stages: int) -> Seed | None:
    """The newest checkpoint of which replicas of every stage keep a copy."""
    holders: dict[Mark, dict[int, list[Replica]]] = {}
    for replica, answer in sorted(held.items()):
        if answer.kept is not None and len(answer.kept_totals) == stages:
            holders.setdefault(answer.kept, {}).setdefault(answer.stage, []).append(replica)
    whole = [mark for mark, by_stage in holders.items() if len(by_stage) == stages]
    if not whole:
        return None
    mark = max(whole)
    label = held[holders[mark][0][0]]
    return Seed(mark, label.kept_applied, tuple(label.kept_totals), None, holders[mark])


def check_may_lead(manifest: Manifest, peer: str, key: object) -> None:
    """Raises UserError: the key is not one of the manifest's trainers."""
    if peer not in manifest.trainers:
        raise UserError(
            f"{key} ({peer}) is not among the run's trainers; give the right key with --identity, "
            f"or start the run with --trainer {peer}"
        )
