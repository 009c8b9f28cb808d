"""What a microbatch costs a peer at a stage: seconds of compute and bytes on its link."""

from __future__ import annotations

from functools import cached_property
from math import inf

from swarm.core.rebalancing import Need
from swarm.sim.world import Machine, World


class Costs:
    """The fixed figures of a world, by stage. Rates are in microbatches per second.

    Peer to peer, a stage receives the activation and the gradient of its neighbours, and sends
    its own. Relayed through a trainer, it receives its input twice, since the backward pass
    starts anew from it, and recomputes the forward pass.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    @cached_property
    def work(self) -> list[float]:
        """TFLOP of one microbatch, forward and backward."""
        again = 1.0 if self.world.relayed else 0.0
        return [s.forward_tflop * (1 + again) + s.backward_tflop for s in self.world.stages]

    @cached_property
    def down_bytes(self) -> list[float]:
        stages = self.world.stages
        found: list[float] = []
        for s in range(len(stages)):
            activation = stages[s - 1].output_bytes if s else 0
            gradient = stages[s + 1].gradient_bytes if s + 1 < len(stages) else 0
            found.append(activation * (2 if self.world.relayed else 1) + gradient)
        return found

    @cached_property
    def up_bytes(self) -> list[float]:
        last = len(self.world.stages) - 1
        return [
            (stage.output_bytes if s < last else 0) + (stage.gradient_bytes if s else 0)
            for s, stage in enumerate(self.world.stages)
        ]

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """The stages as rebalancing knows them: work and memory."""
        samples = self.world.microbatch
        return tuple(
            Need(work / samples, stage.memory_bytes)
            for work, stage in zip(self.work, self.world.stages, strict=True)
        )

    def rate(self, machine: Machine, stage: int) -> float:
        """What ``machine`` does at ``stage`` when it never has to wait."""
        return min(
            machine.tflops / self.work[stage],
            _per_second(machine.up_bytes_per_s, self.up_bytes[stage]),
            _per_second(machine.down_bytes_per_s, self.down_bytes[stage]),
        )

    @cached_property
    def most(self) -> float:
        """What the link of the trainer lets through, if everything is relayed."""
        if not self.world.relayed:
            return inf
        carried = max(sum(self.down_bytes), sum(self.up_bytes))
        return _per_second(self.world.trainer_bytes_per_s, carried)

    def fits(self, machine: Machine, stage: int) -> bool:
        needed = self.world.stages[stage].memory_bytes
        return machine.memory_bytes is None or machine.memory_bytes >= needed


def link_of(machine: Machine) -> float:
    """Bytes per second of the slower direction: what limits averaging."""
    return min(machine.up_bytes_per_s, machine.down_bytes_per_s)


def _per_second(bytes_per_s: float, size: float) -> float:
    return bytes_per_s / size if size else inf
