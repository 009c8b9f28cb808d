"""Looks into the sums: in every step each microbatch counts exactly once, in every part.

A ledger audit alone cannot see a wrong sum. So a *counting* stage replaces the gradient of
microbatch ``m`` by a vector that is 1 in every place ``i`` with ``i % M == m`` and 0 elsewhere:
whatever sum is applied must then be 1 everywhere.
"""

from __future__ import annotations

import torch

from peers.stage import StageOwner
from swarm.core.step import Decision
from swarm.types import Attempt, Mark, Replica, Stamp
from tests.chaos.harness import Peer, World


class AuditedStage(StageOwner):
    """What ``Audit.watch`` turns a replica's stage into."""

    audit: Audit
    replica: Replica

    def prepare(self, stamp: Stamp, expected: frozenset[int]) -> bool:
        takes_part = super().prepare(stamp, expected)
        if takes_part:
            self.audit.sealed(self, stamp)
        return takes_part

    def decide(self, decision: Decision) -> Mark | None:
        before, total = self.mark, self._total
        if total is not None:
            total = total.clone()
        after = super().decide(decision)
        if after != before and not decision.update.skip:
            assert total is not None
            self.audit.applied(self, decision.rounds[self.stage][0], total)
        self.audit.at_mark(self)
        return after

    def _count(self, attempt: Attempt) -> str:
        if self.audit.counting:
            self._counting(attempt.m)
        return super()._count(attempt)

    def _counting(self, m: int) -> None:
        self.model._gradients = [view.clone() for view in self.model._now.flat.views(self._slot(m))]

    def _slot(self, m: int) -> torch.Tensor:
        return (torch.arange(self.model.length) % self.audit.microbatches == m).float()

    def sum_of(self, total: torch.Tensor, m: int) -> float | None:
        """How often ``m`` is in ``total``; None if not in all places alike."""
        views = zip(
            self.model._now.flat.views(total),
            self.model._now.flat.views(self._slot(m)),
            strict=True,
        )
        found = torch.cat([view[slot == 1] for view, slot in views])
        return float(found[0]) if bool((found == found[0]).all()) else None


class Audit:
    """Books over all replicas of a world. ``counting``: gradients count microbatches.

    Attributes:
        applies: how many sums were applied and looked into.
        problems: what was found; a node lives on, so ``World`` users must look here.
    """

    def __init__(self, world: World, *, counting: bool) -> None:
        self.counting = counting
        self.microbatches = world.manifest.batch.microbatches
        self.applies = 0
        self.problems: list[str] = []
        self._ledgers: dict[tuple[int, Stamp], dict[Replica, frozenset[int]]] = {}
        self._weights: dict[tuple[int, Mark], bytes] = {}
        world.on_start = self.watch

    def watch(self, peer: Peer) -> None:
        stage = peer.stage
        stage.__class__ = AuditedStage
        assert isinstance(stage, AuditedStage)
        stage.audit, stage.replica = self, peer.node.me

    def sealed(self, stage: AuditedStage, round_: Stamp) -> None:
        """A replica takes part in a round with what its ledger holds."""
        ledgers = self._ledgers.setdefault((stage.stage, round_), {})
        held = frozenset(stage.ledger.held)
        if ledgers.setdefault(stage.replica, held) != held:
            self.problems.append(f"stage {stage.stage}: a ledger changed within a round")

    def applied(self, stage: AuditedStage, round_: Stamp, total: torch.Tensor) -> None:
        self.applies += 1
        ledgers = self._ledgers[stage.stage, round_].values()
        counted = sorted(m for held in ledgers for m in held)
        if counted != list(range(self.microbatches)):
            self.problems.append(f"stage {stage.stage}: counted {counted}")
        if self.counting:
            wrong = {m for m in range(self.microbatches) if stage.sum_of(total, m) != 1}
            if wrong:
                self.problems.append(f"stage {stage.stage}: wrong sums of {sorted(wrong)}")

    def at_mark(self, stage: AuditedStage) -> None:
        """Equal marks, equal bits."""
        bits = stage.model.weights.numpy().tobytes()
        if stage.mark and self._weights.setdefault((stage.stage, stage.mark), bits) != bits:
            self.problems.append(f"stage {stage.stage}: different weights at {stage.mark}")
