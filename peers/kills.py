"""``swarm local --kill-every``: nodes of the local swarm die at random, and others come."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from swarm.errors import ConfigError

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from peers.local import LocalSwarm
    from peers.status import Monitor

REPLACE_S = 5.0
"""So long after a kill does another node start."""

LOOK_S = 0.1
WAIT_S = 1.0
"""How long a kill waits for a node that may be killed: while a decision is applied there is none
in a stage where nobody has applied it."""


@dataclass(frozen=True, slots=True)
class Kills:
    """A kill every ``every_s`` seconds of training; ``seed`` decides who dies, by lot if None."""

    every_s: float
    seed: int | None = None


def check_kills(every_s: float | None, seed: int | None, replicas: int) -> Kills | None:
    """What the options ask for.

    Raises:
        ConfigError: they do not go together.
    """
    if every_s is None:
        if seed is not None:
            raise ConfigError("--kill-seed", seed, "only with --kill-every")
        return None
    if replicas < 2:
        raise ConfigError(
            "--replicas", replicas, "2 or more with --kill-every, so that a stage goes on"
        )
    return Kills(every_s, seed)


@dataclass(frozen=True, slots=True)
class Living:
    """A node that lives, and serves or joins. ``serves``: it could go on with its stage alone."""

    name: str
    stage: int
    serves: bool


def choose_victim(living: Sequence[Living], rng: random.Random) -> Living | None:
    """Any that serves beside another one of its stage; None if there is none.

    A stage lost whole would cost the run's patience and send it back to a checkpoint. Were those
    that join killed too, none would ever arrive where kills come faster than a join takes.
    """
    serving = Counter(node.stage for node in living if node.serves)
    may_die = [node for node in living if node.serves and serving[node.stage] > 1]
    return rng.choice(may_die) if may_die else None


class Killer:
    """Kills nodes of ``swarm`` while the run of ``monitor`` trains, and starts others."""

    def __init__(self, kills: Kills, swarm: LocalSwarm, monitor: Monitor) -> None:
        self._kills, self._swarm, self._monitor = kills, swarm, monitor
        self.killed = 0
        self._told = False  # that no stage can spare a node
        self._rng, self._places = random.Random(kills.seed), random.Random(kills.seed)

    async def run(self) -> None:
        """Until it is cancelled. The first kill comes ``every_s`` after training has begun."""
        due = math.inf
        async with anyio.create_task_group() as tasks:
            while True:
                now = anyio.current_time()
                if not self._monitor.under_way:
                    due = math.inf
                elif due == math.inf:
                    due = now + self._kills.every_s
                elif now >= due and self._turn(tasks, late_s=now - due):
                    due = max(due + self._kills.every_s, now)
                await anyio.sleep(LOOK_S)

    def _turn(self, tasks: TaskGroup, late_s: float) -> bool:
        """Kill a node, or say that none can be; False: there may be one in a moment."""
        chosen = choose_victim(self._living(), self._rng)
        if chosen is not None:
            self._kill(chosen)
            self._told = False
            tasks.start_soon(self._replace)
        elif late_s >= WAIT_S:
            if not self._told:
                self._monitor.event("nobody is killed for now: no stage can spare a node")
            self._told = True
        else:
            return False
        return True

    def _living(self) -> list[Living]:
        """Each where it is now: it may have moved since its start."""
        members = self._monitor.members()
        found = [(c, members.get(c.peer)) for c in self._swarm.living()]
        return [Living(c.name, seat.stage, seat.serves) for c, seat in found if seat is not None]

    def _kill(self, victim: Living) -> None:
        child = self._swarm.children[victim.name]
        self._swarm.kill(child)
        self.killed += 1
        self._monitor.event(f"killed {victim.name} ({child.peer[-6:]}, stage {victim.stage})")

    async def _replace(self) -> None:
        """Start one where it is needed now: peers may have moved since the kill."""
        await anyio.sleep(REPLACE_S)
        coming = {child.peer or child.name: child.stage for child in self._swarm.living()}
        gone = {child.peer for child in self._swarm.children.values() if child.killed}
        stage = self._monitor.stage_in_need(coming, gone, self._places)
        child = await self._swarm.spawn(stage)
        self._monitor.event(f"started {child.name} (stage {stage})")
