"""Rates instead of microbatches: what is exact, and the microbatch mode beside it."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from swarm.core.rebalancing import Move, Serving, Settings, View, best_move
from swarm.sim.costs import Costs
from swarm.sim.engine import simulate
from swarm.sim.fluid import simulate_fluid
from swarm.sim.listing import Listing
from swarm.sim.population import renewal
from swarm.sim.report import to_json
from swarm.sim.world import Latency, Machine, Outcome, Rebalancing, World
from tests.sim.worlds import ACTIVATION, GRADIENT, machines, stages, world

SERVICE_S = 0.3
"""3 TFLOP on machines of 10."""


# -- exact -------------------------------------------------------------------------------------


def test_one_peer_per_stage_is_the_synchronous_pipeline():
    outcome = simulate_fluid(world(duration_s=600.0))
    assert outcome.done == pytest.approx(600 / ((16 + 3 - 1) * SERVICE_S) * 16)


def test_the_slowest_stage_sets_the_pace():
    few = world(machines=machines([3, 1, 2]), microbatches=1 << 16, duration_s=1e5)
    assert simulate_fluid(few).done == pytest.approx(1e5 / SERVICE_S, rel=1e-3)


def test_twice_as_fast_is_twice_as_much():
    fast = world(machines=machines([1, 1, 1], tflops=20.0))
    assert simulate_fluid(fast).done == pytest.approx(2 * simulate_fluid(world()).done)


def test_averaging_holds_up_every_step():
    slow = tuple(replace(m, up_bytes_per_s=1e4, down_bytes_per_s=1e4) for m in machines([2, 2, 2]))
    plain = world(machines=slow, duration_s=1000.0)
    averaging = replace(plain, stages=stages(3, vector_bytes=20_000))
    steps = simulate_fluid(averaging).done / 16
    # Two members: each sends and receives the vector once, at 10 kB/s.
    assert 1000 / steps == pytest.approx(1000 * 16 / simulate_fluid(plain).done + 2.0)


def test_a_boundary_moves_one_activation_on_and_one_gradient_back():
    outcome = simulate_fluid(world(machines=machines([2, 2, 2])))
    each = ACTIVATION + GRADIENT
    assert sum(outcome.sent_bytes.values()) == pytest.approx(2 * outcome.done * each)
    assert sum(outcome.received_bytes.values()) == pytest.approx(2 * outcome.done * each)


def test_progress_rises_to_one():
    told: list[float] = []
    simulate_fluid(world(), progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1


def churned(seed: int) -> World:
    spans = renewal(12, random.Random(seed), until_s=600.0, lifetime_s=300.0)
    return world(
        stages=stages(3, state_bytes=5_000),
        machines=tuple(
            Machine(f"p{i}", 10.0, None, 1e4, 1e4, "here", span.arrives_s, span.leaves_s)
            for i, span in enumerate(spans)
        ),
        duration_s=600.0,
        seed=seed,
        rebalancing=Rebalancing.OURS,
    )


def test_the_same_seed_gives_the_same_outcome_byte_for_byte():
    assert to_json(simulate_fluid(churned(1))) == to_json(simulate_fluid(churned(1)))
    assert to_json(simulate_fluid(churned(1))) != to_json(simulate_fluid(churned(2)))


# -- coming and going ----------------------------------------------------------------------------


def throughput_at(outcome: Outcome, time_s: float) -> float:
    return next(s.throughput for s in outcome.samples if s.at_s >= time_s)


def test_a_stage_that_nobody_serves_stops_all_until_somebody_comes():
    late = replace(machines([1])[0], peer="late", arrives_s=35.0, stage=2, down_bytes_per_s=1e6)
    gone = machines([1, 1, 1], leaves_s={"2.0": 15.0})
    outcome = simulate_fluid(
        world(stages=stages(3, state_bytes=10_000_000), machines=(*gone, late), duration_s=100.0)
    )
    assert throughput_at(outcome, 30) == throughput_at(outcome, 40) == 0
    assert throughput_at(outcome, 60) > 0, "ten seconds after it came it has the state"
    assert [s.peers[2] for s in outcome.samples[:6]] == [1, 0, 0, 0, 1, 1]


def test_who_dies_is_missed_and_what_it_did_in_the_step_is_done_again():
    calm = world(machines=machines([2, 2, 2]), microbatches=64, duration_s=1000.0)
    # Half through a step: its stage counted half of what was done until then with it.
    step_s = 64 / (simulate_fluid(calm).done / 1000)
    killed = replace(calm, machines=machines([2, 2, 2], leaves_s={"1.0": 20.5 * step_s}))
    outcome = simulate_fluid(killed)
    assert outcome.resent == pytest.approx(64 / 4 + 2, abs=1)
    drained = tuple(replace(m, drains=m.leaves_s < inf) for m in killed.machines)
    assert simulate_fluid(replace(killed, machines=drained)).resent == 0
    after = simulate_fluid(world(machines=machines([2, 1, 2]), microbatches=64)).samples[-1]
    assert outcome.samples[-1].throughput == pytest.approx(after.throughput)


def test_no_step_ends_before_a_loss_in_it_is_found_out():
    calm = world(machines=machines([3, 9, 3]), microbatches=16, duration_s=100.0)
    losses = {f"1.{i}": 10.0 + i for i in range(6)}
    killed = replace(calm, machines=machines([3, 9, 3], leaves_s=losses), silence_s=20.0)
    outcome = simulate_fluid(killed)
    # The stage has replicas enough; but from 10 to 15 + 20 seconds one is always being missed.
    assert throughput_at(outcome, 30) == 0
    assert throughput_at(outcome, 50) == pytest.approx(throughput_at(outcome, 10))


def test_a_newcomer_goes_where_it_is_needed_and_fits():
    def where(memory_bytes: int | None) -> tuple[int, ...]:
        new = Machine("new", 10.0, memory_bytes, arrives_s=10.0)
        big = (*stages(2), *stages(1, memory_bytes=100))
        outcome = simulate_fluid(world(stages=big, machines=(*machines([3, 2, 1]), new)))
        return outcome.samples[-1].peers

    assert where(None) == (3, 2, 2)
    assert where(100) == (3, 2, 2)
    assert where(99) == (3, 3, 1)


def test_who_fits_nowhere_goes_away_again():
    tiny = Machine("tiny", 10.0, 1)
    big = stages(3, memory_bytes=100)
    outcome = simulate_fluid(world(stages=big, machines=(*machines([1, 1, 1]), tiny)))
    assert outcome.samples[-1].peers == (1, 1, 1)


# -- moves ---------------------------------------------------------------------------------------


def test_somebody_takes_the_place_of_the_dead_of_another_stage():
    outcome = simulate_fluid(
        world(
            machines=machines([3, 3, 3], leaves_s={"1.0": 100.0, "1.1": 100.0}),
            duration_s=400.0,
            rebalancing=Rebalancing.OURS,
            rebalance_s=30.0,
        )
    )
    [move] = outcome.moves
    assert move.target == 1
    assert move.at_s <= 160
    assert move.done_s < inf
    assert sorted(outcome.samples[-1].peers) == [2, 2, 3]


def test_a_move_waits_for_the_step_and_costs_a_download():
    swarm = machines([5, 1])
    slow = tuple(replace(m, up_bytes_per_s=1e3, down_bytes_per_s=1e3) for m in swarm)
    outcome = simulate_fluid(
        world(
            stages=stages(2, output_bytes=0, gradient_bytes=0, state_bytes=50_000),
            machines=slow,
            duration_s=600.0,
            rebalancing=Rebalancing.OURS,
        )
    )
    for move in outcome.moves:
        assert move.done_s - move.at_s >= 50, "50 kB at 1 kB/s"
    assert [(m.source, m.target) for m in outcome.moves] == [(0, 1), (0, 1)]
    assert sum(outcome.sent_bytes.values()) == pytest.approx(2 * 50_000)
    assert sum(outcome.received_bytes.values()) == pytest.approx(2 * 50_000)


def test_a_balanced_swarm_stays_as_it_is_but_not_by_the_paper_s_rule():
    def moves(rule: Rebalancing) -> int:
        swarm = world(machines=machines([4, 4, 4]), duration_s=1200.0, rebalancing=rule)
        return len(simulate_fluid(swarm).moves)

    assert moves(Rebalancing.OURS) == 0
    assert moves(Rebalancing.PAPER) >= 15
    assert moves(Rebalancing.NONE) == 0


@pytest.mark.parametrize("seed", range(40))
def test_the_short_cut_never_hides_a_move(seed):
    rng = random.Random(seed)
    swarm = machines([rng.randint(1, 9) for _ in range(3)], tflops=10.0)
    costs = Costs(world(machines=swarm))
    listing = Listing(costs)
    for machine in swarm:
        fast = replace(machine, tflops=rng.choice([10.0, rng.uniform(1, 20)]))
        listing.put(fast, machine.stage or 0, settled=True)
    settings = Settings(gain=rng.choice([0.01, 0.05, 0.3]))
    if isinstance(best_move(listing.view(), settings), Move):
        assert listing.may_gain(settings)


def test_equal_stages_give_nothing_to_gain():
    listing = Listing(Costs(world()))
    for machine in machines([5, 5, 5]):
        listing.put(machine, machine.stage or 0, settled=True)
    assert not listing.may_gain(Settings())
    assert listing.view().rates == pytest.approx(listing.sums().rates)
    assert isinstance(listing.sums(), View)
    assert isinstance(listing.view().peers[0], Serving)
    for machine in machines([0, 0, 5]):
        listing.drop(machine.peer)
    assert listing.may_gain(Settings()), "a stage has nobody"


# -- the size of a swarm ----------------------------------------------------------------------


def test_an_event_costs_no_more_in_a_larger_swarm(monkeypatch):
    def looked_up(peers: int) -> int:
        calls = 0
        rate = Costs.rate

        def counted(self: Costs, machine: Machine, stage: int) -> float:
            nonlocal calls
            calls += 1
            return rate(self, machine, stage)

        swarm = machines([peers] * 3)
        coming = [replace(swarm[0], peer=f"n{i}", arrives_s=5.0 + i, stage=None) for i in range(20)]
        with monkeypatch.context() as patch:
            patch.setattr(Costs, "rate", counted)
            simulate_fluid(world(machines=swarm))
            alone, calls = calls, 0
            simulate_fluid(world(machines=(*swarm, *coming)))
        return calls - alone

    assert looked_up(200) == looked_up(2)


# -- beside the microbatch mode --------------------------------------------------------------


def big(per_stage: list[int], **changes: object) -> World:
    """The paper's stages on its GPUs. Steps are long, so that few are enough; attempts may take
    long, since nothing is lost on the way."""
    leaves = changes.pop("leaves_s", {})
    spread = changes.pop("spread", 0.0)
    rng = random.Random(7)
    swarm = tuple(
        replace(m, tflops=15.0 * (1 + spread * rng.uniform(-1, 1)), up_bytes_per_s=up)  # type: ignore[operator]
        for up in [changes.pop("up", inf)]
        for m in machines(per_stage, leaves_s=leaves)  # type: ignore[arg-type]
    )
    given: dict[str, object] = {
        "stages": stages(
            len(per_stage),
            forward_tflop=14.3,
            backward_tflop=28.6,
            output_bytes=8_400_000,
            gradient_bytes=8_400_000,
            vector_bytes=changes.pop("vector_bytes", 0),
            state_bytes=changes.pop("state_bytes", 0),
        ),
        "machines": swarm,
        "duration_s": 1500.0,
        "microbatches": 256,
        "latency": Latency(0.02),
        "attempt_s": 300.0,
    }
    return world(**(given | changes))


STEADY = {
    "one per stage": big([1, 1, 1], microbatches=64),
    "far apart": big([1, 1, 1], microbatches=64, latency=Latency(0.2)),
    "three per stage": big([3, 3, 3]),
    "unequal stages": big([4, 2, 4], duration_s=1800.0),
    "unequal speeds": big([3, 3, 3], spread=0.3),
    "averaging": big([3, 3, 3], up=25e6, vector_bytes=400_000_000),
    "slow links": big([2, 2, 2], up=4e6, duration_s=2500.0),
}


@pytest.mark.parametrize("case", STEADY)
def test_steps_take_as_long_as_in_microbatch_mode(case):
    steps = simulate(STEADY[case]).steps
    fluid = simulate_fluid(STEADY[case])
    assert len(steps) >= 4
    # The first step is not counted: in it speeds are found out.
    step_s = (steps[-1] - steps[0]) / (len(steps) - 1)
    fluid_s = STEADY[case].microbatches * STEADY[case].duration_s / fluid.done
    assert fluid_s == pytest.approx(step_s, rel=0.03)


CHURNED = {
    "kills": big([4, 4, 4], leaves_s={"0.1": 500.0, "1.2": 1000.0, "2.3": 1500.0}),
    "two of three lost": big([3, 3, 3], leaves_s={"1.1": 1000.0, "1.2": 1000.0}),
    "badly balanced": big([5, 2, 2], state_bytes=600_000_000, up=25e6),
}


@pytest.mark.parametrize("case", CHURNED)
def test_as_much_is_done_as_in_microbatch_mode(case):
    simulated = replace(
        CHURNED[case], duration_s=3600.0, microbatches=128, rebalancing=Rebalancing.OURS
    )
    micro, fluid = simulate(simulated), simulate_fluid(simulated)
    assert fluid.done == pytest.approx(micro.done, rel=0.03)
    assert len(fluid.moves) == pytest.approx(len(micro.moves), abs=1)
