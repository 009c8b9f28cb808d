"""The audit of a chaos run: section by section what must never happen, looked for all the time.

Names are compared by what they are made of, not by their own ``==``: so a rule that is switched
off in the code under test is not switched off here.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from blake3 import blake3

from peers import messages as msg
from peers.averaging import Averager, cut_pieces
from peers.steps import StepDone
from peers.trainer import Trainer
from swarm.core.flight import COUNTED
from swarm.core.intake import Intake, Job, Kind, Reply
from swarm.core.ledger import Ledger
from swarm.core.step import Decision
from swarm.core.totals import Totals
from swarm.core.update import Update
from swarm.types import FRESH, Attempt, Mark, Replica, Stamp, Term
from tests.chaos.audit import Audit, AuditedStage
from tests.chaos.harness import Nodes, Peer

Name = tuple[Any, ...]

MOST_MEMBERS = 8
"""Of a stage, in any schedule."""


def name(of: Term | Mark | Stamp | None) -> Name:
    """What it is made of."""
    match of:
        case None:
            return ()
        case Term():
            return (of.number, of.boot)
        case Mark():
            return (*name(of.term), of.t)
        case Stamp():
            return (*name(of.term), of.n)


def digests(total: torch.Tensor) -> set[str]:
    """Of a sum, for any number of members that it may have been cut among."""
    found = set()
    for members in range(1, MOST_MEMBERS + 1):
        pieces = [total[piece].numpy().tobytes() for piece in cut_pieces(len(total), members)]
        parts = b"".join(blake3(piece).digest() for piece in pieces)
        found.add(blake3(parts).hexdigest())
    return found


class ChaosStage(AuditedStage):
    """A replica's stage under audit."""

    audit: RealmAudit
    deciding = False

    def prepare(self, stamp: Stamp, expected: frozenset[int]) -> bool:
        takes_part = super().prepare(stamp, expected)
        self.audit.check_buffers(self)
        return takes_part

    def decide(self, decision: Decision) -> Mark | None:
        before, total = self.mark, self._total
        total = None if total is None else total.clone()
        self.deciding = True
        try:
            after = super(AuditedStage, self).decide(decision)
        finally:
            self.deciding = False
        self.audit.decided(decision)
        if name(after) != name(before):
            self.audit.stepped(self, before, decision, total)
        self.audit.check_buffers(self)
        return after

    def arrive(
        self, mark: Mark, applied: int, totals: Totals, *, before: Mark | None = None
    ) -> None:
        super().arrive(mark, applied, totals, before=before)
        if not self.deciding:
            self.audit.copied(self)
        self.audit.at_mark(self)

    def begin(self) -> None:
        super().begin()
        self.audit.at_mark(self)

    def _count(self, attempt: Attempt) -> str:
        verdict = super()._count(attempt)
        if verdict == COUNTED:
            self.audit.counted(self, attempt)
        return verdict


class ChaosLedger(Ledger):
    """Remembers by itself what it was told of the bar."""

    obeyed: Name = ()

    def raise_bar(self, stamp: Stamp) -> None:
        super().raise_bar(stamp)
        self.obeyed = max(self.obeyed, name(stamp))


class ChaosIntake(Intake):
    """A queue whose bounds are looked at."""

    audit: RealmAudit

    def offer(self, job: Job, tries: int, now: float) -> Reply:
        reply = super().offer(job, tries, now)
        forwards = sum(kind is Kind.FORWARD for kind, _ in self._waiting)
        if forwards > self._queue_bound or self.held > self._context_bound:
            self.audit.found(f"stage {self._stage}: {forwards} wait, {self.held} contexts")
        return reply

    def adopt(self, term: Term) -> bool:
        before = self.term
        adopted = super().adopt(term)
        if name(self.term) < name(before):
            self.audit.found(f"a term fell from {before} to {self.term}")
        return adopted


