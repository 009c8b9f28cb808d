"""``swarm node``: enter a swarm, learn the run, serve a stage of it."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peers.entering import Entry, entered, new_boot, wire_limits
from peers.finding import learn_run
from peers.running import Leave
from peers.wire import Limits
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from peers.node import Node

log = logging.getLogger("swarm.node")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What ``swarm node`` was asked for.

    ``stage`` None: the one that lacks a peer most. ``stay``: never move to another.
    ``memory_bytes`` 0: what is free where it computes, on this machine or its GPU.
    """

    entry: Entry
    stage: int | None = None
    run: str = ""
    threads: int = 1
    allow: frozenset[str] = frozenset()
    stay: bool = False
    memory_bytes: int = 0
    device: str = "auto"
    watch: Callable[[Node], None] = lambda node: None
    """Told of each node that this process becomes: another one after each move."""


async def serve(options: NodeOptions, leave: Leave, say: Callable[[str], None] = log.info) -> str:
    """Until the run is over, or the owner wants to ``leave``; returns why it ended.

    Raises:
        UserError: one line that says what to do.
    """
    say(f"entering the swarm at {', '.join(options.entry.join)}")
    async with entered(options.entry, Limits()) as swarm:
        # Imported here: torch takes seconds, and wrong addresses should not wait for it.
        from peers.balance import GIB, choose_stage, free_memory
        from peers.budget import enough, planned
        from peers.device import choose_device
        from peers.executor import ThreadExecutor
        from peers.node import Choice, Node
        from peers.shelf import Shelf
        from swarm.model.needs import needs_of, stage_memories
        from swarm.model.registry import model_spec

        manifest = await learn_run(swarm, options.entry.join, options.run)
        swarm.limit(wire_limits(manifest))
        say(f"run {manifest.name} ({manifest.run_id}), this is {swarm.identity.peer_id}")
        spec = model_spec(manifest, options.allow)
        stages = manifest.stages.count
        if options.stage is not None and not 0 <= options.stage < stages:
            raise ConfigError("--stage", options.stage, f"0 to {stages - 1} in this run")
        rng = random.Random()
        device = choose_device(options.device, reproducible=manifest.reproducible.enabled)
        free_bytes = free_memory() if device.memory_bytes is None else device.memory_bytes
        say(f"computes on {device.words}, {free_bytes / GIB:.1f} GiB of memory free")
        memories = stage_memories(manifest, spec)
        memory_bytes = enough(memories, options.memory_bytes or free_bytes)
        choice = Choice(needs_of(manifest, spec, memories), memory_bytes)
        stage = options.stage
        if stage is None:
            stage, counts = await choose_stage(
                swarm.directory,
                manifest,
                choice.needs,
                swarm.identity.peer_id,
                memory_bytes,
                rng,
            )
            say(
                f"chose stage {stage}: the stages have {', '.join(map(str, counts))} replicas "
                "announced"
            )
        threads = options.threads
        if manifest.reproducible.enabled:
            threads = manifest.reproducible.threads
        executor = ThreadExecutor(threads)
        sequence = 0
        while True:
            node = Node(
                manifest,
                spec,
                stage,
                swarm=swarm,
                executor=executor,
                rng=rng,
                say=say,
                shelf=Shelf(options.entry.identity.with_suffix(".kept"), manifest.run_id, stage),
            )
            node.choice, node.device = None if options.stay else choice, device
            node.plan = planned(stage, memories, memory_bytes, say)
            node.sequence = sequence
            options.watch(node)
            leave.hear = node.leave
            # Two stages at a time might not fit, and a node that is over holds itself in circles.
            gc.collect()
            reason = await node.run()
            if node.moves_to is None:
                return reason
            # For all others it is another replica from now on.
            stage, swarm.boot, sequence = node.moves_to, new_boot(), node.sequence
