"""The simulator, microbatch by microbatch: ``swarm.core`` decides, a heap of events gives time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from swarm.sim.arrivals import Arrivals
from swarm.sim.simulation import Simulation
from swarm.sim.wirings import Share, make_wiring
from swarm.sim.world import Outcome, World

Progress = Callable[[float], None]

COLLECT_EVERY = 200_000
"""New objects from one search for cycles to the next."""

LOOKS = 200
"""How often ``progress`` is called in a run."""


def simulate(
    world: World,
    *,
    log: bool = False,
    progress: Progress | None = None,
    share: Share | None = None,
) -> Outcome:
    """Run ``world`` for its ``duration_s``. The same world gives the same outcome.

    Args:
        log: write the decisions down, a line each.
        progress: called now and then with the share of the virtual time that is over.
        share: for static wiring, the part of the work that goes each way.

    Raises:
        ValueError: the world asks for static wiring, and there is no ``share``.
    """
    rule, stages = world.wiring, len(world.stages)
    wiring = make_wiring(rule, stages, delay_s=world.announce_s, share=share)
    sim = Simulation(world, log=log, wiring=wiring)
    Arrivals(sim).begin()
    for stretch in range(1, int(world.duration_s / world.sample_every_s) + 1):
        sim.clock.at(stretch * world.sample_every_s, sim.meter.sample)
    with _few_collections():
        for look in range(1, LOOKS + 1):
            sim.clock.run(world.duration_s * look / LOOKS)
            if progress is not None:
                progress(look / LOOKS)
    outcome = sim.meter.finish()
    outcome.events = sim.clock.events
    return outcome


@contextmanager
def _few_collections() -> Iterator[None]:
    """Next to nothing here is part of a cycle, and looking for cycles takes a fifth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
