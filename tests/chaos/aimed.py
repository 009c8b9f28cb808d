"""Schedules aimed at one rule of the protocol: what happens if it is switched off must show."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tests.chaos.schedule import Draw, Fault, Schedule, What, When

BASE = Schedule(seed=0, counting=True, steps=2, replicas=2, standbys=0, faults=())


def aim(rule: str, seed: int) -> Schedule:
    """A schedule that might show that ``rule`` is missing."""
    rng = random.Random(seed)
    return replace(_AIMS[rule](Draw(rng, BASE.steps), rng), seed=seed)


def _round(_: Draw, rng: random.Random) -> Schedule:
    """A part of a round that dies comes in the next, when its sender holds more."""
    late = [Fault(What.LATE, When(0, "part", nth), how="again") for nth in range(1, 13)]
    ends = Fault(What.KILL, When(0, "sum", 1 + rng.randrange(3)), "source", 30.0)
    faults = [*late, ends]
    return replace(BASE, replicas=3, steps=1, faults=tuple(faults))


def _bar(_: Draw, rng: random.Random) -> Schedule:
    """A replica is reset while it has work in its queue."""
    stage = rng.randrange(2)
    slow = [
        Fault(What.SLOW, When(0, "forward", 1), f"{stage}.{i}", how=str(rng.choice([30, 100])))
        for i in range(2)
    ]
    when = When(0, rng.choice(["forward", "backward"]), 2 + rng.randrange(3))
    return replace(BASE, faults=(*slow, Fault(What.SUSPECT, when, f"{stage}.{rng.randrange(2)}")))


def _mark(draw: Draw, rng: random.Random) -> Schedule:
    """A decision reaches one replica only, which is away until another one has been decided."""
    node = draw.node()
    faults = (
        Fault(What.DECIDE_ONE, When(1, "vote", rng.choice([1, 2, 3])), node, 25.0),
        Fault(What.FREEZE, When(1, "decide", 1, reply=True), "source", rng.choice([9.0, 15.0])),
    )
    return replace(BASE, standbys=1, faults=faults)


def _term(draw: Draw, rng: random.Random) -> Schedule:
    """Two who stand by see at once that the trainer is dead."""
    when = draw.when(["forward", "receipt", "prepare", "vote", "decide"])
    return replace(BASE, standbys=2, faults=(Fault(What.KILL, when, "leader", 25.0),))


def _add(draw: Draw, rng: random.Random) -> Schedule:
    when = When(rng.randrange(2), "forward", rng.choice([1, 2, 3]))
    return replace(BASE, faults=(Fault(What.FAIL_TO_ADD, when, draw.node()),))


def _digest(_: Draw, rng: random.Random) -> Schedule:
    """One is cut off with a whole sum in its hands; the others go on, and it comes back."""
    when = When(0, rng.choice(["vote", "sum"]), rng.choice([1, 2, 3, 4]))
    seconds = rng.choice([4.0, 6.0, 9.0, 12.0])
    return replace(BASE, steps=1, faults=(Fault(What.FREEZE, when, "source", seconds),))


_AIMS: dict[str, Callable[[Draw, random.Random], Schedule]] = {
    "round": _round,
    "bar": _bar,
    "mark": _mark,
    "term": _term,
    "add": _add,
    "digest": _digest,
}
