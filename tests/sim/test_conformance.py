"""One scenario through the real shells and through the simulator: the same decisions.

The shells run in one process on a virtual clock, with real messages over a network that delays
each of them alike. Computing takes what each peer is said to take, so what is decided, in which
order and when, must be the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import anyio
import pytest

from peers.faults import Delay, anything
from swarm.core.closing import Prepare
from swarm.core.flight import Launch
from swarm.core.step import Decide, Remove
from swarm.sim.engine import simulate
from swarm.sim.simulation import Simulation
from swarm.sim.trainer import Trainer
from swarm.sim.world import Latency, Machine, Rebalancing, StageWork
from swarm.sim.world import World as SimulatedWorld
from tests.chaos.harness import World, digits_manifest, identity, run_world

# Times that have no small common multiple, so that no two things happen at the same moment.
BETWEEN_S = 0.00317
TO_TRAINER_S = (0.00389, 0.00283, 0.00433, 0.00347, 0.00229, 0.00411, 0.00257, 0.00301)
"""One way: between two peers, and between the trainer and each peer, in order of their start."""
UNITS_S = (0.01013, 0.01571, 0.02237, 0.01129, 0.01933, 0.01367, 0.02719, 0.01019)
STEPS = 3
TRAINER = identity(1).peer_id


@dataclass(frozen=True)
class Decided:
    """Something that was decided, ``at`` so many seconds after the first launch."""

    at: float
    what: str

    def __str__(self) -> str:
        return f"{self.at:.6f} {self.what}"


@dataclass
class Scenario:
    """``replicas[s]`` of each stage; ``UNITS_S`` says how fast they are, in order of their start.

    ``kill``: (which peer, how long after the first launch), or None.
    """

    replicas: tuple[int, ...]
    microbatches: int
    seed: int
    kill: tuple[int, float] | None = None
    steps: int = STEPS

    @property
    def placed(self) -> list[tuple[int, str, float]]:
        """Stage, peer and unit of each peer."""
        stages = [s for s, count in enumerate(self.replicas) for _ in range(count)]
        return [
            (stage, identity(101 + index).peer_id, UNITS_S[index])
            for index, stage in enumerate(stages)
        ]

    @property
    def delays(self) -> dict[tuple[str, str], float]:
        """One way, in seconds, between any two."""
        peers = [peer for _, peer, _ in self.placed]
        between = {(a, b): BETWEEN_S for a in peers for b in peers if a < b}
        return between | {(TRAINER, peer): TO_TRAINER_S[i] for i, peer in enumerate(peers)}


ROOM = 128
"""Nobody is ever busy: how long a push waits then is drawn by lot, from a source of its own."""


def in_the_simulator(scenario: Scenario, duration_s: float) -> list[Decided]:
    killed = {} if scenario.kill is None else {scenario.kill[0]: scenario.kill[1]}
    machines = tuple(
        Machine(peer, 1.0 / unit_s, stage=stage, region=peer, leaves_s=killed.get(index, inf))
        for index, (stage, peer, unit_s) in enumerate(scenario.placed)
    )
    found = SimulatedWorld(
        stages=(StageWork(1.0, 2.0, 0, 0, vector_bytes=4),) * len(scenario.replicas),
        machines=machines,
        duration_s=duration_s,
        seed=scenario.seed,
        microbatches=scenario.microbatches,
        trainer_region=TRAINER,
        latency=Latency(between=scenario.delays),
        rebalancing=Rebalancing.NONE,
        queue=ROOM,
        contexts=ROOM,
    )
    log = simulate(found, log=True).decisions
    decided = []
    for line in log:
        at, what, *rest = line.split()
        if what in ("launch", "close"):
            del rest[1]  # numbers of stamps: other messages take some too
        if what == "remove":
            del rest[1:]  # of two that find it out at one moment, either may be the first
        decided.append(Decided(float(at), " ".join([what, *rest])))
    return decided


@dataclass
class Recorder:
    """Takes down what the real trainer's instructions are."""

    began: float | None = None
    decided: list[Decided] = field(default_factory=list)
    _told: set[object] = field(default_factory=set)

    def attach(self, world: World) -> None:
        instructions = world.trainer.instructions
        carry_out = instructions.carry_out

        def recorded(work, do) -> None:
            self._take(do)
            carry_out(work, do)

        instructions.carry_out = recorded  # type: ignore[method-assign]

    def _take(self, do: object) -> None:
        match do:
            case Launch():
                self.began = anyio.current_time() if self.began is None else self.began
                route = " ".join("|".join(r.peer for r in short) for short in do.route)
                self._note(f"launch {do.attempt.m} {route}")
            case Prepare() if self._first(do.round):
                members = " ".join(sorted(member.peer for member in do.members))
                self._note(f"close {do.stage} {members}")
            case Remove():
                self._note(f"remove {do.replica.peer}")
            case Decide() if self._first(do.decision.mark):
                self._decision(do)

    def _decision(self, do: Decide) -> None:
        self._note(f"decide {do.decision.mark.t}")
        for counts in do.decision.counts:
            self._note("counts " + " ".join(f"{p}={n}" for p, n in sorted(counts.items())))

    def _first(self, what: object) -> bool:
        new = what not in self._told
        self._told.add(what)
        return new

    def _note(self, what: str) -> None:
        assert self.began is not None
        self.decided.append(Decided(anyio.current_time() - self.began, what))