class ChaosAverager(Averager):
    """Takes note if anything of another round is taken."""

    audit: RealmAudit

    async def part(self, message: msg.Part, payload: list[memoryview]) -> msg.Message:
        key, before = (message.piece, message.sender), set(self._parts)
        answer = await super().part(message, payload)
        self._check(message, isinstance(answer, msg.Ok) and key in set(self._parts) - before)
        if self._round is not None:
            most = len(self._pieces) * len(self._round.members)
            if len(self._parts) > most:
                self.audit.found(f"{len(self._parts)} parts are kept, at most {most} are wanted")
        return answer

    async def sum(self, message: msg.Sum, payload: list[memoryview]) -> msg.Message:
        round_ = self._round
        wanted = round_ is not None and round_.wants_sum(message.piece)
        answer = await super().sum(message, payload)
        self._check(message, isinstance(answer, msg.Ok) and wanted and self._round is round_)
        return answer

    def _check(self, message: msg.Part | msg.Sum, taken: bool) -> None:
        round_ = self._round
        if taken and round_ is not None and name(message.round) != name(round_.stamp):
            self.audit.found(f"a {message.kind} of another round was taken")


class RealmAudit(Audit):
    """Books over a whole realm. ``problems`` has each kind of finding once."""

    def __init__(self, realm: Nodes, *, counting: bool) -> None:
        super().__init__(realm, counting=counting)  # type: ignore[arg-type]
        self.realm = realm
        self.skips = 0
        self._decisions: dict[Name, tuple[Name, str]] = {}
        self._starts = {name(FRESH)}
        self._counted: dict[tuple[int, Name], Replica] = {}
        self._bits: dict[tuple[int, Name], bytes] = {}
        self._trainers: list[Trainer] = []

    def found(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def watch(self, peer: Peer) -> None:
        assert peer.node.server is not None
        server, stage = peer.node.server, peer.stage
        audited: list[tuple[Any, type]] = [
            (stage, ChaosStage),
            *((ledger, ChaosLedger) for ledger in stage._ledgers),
            (server.passes.intake, ChaosIntake),
            (server.averager, ChaosAverager),
        ]
        for thing, cls in audited:
            thing.__class__ = cls
            thing.audit = self
        stage.replica = peer.node.me  # type: ignore[attr-defined]

    # -- counts -----------------------------------------------------------------------------

    def counted(self, stage: ChaosStage, attempt: Attempt) -> None:
        where = f"stage {stage.stage}, microbatch {attempt.m}"
        ledger = stage._ledger(attempt)
        assert isinstance(ledger, ChaosLedger)
        if name(attempt.stamp) <= ledger.obeyed:
            self.found(f"{where}: counted below the bar")
        names = {(name(stage.mark), ledger is stage.ahead)}
        if ledger is not stage.ahead and stage.before is not None:
            names.add((name(stage.before), True))
        if (name(attempt.mark), attempt.ahead) not in names:
            self.found(f"{where}: counted at another mark")
        first = self._counted.setdefault((stage.stage, name(attempt.stamp)), stage.replica)
        if first != stage.replica:
            self.found(f"{where}: one attempt was counted by two replicas")

    def check_buffers(self, stage: ChaosStage) -> None:
        """Two sums at most beside the accumulators."""
        own = stage.model.accumulators.data_ptr()
        sums = [s for s in (stage._total, stage._spare, stage._decided_sum) if s is not None]
        if len({s.data_ptr() for s in sums} - {own}) > 2:
            self.found(f"stage {stage.stage}: more than two sums are kept")

    # -- decisions --------------------------------------------------------------------------

    def decided(self, decision: Decision) -> None:
        """One decision for each mark; a step leads one on, and is never skipped here."""
        counts = tuple(dict(sorted(c.items())) for c in decision.counts)
        to, story = name(decision.to), repr(replace(decision, counts=counts))
        if self._decisions.setdefault(to, (name(decision.mark), story))[1] != story:
            self.found(f"two decisions lead to {decision.to}")
        if decision.to.t != decision.mark.t + 1 or name(decision.to) < name(decision.mark):
            self.found(f"a decision leads from {decision.mark} to {decision.to}")
        if decision.update.skip:
            self.found(f"step {decision.mark.t} was skipped")

    def stepped(
        self,
        stage: ChaosStage,
        before: Mark | None,
        decision: Decision,
        total: torch.Tensor | None,
    ) -> None:
        """``stage`` has applied ``decision``; ``total`` is the sum that it held."""
        if name(before) != name(decision.mark):
            self.found(f"stage {stage.stage}: a decision from {decision.mark} applied at {before}")
        if decision.update.skip:
            return
        round_, digest = decision.rounds[stage.stage]
        if total is None:
            self.found(f"stage {stage.stage}: a decision applied without a sum")
            return
        if digest not in digests(total):
            self.found(f"stage {stage.stage}: applied another sum than was decided")
        self._ledgers.setdefault((stage.stage, round_), {})
        self.applied(stage, round_, total)

    # -- versions ---------------------------------------------------------------------------

    def at_mark(self, stage: AuditedStage) -> None:
        """Equal marks, equal bits, of the optimizer too; so for equal steps, if all is as ever."""
        state = b"".join(v.numpy().tobytes() for v in stage.model.state().values())
        bits = hashlib.sha256(state).digest()
        key: Name = name(stage.mark) if self.counting else (stage.mark.t,) if stage.mark else ()
        if key and self._bits.setdefault((stage.stage, key), bits) != bits:
            self.found(f"stage {stage.stage}: different weights at {stage.mark}")

    def copied(self, stage: ChaosStage) -> None:
        """It has joined: at a mark that the run has been at."""
        if name(stage.mark) not in self._decisions.keys() | self._starts:
            self.found(f"stage {stage.stage}: joined at {stage.mark}, where nobody has been")

    # -- trainers ---------------------------------------------------------------------------

    def leads(self, trainer: Trainer) -> None:
        """Called when it begins to look for the run, and when it has found it."""
        if trainer not in self._trainers:
            self._trainers.append(trainer)
            if self.counting:
                # Two who decide the same step decide differently: a mix of both shows.
                trainer._decider = functools.partial(_own_decider, trainer, trainer._decider)  # type: ignore[method-assign]
        for other in self._trainers:
            if other is not trainer and other.term == trainer.term:
                self.found(f"two trainers share term {trainer.term.number}")
        if trainer.seed is not None:
            self._starts.add(name(trainer.mark))

    def complete(self, trainer: Trainer) -> None:
        """The run is over: all on the way to its mark is accounted for."""
        expected = self.microbatches * trainer.mark.t
        for stage, counts in enumerate(trainer.totals):
            if sum(counts.values()) != expected:
                self.found(f"stage {stage}: totals {sum(counts.values())}, not {expected}")
        if trainer.applied != trainer.mark.t:
            self.found(f"{trainer.applied} steps applied of {trainer.mark.t}")
        members = {replica for stage in range(trainer.stages) for replica in trainer.ready(stage)}
        for peer in self.realm.peers.values():
            server = peer.node.server
            if server is None:
                continue
            if peer.node.me in members and name(server.mark) != name(trainer.mark):
                self.found(f"a member is at {server.mark}, the run at {trainer.mark}")
            if name(server.mark) == name(trainer.mark):
                told = server.host.stage.totals
                if [dict(t) for t in told] != [dict(t) for t in trainer.totals]:
                    self.found(f"a replica of stage {peer.node.stage} has other totals")

    def losses(self, done: StepDone, expected: list[float]) -> None:
        if abs(done.loss - expected[done.step]) > 1e-5 * abs(expected[done.step]):
            self.found(f"step {done.step}: loss {done.loss}, not {expected[done.step]}")


def _own_decider(
    trainer: Trainer, decider: Callable[[int], Callable[..., tuple[Update, float]]], t: int
) -> Callable[..., tuple[Update, float]]:
    inner = decider(t)

    def decide(squared_norms: list[float], finite: bool) -> tuple[Update, float]:
        update, norm = inner(squared_norms, finite)
        own = 1 + 1e-3 * (trainer.term.number + int(trainer.term.boot, 16) % 64)
        return replace(update, lr=update.lr * own), norm

    return decide
