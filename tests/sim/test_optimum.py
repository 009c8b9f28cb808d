"""The best assignment, kept up to date: the same as the core's, and never beaten."""

from __future__ import annotations

import itertools
import random

import pytest

from swarm.core.balance import of_equals
from swarm.core.rebalancing import Serving, View, best_assignment
from swarm.sim.costs import Costs
from swarm.sim.links import Smallest, delays, mean_delay
from swarm.sim.optimum import Optimum
from swarm.sim.world import Latency, Machine, StageWork, World
from tests.sim.worlds import machines, stages, world


def unequal_stages(rng: random.Random, count: int) -> tuple[StageWork, ...]:
    return tuple(StageWork(rng.uniform(1, 5), rng.uniform(1, 9), 0, 0) for _ in range(count))


def optimum_of(simulated: World) -> Optimum:
    found = Optimum(Costs(simulated))
    for machine in simulated.machines:
        found.add(machine)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_for_equal_peers_it_is_that_of_the_core(seed):
    rng = random.Random(seed)
    count, peers = rng.randint(1, 6), rng.randint(1, 40)
    simulated = world(stages=unequal_stages(rng, count), machines=machines([peers]))
    records = [Serving(m.peer, 0, m.tflops / Costs(simulated).work[0]) for m in simulated.machines]
    core = best_assignment(View(Costs(simulated).needs, records))
    assert optimum_of(simulated).steady == pytest.approx(core)


@pytest.mark.parametrize("seed", range(10))
def test_no_assignment_beats_it(seed):
    rng = random.Random(seed)
    peers = tuple(Machine(f"p{i}", rng.uniform(1, 10)) for i in range(6))
    simulated = world(stages=unequal_stages(rng, 3), machines=peers)
    costs = Costs(simulated)
    best = max(
        min(
            sum(costs.rate(m, s) for m, at in zip(peers, where, strict=True) if at == s)
            for s in range(3)
        )
        for where in itertools.product(range(3), repeat=6)
    )
    assert optimum_of(simulated).steady >= best * (1 - 1e-9)


def test_who_left_counts_no_longer():
    simulated = world(machines=machines([2, 2, 2]))
    found = optimum_of(simulated)
    for machine in simulated.machines[:3]:
        found.remove(machine)
    assert found.steady == optimum_of(world()).steady
    found.remove(simulated.machines[3])
    assert found.steady == 0
    assert found.in_steps == 0


def test_steps_cost_any_assignment_their_time():
    found = optimum_of(world(microbatches=16))
    assert found.in_steps == pytest.approx(found.steady * 16 / (16 + 3 - 1))


@pytest.mark.parametrize(
    ("peers", "rates", "best"),
    [(3, [1, 1, 1], 1), (2, [1, 1, 1], 0), (7, [1, 1, 1], 2), (9, [2, 1], 6), (4, [10, 1, 1], 1)],
)
def test_equals_are_whole(peers, rates, best):
    assert of_equals(peers, rates) == best


def test_bandwidth_limits_a_peer_at_the_stages_that_need_it():
    simulated = world(
        stages=stages(3),
        machines=tuple(Machine(f"p{i}", 10.0, up_bytes_per_s=850) for i in range(3)),
    )
    costs = Costs(simulated)
    assert costs.up_bytes == [1000, 1700, 700]
    assert costs.down_bytes == [700, 1700, 1000]
    rates = [costs.rate(simulated.machines[0], s) for s in range(3)]
    assert rates == [0.85, 0.5, pytest.approx(850 / 700)]
    assert optimum_of(simulated).steady == 0.5


def test_a_relayed_stage_gets_its_input_twice_and_computes_forward_twice():
    costs = Costs(world(relayed=True, trainer_bytes_per_s=6800))
    assert costs.work == [4, 4, 4]
    assert costs.down_bytes == [700, 2700, 2000]
    assert costs.up_bytes == [1000, 1700, 700]
    assert costs.most == pytest.approx(6800 / 5400)


def test_the_smallest_of_numbers_that_come_and_go():
    smallest = Smallest()
    assert smallest.value == float("inf")
    for value in (3.0, 1.0, 2.0, 1.0):
        smallest.add(value)
    smallest.discard(1.0)
    assert smallest.value == 1.0
    smallest.discard(1.0)
    assert smallest.value == 2.0
    smallest.discard(2.0)
    smallest.add(1.5)
    assert smallest.value == 1.5


def test_delays_are_means_over_where_peers_are():
    latency = Latency(0.01, {("eu", "us"): 0.05})
    assert mean_delay(latency, {"eu": 1, "us": 1}, {"us": 2}) == pytest.approx(0.03)
    assert mean_delay(latency, {}, {"us": 2}) == 0
    assert delays(latency, [{"eu": 1}, {"us": 1}], "us") == pytest.approx((0.05, 0.03))
    assert delays(Latency(0.02), [{"eu": 1}], "us") == (0.02, 0.02)
