"""How fast a machine serves a stage when it never has to wait."""

from __future__ import annotations

from swarm.sim.world import Machine, World


def service_s(world: World, machine: Machine, stage: int) -> float:
    """Seconds for one microbatch there and back: its compute, or its link if that takes longer."""
    work, last = world.stages[stage], len(world.stages) - 1
    compute_s = (work.forward_tflop + work.backward_tflop) / machine.tflops
    inputs = world.stages[stage - 1].output_bytes if stage else 0
    from_next = world.stages[stage + 1].gradient_bytes if stage < last else 0
    to_next = work.output_bytes if stage < last else 0
    to_previous = work.gradient_bytes if stage else 0
    if world.relayed:
        # The backward pass brings the inputs again, and they are computed again.
        inputs *= 2
        compute_s += work.forward_tflop / machine.tflops
    up_s = (to_next + to_previous) / machine.up_bytes_per_s
    down_s = (inputs + from_next) / machine.down_bytes_per_s
    return max(compute_s, up_s, down_s)
