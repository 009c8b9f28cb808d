"""Held-out microbatches through the swarm: they stop at the loss and count nowhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarm.core import flight as fly
from swarm.core.flight import Flight, Launch, Receipt
from swarm.core.journey import Ask, Silent
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
        ready: Callable[[int], list[Replica]],
        serving: Callable[[int], list[Replica]] | None = None,
    ) -> None:
        """``serving``: those of the ``ready`` that get new work; None: all."""
        self.flight = flight
        self._stages = stages
        self._ready = ready
        self._serving = serving or ready
        self._removed: set[Replica] = set()
        self._todo: list[Instruction] = []

    def receipt(self, receipt: Receipt, now: float) -> None:
        members = self._members(receipt.stage)
        if receipt.replica in members:
            self._add(self.flight.receipt(receipt, len(members) < 2, now), now)
        self.unreachable(receipt.skipped)

    def unreachable(self, replicas: Sequence[Replica]) -> None:
        known = {r for stage in range(self._stages) for r in self._members(stage)}
        self._todo += [Probe(replica) for replica in replicas if replica in known]

    def failed(self, m: int, stamp: Stamp, reason: str, now: float) -> None:
        self._add(self.flight.failed(m, stamp, reason, now), now)

    def answered(self, ask: Ask, stage: int, holds: bool, loss: float | None = None) -> None:
        """What a replica holds means nothing here: only that it will not work on ``ask`` again."""
        del holds, loss
        self.flight.answered(ask, stage, False)

    def remove(self, replica: Replica, reason: str, now: float) -> None:
        if replica not in self._removed:
            self._removed.add(replica)
            self._todo.append(Remove(replica, reason))
            self._add(self.flight.lost(replica, now), now)

    def admitted(self, replica: Replica, *, stage: int) -> None:
        del stage
        self._removed.discard(replica)

    def advance(self, now: float) -> list[Instruction]:
        self._add(self.flight.tick(now), now)
        self._add(self.flight.fill(self._workers(), now), now)
        todo, self._todo = self._todo, []
        return todo

    @property
    def finished(self) -> bool:
        return self.flight.done

    def deadline(self) -> float:
        return self.flight.deadline()

    def _workers(self) -> list[list[Replica]]:
        serving = [
            [r for r in self._serving(s) if r not in self._removed] for s in range(self._stages)
        ]
        return [serving[stage] or self._members(stage) for stage in range(self._stages)]

    def _members(self, stage: int) -> list[Replica]:
        return [replica for replica in self._ready(stage) if replica not in self._removed]

    def _add(self, found: Sequence[fly.Instruction], now: float) -> None:
        for do in found:
            if isinstance(do, Silent):
                self.remove(do.replica, do.reason, now)
            else:
                self._todo.append(do)
