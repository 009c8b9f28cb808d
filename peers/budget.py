"""What a node does with the memory that it has: which plan a stage is served by, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarm.errors import ConfigError
from swarm.model.memory import Plan, StageMemory, mib

REMEDY = "give it more with --memory, or the run more stages or a smaller batch.microbatch"


def planned(
    stage: int, memories: Sequence[StageMemory], memory_bytes: int, say: Callable[[str], None]
) -> Plan:
    """The plan for ``stage`` within ``memory_bytes``; says if it computes anything twice.

    Raises:
        ConfigError: it does not fit; with the figures.
    """
    memory = memories[stage]
    plan = memory.plan(memory_bytes)
    if plan is None:
        raise ConfigError("--memory", mib(memory_bytes), f"{at_least(stage, memory)}; {REMEDY}")
    if plan.checkpointing:
        say(
            f"activation checkpointing is on: stage {stage} would take "
            f"{memory.words(Plan(0))}; now {memory.words(plan)}"
        )
    elif plan != memory.full:
        say(
            f"keeps {plan.graphs} graphs of {memory.graphs}, the others are computed again: stage "
            f"{stage} would take {memory.words(memory.full)}"
        )
    return plan


def enough(memories: Sequence[StageMemory], memory_bytes: int) -> int:
    """``memory_bytes``, if some stage fits.

    Raises:
        ConfigError: none does; with the figures of the smallest.
    """
    stage = min(range(len(memories)), key=lambda stage: memories[stage].least)
    if memories[stage].least > memory_bytes:
        smallest = f"the smallest, {at_least(stage, memories[stage])}"
        allowed = f"enough for a stage; {smallest}; {REMEDY}"
        raise ConfigError("--memory", mib(memory_bytes), allowed)
    return memory_bytes


def at_least(stage: int, memory: StageMemory) -> str:
    """What ``stage`` takes however little is kept."""
    leanest = min(Plan(0), Plan(0, checkpointing=True), key=memory.total)
    return f"stage {stage} takes at least {memory.words(leanest)}"