def in_the_shells(scenario: Scenario) -> list[Decided]:
    recorder = Recorder()

    async def play(world: World) -> None:
        for (one, other), delay_s in scenario.delays.items():
            world.faults.add(anything(one, other), Delay(delay_s))
            world.faults.add(anything(other, one), Delay(delay_s))
        for stage, _, unit_s in scenario.placed:
            await world.start(stage, unit_s=unit_s)
        for stage, count in enumerate(scenario.replicas):
            await world.wait_for(stage, count)
        recorder.attach(world)
        if scenario.kill is not None:
            world.tasks.start_soon(kill_in_time, world)
        await world.train(scenario.steps)

    async def kill_in_time(world: World) -> None:
        assert scenario.kill is not None
        which, after_s = scenario.kill
        await anyio.sleep(after_s)
        await world.kill(list(world.peers.values())[which])

    manifest = digits_manifest(
        **{
            "stages.count": len(scenario.replicas),
            "batch.microbatches": scenario.microbatches,
            "limits.queue": ROOM,
            "limits.contexts": ROOM,
        }
    )
    run_world(manifest, play, seed=scenario.seed)
    return recorder.decided


@pytest.fixture
def network_of_the_shells(monkeypatch):
    """There a dead process is noticed by whatever gets to it, as if it had never been there, and
    what it sent is lost with it, on its way or not."""
    hears = Trainer.hears

    def unless_dead(self, receipt, host, sent_at):
        if host.dead_at > self.sim.clock.now:
            hears(self, receipt, host, sent_at)

    monkeypatch.setattr(Simulation, "noticed_at", lambda sim, host, delay: sim.clock.now)
    monkeypatch.setattr(Simulation, "broke", lambda sim, host, called: False)
    monkeypatch.setattr(Trainer, "hears", unless_dead)


def same_decisions(scenario: Scenario) -> None:
    real = in_the_shells(scenario)
    simulated = in_the_simulator(scenario, duration_s=real[-1].at + 0.001)
    for one, other in zip(real, simulated, strict=False):
        assert one.what == other.what, f"{one}\n{other}"
        assert one.at == pytest.approx(other.at, abs=2e-6), f"{one}\n{other}"
    assert len(real) == len(simulated)
    assert sum(d.what.startswith("decide") for d in real) == scenario.steps


@pytest.mark.parametrize(
    ("replicas", "microbatches", "seed"),
    [
        ((2, 2, 2), 16, 0),
        ((2, 2, 2), 40, 1),
        ((1, 3, 2), 24, 2),
        ((1, 1, 1), 20, 4),
    ],
)
def test_one_scenario_through_the_shells_and_the_simulator(replicas, microbatches, seed):
    same_decisions(Scenario(replicas, microbatches, seed))


# Not one of the first stage: the trainer's own pushes to it would all fail at one moment, and in
# which order they do is a matter of chance in the shells.
@pytest.mark.usefixtures("network_of_the_shells")
@pytest.mark.parametrize("which", [2, 3, 4, 5])
def test_the_same_is_decided_when_a_peer_is_killed(which):
    killed = (which, 0.21317)
    same_decisions(Scenario((2, 2, 2), microbatches=28, seed=which, kill=killed, steps=2))
