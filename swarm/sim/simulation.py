"""What the parts of a simulated swarm share: the clock, the network, who is there."""

from __future__ import annotations

import random
from statistics import median
from typing import TYPE_CHECKING

from swarm.core.backoff import Backoff
from swarm.core.wiring import Wiring
from swarm.sim.clock import Clock
from swarm.sim.costs import Costs
from swarm.sim.direct import Direct
from swarm.sim.directory import Directory
from swarm.sim.joins import Joins
from swarm.sim.leaving import Leaving
from swarm.sim.meter import Meter
from swarm.sim.network import Delays, Host
from swarm.sim.relay import Relay
from swarm.sim.rounds import Rounds
from swarm.sim.server import Load, Pass, Server
from swarm.sim.trainer import Trainer
from swarm.sim.world import Machine, World
from swarm.types import PeerId, Replica

if TYPE_CHECKING:
    from swarm.sim.world import Outcome

FREE_TRIES = 3
AGAIN = Backoff(first_s=0.05, cap_s=2.0)
"""A microbatch that failed so often waits before each further try, as in ``peers``."""

ATTEMPT_S = 10.0
SLOWEST_LINK = 1 << 20
"""Bytes per second: what the time limit of averaging allows for."""


class Simulation:
    """One run of ``world``, wired by ``wiring``. ``log``: write the decisions down."""

    busy_pause = Backoff(first_s=0.02, cap_s=1.0)

    def __init__(self, world: World, *, log: bool, wiring: Wiring) -> None:
        self.world = world
        self.clock = Clock()
        self.rng = random.Random(world.seed)
        self.delays = Delays(world.latency)
        self.costs = Costs(world)
        self.machines: dict[PeerId, Machine] = {m.peer: m for m in world.machines}
        self.hosts: dict[PeerId, Host] = {}
        self.servers: dict[Replica, Server] = {}
        self.serving: dict[PeerId, Server] = {}
        """The server that each host runs now."""
        self.moving: dict[PeerId, int] = {}
        """Who is on the way to another stage: the number of its move."""
        self.log: list[str] | None = [] if log else None
        self.loss = 1.0 / world.microbatches
        self.wiring = wiring
        self.meter = Meter(self)
        self.rounds = Rounds(self)
        self.joins = Joins(self)
        self.leaving = Leaving(self)
        self.directory = Directory(self)
        self.way = Relay(self) if world.relayed else Direct(self)
        rate = world.trainer_bytes_per_s
        self.trainer = Trainer(self, Host("trainer", world.trainer_region, rate, rate))

    @property
    def outcome(self) -> Outcome:
        return self.meter.outcome

    def tell(self, line: str) -> None:
        """A line for the log of decisions."""
        if self.log is not None:
            self.log.append(f"{self.clock.now:.6f} {line}")

    def send_on(self, done: Pass, load: Load, origin: Load | None) -> None:
        self.way.send_on(done, load, origin)

    def noticed_at(self, host: Host, delay: float) -> float:
        """When a caller, ``delay`` away, notices that ``host`` is dead."""
        return max(self.clock.now + delay, host.dead_at + self.world.silence_s)

    def broke(self, host: Host, called: float) -> bool:
        """Whether a call of that time was under way when ``host`` died; else there was nobody."""
        return called < host.dead_at

    def averaging_limit_s(self, stage: int) -> float:
        """How long averaging may take on the slowest link that is allowed for."""
        return 2 * self.world.stages[stage].vector_bytes / SLOWEST_LINK

    def attempt_s(self) -> float:
        """Floor of an attempt's time limit: as a run's owner would set it for such work."""
        world = self.world
        if world.attempt_s or not world.machines:
            return world.attempt_s or ATTEMPT_S
        return max(ATTEMPT_S, sum(self.costs.work) / median(m.tflops for m in world.machines))

    def launch_pause_s(self, tries: int) -> float:
        """How long a microbatch waits before its try number ``tries``."""
        return AGAIN.pause(tries - FREE_TRIES, self.rng) if tries > FREE_TRIES else 0.0

    def serves(self, server: Server) -> None:
        """It has been admitted."""
        self.joins.ended(server)
        server.since = self.clock.now
        number = self.moving.pop(server.host.peer, None)
        if number is not None:
            self.meter.arrived(number)
        self.tell(f"serves {server.me.peer} {server.stage}")

    # -- who is there -------------------------------------------------------------------------

    def host(self, machine: Machine) -> Host:
        """It comes into being."""
        host = Host(machine.peer, machine.region, machine.up_bytes_per_s, machine.down_bytes_per_s)
        self.hosts[machine.peer] = host
        return host

    def serve(self, host: Host, stage: int) -> Server:
        """``host`` begins to serve ``stage``; the same machine elsewhere is another replica."""
        before = self.serving.get(host.peer)
        boot = 0 if before is None else int(before.me.boot, 16) + 1
        server = Server(self, host, Replica(host.peer, f"{boot:04x}"), stage)
        self.servers[server.me] = self.serving[host.peer] = server
        return server

    def kill(self, host: Host) -> None:
        """As by SIGKILL, or a host that is taken away: nothing is said to anyone."""
        host.dead_at = self.clock.now
        server = self.serving.pop(host.peer, None)
        if server is None:
            return
        self.joins.ended(server)
        self.leaving.ended(server)
        self.moving.pop(host.peer, None)
        for call in list(server.calls):
            call.broken()
        server.calls.clear()
        self.trainer.members.renew(server)
        self.meter.left(host.peer)
