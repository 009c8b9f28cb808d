"""The simulator, microbatch by microbatch: time, links and books."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.sim.engine import simulate
from swarm.sim.world import Latency, Machine, Rebalancing, WiringRule, World
from tests.sim.worlds import ACTIVATION, GRADIENT, machines, stages, world


def step_s(found: World) -> float:
    """How long the second step took: in the first, nothing has been measured yet."""
    first, second = simulate(found).steps[:2]
    return second - first


def slowest_rate(found: World) -> float:
    """Samples per second in the last half of the run, from the steps that ended in it."""
    outcome = simulate(found)
    late = [at for at in outcome.steps if at > found.duration_s / 2]
    return (len(late) - 1) * found.microbatches * found.microbatch / (late[-1] - late[0])


# -- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 5, 16])
def test_one_peer_per_stage_takes_the_time_of_a_synchronous_pipeline(microbatches):
    """Filling and draining cost one microbatch's way through the other stages, there and back."""
    forward_s, backward_s, count = 0.1, 0.2, 3
    expected = (microbatches + count - 1) * (forward_s + backward_s)
    found = world(microbatches=microbatches, window=microbatches)
    assert step_s(found) == pytest.approx(expected, abs=1e-6)


def test_latency_of_the_critical_path_is_added_once_if_microbatches_overlap():
    latency_s, microbatches = 0.01, 16
    found = world(microbatches=microbatches, window=microbatches)
    # There and back over both boundaries and to and from the trainer, then prepare, vote, decide
    # and its answer; all other latencies pass while something is computed.
    ways = 2 * 2 + 2 + 4
    late = replace(found, latency=Latency(latency_s))
    assert step_s(late) - step_s(found) == pytest.approx(ways * latency_s, abs=1e-6)


def test_machines_of_twice_the_speed_do_twice_as_much():
    slow = world(machines=machines([2, 2, 2]), microbatches=32, duration_s=60.0)
    fast = replace(slow, machines=machines([2, 2, 2], tflops=20.0), duration_s=30.0)
    assert simulate(fast).done == pytest.approx(simulate(slow).done, rel=0.02)


def test_more_replicas_of_every_stage_do_more_up_to_the_optimum():
    found = world(machines=machines([3, 3, 3]), microbatches=128, duration_s=80.0)
    outcome = simulate(found)
    # Each stage does 10 a second; a step that has to fill the pipeline does a little less.
    assert 9.0 < outcome.samples[5].optimum < 10.0
    assert 0.9 < outcome.share_of_optimum < 1.02


def test_a_machine_of_twice_the_speed_is_given_twice_as_much():
    pair = tuple(
        Machine(f"{stage}.{i}", 10.0 * (i + 1), stage=stage) for stage in range(2) for i in range(2)
    )
    found = world(stages=stages(2), machines=pair, microbatches=240, duration_s=30.0)
    outcome = simulate(found, log=True)
    counts = dict(_counts(outcome.decisions)[0][0])
    assert counts["0.1"] / counts["0.0"] == pytest.approx(2.0, rel=0.15)


# -- links -------------------------------------------------------------------------------------


def test_an_uplink_that_is_too_thin_sets_the_pace():
    """The middle stage sends an activation on and a gradient back for each microbatch."""
    rate = 2000.0  # bytes per second: 0.85 s for both, where computing takes 0.3 s
    thin = [Machine(f"{s}.0", 10.0, stage=s, up_bytes_per_s=rate) for s in range(3)]
    found = world(machines=tuple(thin), microbatches=64, duration_s=240.0)
    limit = rate / (ACTIVATION + GRADIENT)
    assert 0.9 * limit < slowest_rate(found) <= limit


def test_a_downlink_that_is_too_thin_sets_the_pace():
    rate = 2000.0
    thin = [Machine(f"{s}.0", 10.0, stage=s, down_bytes_per_s=rate) for s in range(3)]
    found = world(machines=tuple(thin), microbatches=64, duration_s=240.0)
    limit = rate / (ACTIVATION + GRADIENT)
    assert 0.9 * limit < slowest_rate(found) <= limit


def test_bytes_add_up_to_an_activation_there_and_a_gradient_back():
    found = world(microbatches=8, duration_s=1e6)
    outcome = simulate(replace(found, duration_s=simulate(replace(found, duration_s=30)).steps[2]))
    done = outcome.done
    assert done == 24
    sent, received = outcome.sent_bytes, outcome.received_bytes
    assert sent == {
        "0.0": done * ACTIVATION,
        "1.0": done * (ACTIVATION + GRADIENT),
        "2.0": done * GRADIENT,
    }
    assert received == {
        "0.0": done * GRADIENT,
        "1.0": done * (ACTIVATION + GRADIENT),
        "2.0": done * ACTIVATION,
    }


