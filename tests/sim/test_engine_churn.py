"""The simulator under churn: every microbatch counts once, the dead are found out, peers move."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from swarm.sim.engine import simulate
from swarm.sim.world import Latency, Machine, Outcome, Rebalancing, World
from tests.sim.worlds import machines, stages, world


def audit(outcome: Outcome) -> int:
    """Each step counted each microbatch exactly once in every stage. Returns how many steps."""
    found = outcome.world
    counts = [line.split()[2:] for line in outcome.decisions if line.split()[1] == "counts"]
    decided = len(lines(outcome, "decide"))
    assert len(counts) == decided * len(found.stages)
    assert len(outcome.steps) <= decided <= len(outcome.steps) + 1
    for entries in counts:
        assert sum(int(entry.rpartition("=")[2]) for entry in entries) == found.microbatches
    return len(outcome.steps)


def lines(outcome: Outcome, what: str) -> list[tuple[float, str]]:
    """When, and the rest of each line that begins with ``what``."""
    split = [line.split(maxsplit=2) for line in outcome.decisions]
    return [(float(at), rest[0]) for at, kind, *rest in split if kind == what]


# -- who dies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_kills_lose_no_microbatch_and_count_none_twice(seed):
    ends = {f"{s}.{i}": 3.0 + 5.7 * i + 2.3 * s + 0.37 * seed for s in range(3) for i in range(2)}
    found = world(
        machines=machines([3, 3, 3], leaves_s=ends),
        microbatches=20,
        seed=seed,
        silence_s=1.0,
        latency=Latency(0.01),
    )
    outcome = simulate(found, log=True)
    assert audit(outcome) >= 4
    assert outcome.resent > 0


def test_newcomers_and_kills_together_lose_no_microbatch():
    dying = machines(
        [3, 3, 3], leaves_s={f"{s}.{i}": 9.1 + s + 4 * i for s in range(3) for i in (0, 1)}
    )
    coming = tuple(Machine(f"new{i}", 10.0, arrives_s=5.0 + 3.3 * i) for i in range(6))
    found = world(
        stages=stages(3, state_bytes=10**6, vector_bytes=10**5),
        machines=tuple(
            replace(m, up_bytes_per_s=1e6, down_bytes_per_s=1e6) for m in dying + coming
        ),
        microbatches=20,
        silence_s=1.0,
        rebalancing=Rebalancing.OURS,
        rebalance_s=10.0,
    )
    outcome = simulate(found, log=True)
    assert audit(outcome) >= 4
    served = {line.split()[0] for _, line in lines(outcome, "serves")}
    assert served == {f"new{i}" for i in range(6)}


def test_a_killed_peer_is_found_out_after_its_silence_and_its_work_is_sent_again():
    died, silence_s = 7.05, 2.0
    found = world(
        machines=machines([2, 2, 2], leaves_s={"1.1": died}), silence_s=silence_s, microbatches=64
    )
    outcome = simulate(found, log=True)
    ((at, who),) = lines(outcome, "remove")
    assert who.startswith("1.1 ")
    assert died + silence_s <= at <= died + 2 * silence_s + 1.0
    again = [line.split()[0] for when, line in lines(outcome, "launch") if when >= at]
    before = [line.split()[0] for when, line in lines(outcome, "launch") if when < at]
    first_step = [m for m in again if m in before]
    assert len(first_step) >= outcome.resent > 0


def test_an_idle_peer_that_dies_is_found_out_too():
    """While a step is averaged nobody sends anything: the trainer's renewals find it out."""
    slow_link = [replace(m, up_bytes_per_s=1e3, down_bytes_per_s=1e3) for m in machines([2, 1, 1])]
    died = 5.0
    found = world(
        stages=stages(3, output_bytes=0, gradient_bytes=0, vector_bytes=10**5),
        machines=tuple(replace(m, leaves_s=died if m.peer == "0.1" else inf) for m in slow_link),
        microbatches=4,
        silence_s=1.0,
        window=4,
    )
    outcome = simulate(found, log=True)
    removed = lines(outcome, "remove")
    assert [who.split()[0] for _, who in removed] == ["0.1"]
    assert removed[0][0] < died + 3.0 + 2 * 1.0
    assert audit(outcome) >= 2


