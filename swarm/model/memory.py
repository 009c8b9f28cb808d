"""The memory that a replica of a stage takes, and what is done where there is less of it.

    vectors   bytes for each number x numbers (weight, gradient, optimizer, sums; ``needs``)
  + inputs    one for each microbatch that waits to be computed, or for its backward
  + graphs    what autograd saves, for each microbatch whose graph is kept
  + pass      the graph of the one that is computed, and what the largest layer saves once more

Where that is too much, fewer graphs are kept: the others are computed again, from the stage's
input, when the gradient comes (GPipe's recomputation, Huang et al. 2019). Where even the pass does
not fit, each layer keeps its input only (activation checkpointing, Chen et al. 2016). Neither
changes a bit of what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How a replica keeps within its memory.

    ``graphs``: how many are kept at most. ``checkpointing``: of each layer only the input is.
    """

    graphs: int
    checkpointing: bool = False


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes that one replica of a stage takes, beyond those of a process that serves none."""

    vectors: int
    inputs: int
    """Of all microbatches that it may hold at a time."""
    graphs: int
    """How many may be kept at a time. None in the last stage: its backward follows at once."""
    saved: int
    """By one graph."""
    layer_inputs: int
    """By one graph, where each layer keeps its input only."""
    largest: int
    """What one layer saves, at most."""

    def total(self, plan: Plan) -> int:
        """Bytes at the peak, under ``plan``."""
        return self.vectors + self.inputs + plan.graphs * self.graph(plan) + self.working(plan)

    def graph(self, plan: Plan) -> int:
        """Bytes of one graph that is kept."""
        return self.layer_inputs if plan.checkpointing else self.saved

    def working(self, plan: Plan) -> int:
        """Bytes of the pass that is computed: its graph, and as much as a layer saves again.

        Where a layer is computed again, three times as much: its graph, its gradients, and the
        memory between them that the allocator does not find use for at once.
        """
        return self.graph(plan) + self.largest * (3 if plan.checkpointing else 1)

    @property
    def full(self) -> Plan:
        """Nothing is computed twice."""
        return Plan(self.graphs)

    @property
    def least(self) -> int:
        """Bytes below which it cannot be served."""
        return min(self.total(Plan(0)), self.total(Plan(0, checkpointing=True)))

    def plan(self, memory_bytes: int) -> Plan | None:
        """The one that computes least twice within ``memory_bytes``; None: none does."""
        for checkpointing in (False, True):
            none = Plan(0, checkpointing)
            spare = memory_bytes - self.total(none)
            if spare >= 0:
                each = self.graph(none)
                kept = self.graphs if each == 0 else min(self.graphs, spare // each)
                return Plan(kept, checkpointing)
        return None

    def words(self, plan: Plan) -> str:
        """The parts, for people."""
        return (
            f"{mib(self.total(plan))}: weights, optimizer and sums {mib(self.vectors)}, "
            f"inputs {mib(self.inputs)}, {plan.graphs} graphs of {mib(self.graph(plan))}, "
            f"a pass {mib(self.working(plan))}"
        )


def mib(count: int) -> str:
    """``count`` bytes, for people."""
    return f"{count / MIB:,.1f} MiB" if count < 100 * MIB else f"{count / MIB:,.0f} MiB"
