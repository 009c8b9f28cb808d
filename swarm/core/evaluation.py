"""Held-out microbatches through the swarm: they stop at the loss and count nowhere."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.core import flight as fly
from swarm.core.flight import Flight, Launch, Receipt
from swarm.core.journey import Ask, Silent
from swarm.core.members import Lookup, Members
from swarm.core.step import Probe, Remove
from swarm.types import Replica, Stamp

Instruction = Launch | Ask | Remove | Probe


class Evaluation:
    """Machine: as ``Step``, without ledgers, rounds and decision."""

    def __init__(
        self,
        flight: Flight,
        stages: int,
        *,
        ready: Lookup,
        serving: Lookup | None = None,
    ) -> None:
        """``serving``: those of the ``ready`` that get new work; None: all."""
        self.flight = flight
        self._members = Members(stages, ready, serving)
        self._todo: list[Instruction] = []

    def receipt(self, receipt: Receipt, now: float) -> None:
        if self._members.has(receipt.stage, receipt.replica):
            alone = len(self._members.of(receipt.stage)) < 2
            self._add(self.flight.receipt(receipt, alone, now), now)
        self.unreachable(receipt.skipped)

    def unreachable(self, replicas: Sequence[Replica]) -> None:
        self._todo += [Probe(r) for r in replicas if self._members.anywhere(r)]

    def failed(self, m: int, stamp: Stamp, reason: str, now: float) -> None:
        self._add(self.flight.failed(m, stamp, reason, now), now)

    def answered(self, ask: Ask, stage: int, holds: bool, loss: float | None = None) -> None:
        """What a replica holds means nothing here: only that it will not work on ``ask`` again."""
        del holds, loss
        self.flight.answered(ask, stage, False)

    def remove(self, replica: Replica, reason: str, now: float) -> None:
        if self._members.remove(replica):
            self._todo.append(Remove(replica, reason))
            self._add(self.flight.lost(replica, now), now)

    def admitted(self, replica: Replica, *, stage: int) -> None:
        del stage
        self._members.admit(replica)

    def advance(self, now: float) -> list[Instruction]:
        self._add(self.flight.tick(now), now)
        self._add(self.flight.fill(self._members.workers(), now), now)
        todo, self._todo = self._todo, []
        return todo

    @property
    def finished(self) -> bool:
        return self.flight.done

    def deadline(self) -> float:
        return self.flight.deadline()

    def _add(self, found: Sequence[fly.Instruction], now: float) -> None:
        for do in found:
            if isinstance(do, Silent):
                self.remove(do.replica, do.reason, now)
            else:
                self._todo.append(do)