def test_averaging_takes_the_vector_round_over_the_slowest_link():
    vector, rate = 10**6, 1e5
    linked = tuple(
        replace(m, up_bytes_per_s=rate, down_bytes_per_s=rate) for m in machines([2, 1, 1])
    )
    light = stages(3, output_bytes=0, gradient_bytes=0)
    heavy = stages(3, output_bytes=0, gradient_bytes=0, vector_bytes=vector)
    found = world(machines=linked, microbatches=32, window=32)
    around_s = step_s(replace(found, stages=heavy, duration_s=200.0)) - step_s(
        replace(found, stages=light)
    )
    assert around_s == pytest.approx(2 * (1 / 2) * vector / rate, rel=0.05)


# -- through the trainer -------------------------------------------------------------------------


def test_relayed_outputs_go_through_the_trainer_and_the_inputs_come_twice():
    found = world(relayed=True, microbatches=8, duration_s=30.0)
    end = simulate(found).steps[1]
    outcome = simulate(replace(found, duration_s=end))
    done = outcome.done
    assert done == 16
    assert outcome.received_bytes["1.0"] == done * (2 * ACTIVATION + GRADIENT)
    assert outcome.sent_bytes["1.0"] == done * (ACTIVATION + GRADIENT)
    assert outcome.received_bytes["2.0"] == done * 2 * ACTIVATION


def test_relayed_the_forward_pass_is_computed_twice():
    direct = world(microbatches=48, window=48, duration_s=60.0)
    ratio = step_s(replace(direct, relayed=True)) / step_s(direct)
    assert ratio == pytest.approx(4 / 3, rel=0.03)


def test_relayed_a_thin_link_of_the_trainer_sets_the_pace_of_all():
    rate = 1e4
    found = world(
        relayed=True, trainer_bytes_per_s=rate, microbatches=192, window=16, duration_s=480.0
    )
    # Out: an activation for each boundary and again for each backward pass, and the gradients.
    limit = rate / (2 * (2 * ACTIVATION + GRADIENT))
    assert 0.9 * limit < slowest_rate(found) <= limit


# -- the same again ------------------------------------------------------------------------------


def churning(seed: int) -> World:
    ends = {"0.1": 7.3, "1.2": 13.1, "2.0": 21.7}
    return world(
        machines=machines([3, 3, 3], leaves_s=ends),
        microbatches=24,
        seed=seed,
        rebalancing=Rebalancing.OURS,
        rebalance_s=10.0,
        latency=Latency(0.02),
    )


def test_the_same_seed_gives_the_same_outcome():
    assert simulate(churning(1), log=True) == simulate(churning(1), log=True)


def test_another_seed_gives_another_outcome():
    assert simulate(churning(1), log=True).decisions != simulate(churning(2), log=True).decisions


def test_a_log_does_not_change_what_happens():
    with_log, without = simulate(churning(3), log=True), simulate(churning(3))
    assert without.decisions == []
    assert replace_log(with_log) == without


def replace_log(outcome):
    outcome.decisions = []
    return outcome


def test_progress_goes_to_the_end():
    told: list[float] = []
    simulate(world(), progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) <= 1000


# -- other wirings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(WiringRule))
def test_every_wiring_rule_trains_on(rule):
    ends = {"1.2": 13.1}
    found = world(machines=machines([2, 3, 2], leaves_s=ends), wiring=rule, microbatches=32)
    outcome = simulate(found, log=True, share=lambda stage, before, replica: 1.0)
    assert len(outcome.steps) >= 3
    for counts in _counts(outcome.decisions):
        assert [sum(dict(stage).values()) for stage in counts] == [32] * 3


def test_the_static_rule_follows_its_shares():
    found = world(machines=machines([1, 3, 1]), wiring=WiringRule.STATIC, microbatches=120)
    shares = {"1.0": 0.75, "1.1": 0.25}
    outcome = simulate(
        found, log=True, share=lambda s, before, replica: shares.get(replica.peer, s != 1)
    )
    counts = dict(_counts(outcome.decisions)[0][1])
    assert set(counts) == {"1.0", "1.1"}
    assert counts["1.0"] == pytest.approx(90, abs=18)


def test_the_static_rule_needs_shares():
    with pytest.raises(ValueError, match="pass share="):
        simulate(world(wiring=WiringRule.STATIC))


def test_the_paper_rule_follows_speed():
    pair = tuple(
        Machine(f"{stage}.{i}", 10.0 * (i + 1), stage=stage) for stage in range(2) for i in range(2)
    )
    found = world(stages=stages(2), machines=pair, microbatches=400, wiring=WiringRule.PAPER)
    counts = dict(_counts(simulate(found, log=True).decisions)[0][0])
    assert counts["0.1"] > 1.4 * counts["0.0"]


def _counts(decisions: list[str]) -> list[list[list[tuple[str, int]]]]:
    """By step, by stage: (peer, microbatches that count)."""
    found: list[list[list[tuple[str, int]]]] = []
    for line in decisions:
        _, what, *rest = line.split()
        if what == "decide":
            found.append([])
        elif what == "counts":
            pairs = [entry.rpartition("=") for entry in rest]
            found[-1].append([(peer, int(count)) for peer, _, count in pairs])
    return found