def test_a_stage_that_nobody_serves_waits_for_a_newcomer_and_goes_on():
    found = world(
        stages=stages(3, state_bytes=1000),
        machines=(
            *machines([1, 1, 1], leaves_s={"1.0": 20.0}),
            Machine("new", 10.0, arrives_s=40.0),
        ),
        duration_s=200.0,
        silence_s=1.0,
    )
    outcome = simulate(found, log=True)
    assert [s.peers for s in outcome.samples][-1] == (1, 1, 1)
    ((served, _),) = lines(outcome, "serves")
    assert 20.0 + 60.0 < served < 20.0 + 60.0 + 10.0  # the patience, and a little
    assert not [at for at in outcome.steps if 30.0 < at < served]
    assert [at for at in outcome.steps if at > served]
    audit(outcome)


def test_who_drains_loses_no_work():
    leaving = tuple(
        replace(m, leaves_s=11.3, drains=True) if m.peer == "1.1" else m
        for m in machines([2, 2, 2])
    )
    outcome = simulate(world(machines=leaving, microbatches=32), log=True)
    assert outcome.resent == 0
    assert audit(outcome) >= 3
    assert outcome.samples[-1].peers == (2, 1, 2)


# -- who comes -------------------------------------------------------------------------------------


def test_a_newcomer_serves_once_it_has_the_state_over_its_donors_link():
    rate, state = 1e5, 10**6
    base = [replace(m, up_bytes_per_s=rate, down_bytes_per_s=rate) for m in machines([1, 1, 1])]
    new = Machine("new", 10.0, up_bytes_per_s=rate, down_bytes_per_s=rate, arrives_s=5.0, stage=1)
    found = world(
        stages=stages(3, output_bytes=0, gradient_bytes=0, state_bytes=state),
        machines=(*base, new),
    )
    outcome = simulate(found, log=True)
    ((at, who),) = lines(outcome, "serves")
    assert who == "new 1"
    download_s = state / rate
    assert 5.0 + download_s < at < 5.0 + download_s + 2.0 + 2.5
    assert outcome.received_bytes["new"] >= state
    assert outcome.sent_bytes["1.0"] >= state
    last = [line for line in outcome.decisions if " counts " in line][-2]
    assert "new=" in last


def test_a_newcomer_without_a_stage_goes_where_it_is_needed_most():
    new = Machine("new", 10.0, arrives_s=5.0)
    outcome = simulate(world(machines=(*machines([2, 1, 2]), new)), log=True)
    assert [who for _, who in lines(outcome, "serves")] == ["new 1"]


def test_a_machine_into_which_no_stage_fits_goes_away_again():
    small = Machine("small", 10.0, memory_bytes=10, arrives_s=5.0)
    found = world(stages=stages(3, memory_bytes=1000), machines=(*machines([1, 1, 1]), small))
    outcome = simulate(found, log=True)
    assert outcome.samples[-1].peers == (1, 1, 1)
    assert lines(outcome, "serves") == []


# -- who moves -------------------------------------------------------------------------------------


def lopsided(**changes: object) -> World:
    """Nine peers; stage 1 loses two of its three replicas after 30 s."""
    return world(
        machines=machines([3, 3, 3], leaves_s={"1.1": 30.0, "1.2": 30.0}),
        stages=stages(3, state_bytes=10**6),
        microbatches=24,
        duration_s=240.0,
        silence_s=2.0,
        rebalance_s=20.0,
        **changes,
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_peer_moves_when_a_stage_loses_two_of_three_replicas(seed):
    found = lopsided(rebalancing=Rebalancing.OURS, seed=seed)
    outcome = simulate(found, log=True)
    assert audit(outcome) > 10
    move = outcome.moves[0]
    assert (move.target, move.source in (0, 2)) == (1, True)
    assert move.at_s < move.done_s < found.duration_s
    assert sorted(outcome.samples[-1].peers) == [2, 2, 3]
    assert outcome.samples[-1].peers[1] == 2
    assert len(outcome.moves) == 1
    assert "samples/s" in move.reason


def test_nobody_moves_unless_rebalancing_is_on():
    outcome = simulate(lopsided(rebalancing=Rebalancing.NONE))
    assert outcome.moves == []
    assert outcome.samples[-1].peers == (3, 1, 3)


def test_the_papers_rule_moves_somebody_too():
    outcome = simulate(lopsided(rebalancing=Rebalancing.PAPER), log=True)
    assert outcome.moves
    assert all(move.source != move.target for move in outcome.moves)
    audit(outcome)


def test_the_last_replica_of_a_stage_never_moves():
    found = world(
        machines=(*machines([1, 1]), Machine("2.0", 1.0, stage=2)),
        rebalancing=Rebalancing.OURS,
        rebalance_s=5.0,
    )
    assert simulate(found).moves == []
