"""How replicas become members: found in the directory, asked, and told where to begin."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from dht.records import PeerRecord, decode_all, stage_key
from peers import messages as msg
from peers.seed import Seed
from swarm.core.roster import Admission, Member, State
from swarm.core.step import Decide
from swarm.errors import BadInput, TransportError
from swarm.types import FRESH, Mark, Replica, Term

if TYPE_CHECKING:
    from dht.directory import Directory
    from peers.trainer import Trainer

log = logging.getLogger("swarm.trainer")


class Admissions:
    """The trainer's dealings with those that are not, or no longer, READY."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._lengths: dict[int, int] = {}
        self._loading: dict[int, Replica] = {}

    # -- who is there -----------------------------------------------------------------------

    async def watch(self, directory: Directory) -> None:
        """Look the stages up in the directory, for ever."""
        manifest = self._trainer.manifest

        async def one(stage: int) -> None:
            key = stage_key(manifest.run_id, stage)
            async for found in directory.watch(key, period_s=manifest.periods.watch_s):
                records, wrong = decode_all(found, key=key)
                for subkey, reason in wrong.items():
                    log.debug("a record of %s is ignored: %s", subkey, reason)
                self.seen(record for record in records if isinstance(record, PeerRecord))

        async with anyio.create_task_group() as tasks:
            for stage in range(manifest.stages.count):
                tasks.start_soon(one, stage)

    def seen(self, records: Iterable[PeerRecord]) -> None:
        """Announcements as they are in the directory now."""
        trainer = self._trainer
        now = anyio.current_time()
        for record in records:
            if not 0 <= record.stage < trainer.stages:
                continue
            trainer.moves.seen(record)
            replica = Replica(record.peer, record.boot)
            for dead in trainer.roster.announced(replica, record.stage, now, record.sequence):
                self.gone(dead, "restarted")
        self._forget_strangers()
        trainer.moves.tidy()
        trainer.wake()

    def _forget_strangers(self) -> None:
        """What is known of those that the roster has forgotten is of no use: peers come and go."""
        trainer = self._trainer
        known = {member.replica for member in trainer.roster.all()}
        peers = {replica.peer for replica in known}
        trainer.heard = {r: heard for r, heard in trainer.heard.items() if r in known}
        trainer.addresses = {p: at for p, at in trainer.addresses.items() if p in peers}
        trainer.moves.forget_all_but(peers)

    def gone(self, replica: Replica, reason: str) -> None:
        """``replica`` will not be heard of again."""
        trainer = self._trainer
        member = trainer.roster.get(replica)
        if member is None:
            return
        if member.state is State.READY and not trainer.moves.is_on_its_way(replica.peer):
            trainer.on_event(f"{replica.peer[-6:]} (stage {member.stage}) {reason}")
        trainer.lose(replica, reason, quietly=True)
        trainer.roster.forget(replica, anyio.current_time())

    # -- where are you? ---------------------------------------------------------------------

    def ask(self) -> None:
        """Ask all that are due."""
        trainer = self._trainer
        if not trainer.settled:
            return
        for member in trainer.roster.to_ask(anyio.current_time(), *trainer.marks):
            trainer.tasks.start_soon(self._attempt, member.replica, self._ask)

    async def _attempt(self, replica: Replica, deal: Callable[[Replica], Awaitable[None]]) -> None:
        """``deal`` with a replica; where that fails, it is asked again after a while."""
        trainer = self._trainer
        try:
            await deal(replica)
        except (TransportError, BadInput) as error:
            trainer.roster.unanswered(replica, str(error), anyio.current_time(), trainer.rng)
        trainer.wake()

    async def _ask(self, replica: Replica) -> None:
        trainer = self._trainer
        question = msg.Question(run=trainer.manifest.run_id, detail=True)
        answer = (await trainer.caller.call(replica.peer, question)).message
        if not isinstance(answer, msg.Status):
            raise BadInput(f"answered {answer.kind} to a question")
        if answer.boot != replica.boot:
            self.gone(replica, "restarted")
            return
        await self._answered(replica, answer)

    def ready(self, replica: Replica, mark: Mark) -> None:
        """``replica`` says that it has the whole state at ``mark``: admit it, or ask it again."""
        trainer, now = self._trainer, anyio.current_time()
        member = trainer.roster.get(replica)
        if member is None or not trainer.settled:
            return
        if member.asking or mark != trainer.mark or trainer.standing is not None:
            trainer.roster.ask_soon(replica, now)
            return
        member.asking = True
        trainer.tasks.start_soon(self._attempt, replica, partial(self._admit, begin=False))

    async def _answered(self, replica: Replica, answer: msg.Status) -> None:
        trainer = self._trainer
        if Term(answer.term, answer.term_boot) > trainer.term:
            trainer.reign.outranked(replica, answer.term)
        member = trainer.roster.get(replica)
        if member is not None:
            self.learnt(member.stage, answer.values)
        if answer.detail is not None:
            trainer.addresses[replica.peer] = tuple(answer.detail.addresses)
        stands = trainer.standing
        if stands is not None and answer.mark == stands.to:
            trainer.instructions.applied(replica, stands)
            return
        decision = stands or trainer.last_decision
        if decision is not None and answer.mark == decision.mark and self._may_follow(replica):
            # It may hold the sum that the decision names: a reset would throw it away.
            await trainer.instructions.decide(Decide(replica, decision))
            return
        now = anyio.current_time()
        if stands is not None and answer.mark == stands.mark:
            # It cannot follow, and to begin again at a mark that is being left would be in vain.
            periods = trainer.manifest.periods
            trainer.roster.behind(replica, answer.mark, now + periods.watch_s)
            return
        match trainer.roster.answered(replica, answer.mark, trainer.mark, now, trainer.rng):
            case Admission.BEGIN:
                await self._admit(replica, begin=True)
            case Admission.RESET:
                await self._admit(replica, begin=False)
            case Admission.JOIN:
                if trainer.mark == FRESH and answer.mark is not None:
                    trainer.reign.found_at = answer.mark
                await self._join(replica)

    async def _join(self, replica: Replica) -> None:
        """Tell it where the state of its stage can be had, if anywhere."""
        trainer = self._trainer
        member = trainer.roster.get(replica)
        assert member is not None
        mates = [r for r in trainer.ready(member.stage) if r != replica]
        message: msg.Message
        head: dict[str, Any] = {
            "run": trainer.manifest.run_id,
            "to": replica.boot,
            "stamp": trainer.stamps.take(),
        }
        if mates:
            message = msg.Join(**head, mark=trainer.mark, members=mates)
        elif trainer.seed is not None and self._may_load(member):
            message = self._load(head, trainer.seed, member)
        else:
            return
        answer = (await trainer.caller.call(replica.peer, message)).message
        trainer.reign.refused(replica, answer)
        if not isinstance(answer, msg.At):
            raise BadInput(getattr(answer, "reason", answer.kind))
        if member.state is not State.JOINING:
            what = "joins" if mates else "loads the checkpoint for"
            trainer.on_event(f"{replica.peer[-6:]} {what} stage {member.stage}")
        trainer.roster.joining(replica, "copies the state of its stage")

    def _may_load(self, member: Member) -> bool:
        """One replica of a stage loads the checkpoint; the others copy from it then.

        Where replicas keep the only copies, it is one of them, since the others hold no weights.
        """
        roster = self._trainer.roster
        loading = self._loading.get(member.stage)
        other = None if loading in (None, member.replica) else roster.get(loading)
        if other is not None and other.state is State.JOINING:
            return False
        self._loading[member.stage] = member.replica
        return True

    def _load(self, head: dict[str, Any], seed: Seed, member: Member) -> msg.Load:
        trainer = self._trainer
        holders = [r for r in seed.holders.get(member.stage, ()) if r != member.replica]
        return msg.Load(
            **head,
            mark=trainer.mark,
            copies=seed.copies,
            sources=[*holders, *([trainer.me] if seed.source is not None else [])],
            applied=seed.applied,
            totals=msg.plain(seed.totals),
        )

    def _may_follow(self, replica: Replica) -> bool:
        """Whether it has not been found unable to follow yet."""
        member = self._trainer.roster.get(replica)
        return member is not None and member.state is not State.BEHIND

    async def _admit(self, replica: Replica, *, begin: bool) -> None:
        trainer = self._trainer
        mark = trainer.mark
        message = self._reset(replica, begin=begin)
        answer = (await trainer.caller.call(replica.peer, message)).message
        trainer.reign.refused(replica, answer)
        if not isinstance(answer, msg.At):
            raise BadInput(getattr(answer, "reason", answer.kind))
        member = trainer.roster.get(replica)
        # Once the step is decided it could only be told what it cannot apply.
        went_on = trainer.mark != mark or trainer.standing is not None
        if member is None or answer.mark != mark or went_on:
            raise BadInput("the run went on meanwhile")
        trainer.roster.admitted(replica, mark)
        trainer.reign.obeyed(replica)
        for work in trainer.works:
            work.admitted(replica, stage=member.stage)
        trainer.on_event(f"{replica.peer[-6:]} serves stage {member.stage} at step {mark.t}")

    def _reset(self, replica: Replica, *, begin: bool) -> msg.Reset:
        trainer = self._trainer
        return msg.Reset(
            run=trainer.manifest.run_id,
            to=replica.boot,
            stamp=trainer.stamps.take(),
            mark=trainer.mark,
            begin=begin,
        )

    # -- what is known of a stage -----------------------------------------------------------

    def learnt(self, stage: int, values: int) -> None:
        """A replica says how many values the gradient of ``stage`` has."""
        self._lengths[stage] = values

    def averaging_s(self, stage: int) -> float:
        """How long averaging a stage may take on the slowest link that is allowed for."""
        wire = 8 if self._trainer.manifest.reproducible.enabled else 4
        return 2 * wire * self._lengths.get(stage, 0) / self._trainer.caller.BYTES_PER_S

    def values(self, stage: int) -> int:
        """How many values the stage's gradient has, by its replicas' word."""
        return self._lengths.get(stage, 0)
