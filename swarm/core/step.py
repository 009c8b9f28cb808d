"""One optimizer step: what must count where; then prepare, sum, vote, decide.

The trainer's machine. Events come in as method calls with ``now``; what is to be done comes out
of ``advance`` as a list of instructions. It sends nothing and waits for nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swarm.core import closing as close
from swarm.core import flight as fly
from swarm.core.closing import Closing, Drop, Fetch, Mismatch, Prepare, Vote
from swarm.core.flight import Flight, Launch, Receipt, Stamps
from swarm.core.journey import Ask, Silent
from swarm.core.members import Lookup, Members
from swarm.core.update import Update
from swarm.types import Mark, Replica, Stamp


@dataclass(frozen=True, slots=True)
class Decision:
    """What every replica at ``mark`` applies to get to ``to``.

    ``rounds`` names, for each stage, the round and the digest of its sum; it is empty for a
    skipped step whose sums are not known. ``counts`` says how many microbatches of each peer
    count, by stage: none in a skipped step. ``applied``
    counts the updates up to ``to`` that were not skipped: bias corrections follow it.
    """

    mark: Mark
    to: Mark
    rounds: tuple[tuple[Stamp, str], ...]
    update: Update
    counts: tuple[Mapping[str, int], ...]
    loss: float
    norm: float
    applied: int


@dataclass(frozen=True, slots=True)
class Decide:
    """Tell ``replica`` the decision, until it has answered."""

    replica: Replica
    decision: Decision


@dataclass(frozen=True, slots=True)
class Reset:
    """``replica`` is to drop ledger and accumulators: it holds what another holds too."""

    stage: int
    replica: Replica
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Remove:
    """``replica`` is no member any more, for this reason."""

    replica: Replica
    reason: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Another peer could not reach ``replica``: see whether it answers us; if not, remove it."""

    replica: Replica


Instruction = Launch | Ask | Prepare | Fetch | Decide | Reset | Remove | Probe

Decider = Callable[[Sequence[float], bool], tuple[Update, float]]
"""(squared norm of each stage, all finite) -> (update, global norm)."""


