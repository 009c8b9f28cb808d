"""Whole steps in a model swarm with faults: each microbatch counts exactly once, whoever dies."""

from __future__ import annotations

import random

import pytest
from step_world import Plan, Violation, World


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_every_microbatch_counts_once_whatever_is_lost_late_or_dead(first: int) -> None:
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        plan = Plan(
            stages=rng.randint(1, 3),
            replicas=rng.randint(1, 3),
            microbatches=rng.randint(1, 5),
            faults=rng.randint(1, 12),
        )
        world = World(seed, plan)
        world.run()
        assert len(world.decisions) == plan.steps, f"seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_no_single_lost_message_repeats_work_or_costs_a_member(seed: int) -> None:
    clean = World(seed, Plan(2, 2, 3, steps=1))
    clean.run()
    assert clean.counted == 2 * 3
    for lost in range(1, clean.messages + 1):
        world = World(seed, Plan(2, 2, 3, steps=1, lose=frozenset({lost})))
        world.run()
        assert (world.counted, world.removals) == (2 * 3, 0), f"message {lost}"


@pytest.mark.parametrize("kind", ["early", "unsure", "late", "slow", "replay", "straggler"])
def test_no_early_limit_late_message_or_old_one_repeats_work(kind: str) -> None:
    struck = 0
    for seed in range(50):
        world = World(seed, Plan(2, 2, 3, steps=1, faults=1, chance=0.1, kinds=(kind,)))
        world.run()
        struck += world.budget == 0
        assert (world.counted, world.removals) == (2 * 3, 0), f"seed {seed}"
    assert struck > 5


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        ({"bar", "seal"}, "straggler"),
        ({"round name"}, "replay"),
        ({"atomic add"}, "explode"),
    ],
)
def test_the_audit_notices_a_rule_that_is_switched_off(rules: set[str], fault: str) -> None:
    def run(off: frozenset[str]) -> None:
        for seed in range(40):
            plan = Plan(2, 2, 4, faults=20, chance=0.4, kinds=(fault,), off=off)
            World(seed, plan).run()

    run(frozenset())
    with pytest.raises(Violation, match="piece"):
        run(frozenset(rules))


def test_one_bad_peer_does_not_make_a_step_be_skipped() -> None:
    for seed in range(10):
        world = World(seed, Plan(3, 2, 4, bad=frozenset({"stage0-0"})))
        world.run()
        assert [decision.update.skip for decision in world.decisions] == [False, False]
        assert all("stage0-0" not in decision.counts[0] for decision in world.decisions)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_gradient_that_nobody_finds_finite_skips_the_step(replicas: int) -> None:
    for seed in range(5):
        world = World(seed, Plan(2, replicas, 3, nan=frozenset({1})))
        world.run()
        assert [decision.update.skip for decision in world.decisions] == [True, True]