class Step:
    """Machine for one step.

    Args:
        flight: the step's microbatches.
        closings: one for each stage.
        ready: stage -> the replicas that are READY at the step's mark, in a fixed order.
        serving: those of them that get new work; None: all.
        to: the mark that the decision leads to.
        decider: learning rate, clipping and bias corrections for this step.
        applied: updates before this step that were not skipped.

    ``may_close``: False as long as this step is ahead of one that is not applied everywhere.
    ``all_apply``: True where the next step is under way beside this one: it ends only when all
    that were told the decision have applied it, or are removed.
    """

    def __init__(
        self,
        flight: Flight,
        closings: Sequence[Closing],
        *,
        ready: Lookup,
        stamps: Stamps,
        to: Mark,
        decider: Decider,
        applied: int,
        serving: Lookup | None = None,
    ) -> None:
        self.flight = flight
        self.may_close = not flight.ahead
        self.all_apply = False
        self.closings = tuple(closings)
        self.decision: Decision | None = None
        self._members = Members(len(closings), ready, serving)
        self._stamps = stamps
        self._to = to
        self._decider = decider
        self._applied_before = applied
        self._todo: list[Instruction] = []
        self._applied: list[set[Replica]] = [set() for _ in closings]
        self._told: set[Replica] = set()
        self._reset_at: dict[Replica, Stamp] = {}
        self._begun = False

    # -- events -----------------------------------------------------------------------------

    def receipt(self, receipt: Receipt, now: float) -> None:
        """Only members are believed, and only on work that no reset has undone since."""
        stage, replica = receipt.stage, receipt.replica
        if not self._members.has(stage, replica) or not self._current(replica, receipt.stamp):
            return
        if receipt.verdict == fly.DROPPED and self.flight.expects(receipt):
            self.closings[stage].reopen()
        alone = receipt.verdict == fly.NOT_FINITE and len(self._members.of(stage)) < 2
        if found := self.flight.receipt(receipt, alone, now):
            self._add(found, now)
        if receipt.skipped:
            self.unreachable(receipt.skipped)

    def _current(self, replica: Replica, stamp: Stamp) -> bool:
        """Whether what ``replica`` says of ``stamp`` still holds: no reset, no decision since."""
        if self.decision is not None:
            return False
        reset = self._reset_at.get(replica) if self._reset_at else None
        return reset is None or stamp > reset

    def unreachable(self, replicas: Sequence[Replica]) -> None:
        """Somebody could not open a connection to ``replicas``."""
        self._todo += [Probe(r) for r in replicas if self._members.anywhere(r)]

    def failed(self, m: int, stamp: Stamp, reason: str, now: float) -> None:
        """A hop gave up on attempt ``stamp`` of ``m``."""
        self._add(self.flight.failed(m, stamp, reason, now), now)

    def answered(self, ask: Ask, stage: int, holds: bool, loss: float | None = None) -> None:
        current = self._current(ask.replica, ask.stamp) and ask.replica not in self._members.removed
        self.flight.answered(ask, stage, holds and current, loss)

    def prepared(
        self, replica: Replica, round_: Stamp, missed: Sequence[Replica], now: float, *, stage: int
    ) -> None:
        """``replica`` takes part in the round, and misses pieces of ``missed``."""
        self._add(self.closings[stage].agreed(replica, round_, missed, now), now)

    def mismatched(self, found: Mismatch, round_: Stamp, *, stage: int) -> None:
        """What ``replica`` holds is not what was expected: reconcile, then prepare anew.

        What no member holds goes again; of those that hold the same, the one with less is reset.
        """
        closing, members = self.closings[stage], self._members.of(stage)
        if round_ != closing.latest or not self._current(found.replica, round_):
            return
        if found.replica not in (members if closing.round is None else closing.members):
            return
        closing.reopen()
        self.flight.keep_only(stage, members)
        self._reconcile(stage, found.replica, found.holds)

    def inherit(
        self, replica: Replica, holds: frozenset[int], losses: Mapping[int, float], *, stage: int
    ) -> None:
        """What the ledger of a member holds from before this trainer's time."""
        for m in sorted(holds & self.flight.journeys.keys() & losses.keys()):
            self.flight.journeys[m].measured(losses[m])
        self._reconcile(stage, replica, holds)

    def _reconcile(self, stage: int, replica: Replica, holds: frozenset[int]) -> None:
        """Of two that hold the same, the one with less is reset; so is one with what is unknown."""
        trips = self.flight.journeys
        believed = self.flight.held_by(stage, replica)
        for m in believed - holds:
            trips[m].dropped(replica)
        extra = sorted(holds - believed)
        unknown = [m for m in extra if m not in trips]
        rivals = {
            trips[m].holders[stage] for m in extra if m in trips and stage in trips[m].holders
        }
        theirs = sum(len(self.flight.held_by(stage, rival)) for rival in rivals)
        if unknown or (rivals and theirs >= len(holds)):
            self._reset(stage, replica)
            return
        for rival in sorted(rivals):
            self._reset(stage, rival)
        for m in extra:
            trips[m].holds(stage, replica)

    def _reset(self, stage: int, replica: Replica) -> None:
        stamp = self._stamps.take()
        self.was_reset(replica, stamp)
        self._todo.append(Reset(stage, replica, stamp))

    def was_reset(self, replica: Replica, stamp: Stamp) -> None:
        """``replica`` is told to drop what it holds, of this step and of the one beside it."""
        self.flight.dropped(replica)
        self._reset_at[replica] = stamp

    def vote(self, replica: Replica, vote: Vote, *, stage: int) -> None:
        self.closings[stage].vote(replica, vote)

    def trouble(self, round_: Stamp, now: float, *, stage: int) -> None:
        """A member cannot reach another in the round."""
        self._add(self.closings[stage].hurry(round_, now), now)

    def applied(self, replica: Replica, *, stage: int) -> None:
        """``replica`` has applied the decision: it is at the new mark, and no longer removed."""
        self._members.admit(replica)
        self._applied[stage].add(replica)

    def remove(self, replica: Replica, reason: str, now: float) -> None:
        """``replica`` is silent, left or restarted: go on without it."""
        if not self._members.remove(replica):
            return
        self._todo.append(Remove(replica, reason))
        if self.decision is not None:
            return
        stands = any([closing.removed(replica) for closing in self.closings])
        self._add(self.flight.lost(replica, now, stands=stands), now)

    def admitted(self, replica: Replica, *, stage: int) -> None:
        """``replica`` is READY (again), holding nothing: it takes part in the stage's round too.

        Not if a round there must stand. After the decision it is told that: it may have the sum.
        """
        self._members.admit(replica)
        self._reset_at[replica] = self._stamps.take()
        if self.decision is not None:
            self._told.add(replica)
            self._todo.append(Decide(replica, self.decision))
        elif not self.closings[stage].irreplaceable:
            self.closings[stage].reopen()
            self.flight.dropped(replica)

    def promote(self, mark: Mark, decider: Decider, applied: int) -> None:
        """The step before was decided and applied: this one is ahead no more.

        Who was removed, but has applied that decision all the same, is a member again.
        """
        self.flight.promote(mark)
        self._decider, self._applied_before = decider, applied
        for stage in range(len(self.closings)):
            for replica in self._members.returned(stage):
                self.admitted(replica, stage=stage)

    # -- what to do now ---------------------------------------------------------------------

    def advance(self, now: float) -> list[Instruction]:
        """All that is to be done now; call it after every event and at ``deadline``."""
        if self.decision is None:
            if late := self.flight.tick(now):
                self._add(late, now)
            if self._begun:
                for closing in self.closings:
                    self._add(closing.tick(now), now)
            self._go_on(now)
        todo, self._todo = self._todo, []
        return todo

    def _go_on(self, now: float) -> None:
        if self.flight.void and self.may_close:
            self._decide(skip=True)
            return
        if self.flight.some_stage_done and self.may_close:
            for closing in self.closings:
                self._close(closing, self._members.of(closing.stage), now)
        if found := self.flight.fill(self._members.workers(), now):
            self._add(found, now)
        ready = self.may_close and all(c.phase is close.Phase.READY for c in self.closings)
        if ready and self.flight.done:
            self._decide(skip=False)

    def _close(self, closing: Closing, members: Sequence[Replica], now: float) -> None:
        if closing.phase is not close.Phase.OPEN or not members:
            return
        if not self.flight.stage_done(closing.stage):
            return
        self.flight.keep_only(closing.stage, members)
        if not self.flight.stage_done(closing.stage):
            return
        self._begun = True
        expected = {r: self.flight.held_by(closing.stage, r) for r in members}
        self._add(closing.prepare(self._stamps.take(), expected, now), now)

    def _decide(self, *, skip: bool) -> None:
        if skip:
            update, norm = self._decider([], False)
            rounds: tuple[tuple[Stamp, str], ...] = ()
        else:
            votes = [closing.outcome for closing in self.closings]
            finite = all(vote.finite for vote in votes)
            update, norm = self._decider([vote.squared_norm for vote in votes], finite)
            rounds = tuple((vote.round, vote.digest) for vote in votes)
        self.flight.end()
        counts = tuple({} if update.skip else self._counts(c.stage) for c in self.closings)
        applied = self._applied_before + (not update.skip)
        self.decision = Decision(
            self.flight.mark, self._to, rounds, update, counts, self.flight.loss(), norm, applied
        )
        for closing in self.closings:
            members = self._members.of(closing.stage)
            self._told.update(members)
            self._todo += [Decide(member, self.decision) for member in members]

    def _counts(self, stage: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        for trip in self.flight.journeys.values():
            peer = trip.holders[stage].peer
            counts[peer] = counts.get(peer, 0) + 1
        return counts

    @property
    def finished(self) -> bool:
        """The decision stands and each stage has a replica at the new mark."""
        removed = self._members.removed
        if self.decision is None or any(done <= removed for done in self._applied):
            return False
        return not self.all_apply or self._told <= removed.union(*self._applied)

    def deadline(self) -> float:
        """When ``advance`` has something to do even if nothing happens."""
        if self.decision is not None:
            return float("inf")
        if not self._begun:
            return self.flight.deadline()
        return min(self.flight.deadline(), *[closing.deadline for closing in self.closings])

    def _add(self, found: Sequence[fly.Instruction | close.Instruction], now: float) -> None:
        for do in found:
            if isinstance(do, Silent | Drop):
                self.remove(do.replica, do.reason, now)
            else:
                self._todo.append(do)
