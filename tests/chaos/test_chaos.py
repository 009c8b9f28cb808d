"""Random faults by seed, under audit; and the audit, the shrinking and the replay themselves.

``scripts/chaos.py`` runs as many seeds as asked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.aimed import aim
from tests.chaos.chaos import run
from tests.chaos.rules import RULES, switched_off
from tests.chaos.schedule import DELAYED, MOVING, Fault, Schedule, What, When, draw
from tests.chaos.shrink import Smaller, alike, shrink, whole

ROOT = Path(__file__).resolve().parents[2]
SEEDS, CHUNK = 120, 20
OF_DELAYED = 40
OF_MOVES = 40
"""Seeds in which nodes also move between the stages."""

REGRESSIONS: dict[str, Smaller] = {
    "an abandoned replica at a higher mark never joined at step 0": Smaller(298, tuple(range(8))),
    "a half-applied first decision, and the replica that had it was away": whole(470),
    "a stage was lost while step 0 was applied": Smaller(1029, (2, 4), steps=1, standbys=0),
    "one process took the number of a term twice": whole(5189),
    "a lease ran out while a trainer polled": whole(23246),
    "one that refused a decision was asked again without a pause": whole(23066),
    "two replicas of a lost stage each waited for the other to load the checkpoint": whole(23490),
    "after a takeover an old record of a mover was taken for a restart": whole(MOVING + 3),
    "a stage was lost while the first step after a rollback was applied": whole(MOVING + 414),
    "after a takeover, also that of one that had moved more than once": whole(MOVING + 186),
}
"""What has found a fault once: it must never again."""


def check(schedule: Schedule, replay: str) -> None:
    outcome = run(schedule)
    assert not outcome.problems, f"{replay}\n{schedule}"


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_seeds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        check(draw(seed), whole(seed).command())


@pytest.mark.parametrize("first", range(DELAYED, DELAYED + OF_DELAYED, CHUNK))
def test_seeds_with_delayed_updates(first: int) -> None:
    for seed in range(first, first + CHUNK):
        check(draw(seed), whole(seed).command())


@pytest.mark.parametrize("first", range(MOVING, MOVING + OF_MOVES, CHUNK))
def test_seeds_with_moves(first: int) -> None:
    moves = 0
    for seed in range(first, first + CHUNK):
        outcome = run(draw(seed))
        assert not outcome.problems, f"{whole(seed).command()}\n{outcome.schedule}"
        moves += sum(" seat " in e and " moves to stage " in e for e in outcome.events)
    assert moves > CHUNK / 3, "else nothing is tested"


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions(name: str) -> None:
    small = REGRESSIONS[name]
    check(small.schedule, small.command())


def test_faults_befall() -> None:
    """Most of what is drawn takes place, else nothing is tested."""
    outcomes = [run(draw(seed)) for seed in range(20)]
    drawn = sum(len(outcome.schedule.faults) for outcome in outcomes)
    assert sum(len(outcome.befell) for outcome in outcomes) > drawn / 2


# -- the audit sees what it is there to see --------------------------------------------------

CAUGHT_WITHIN = {"round": 5, "bar": 20, "mark": 5, "term": 5, "add": 5, "digest": 20}
"""How many aimed schedules it takes at most to notice that a rule is missing."""

SAYS = {
    "round": "wrong sums",
    "bar": "counted below the bar",
    "mark": "a member is at",
    "term": "two trainers share term",
    "add": "wrong sums",
    "digest": "applied another sum than was decided",
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_missing_is_noticed(rule: str) -> None:
    """And nothing is noticed of the same schedule while the rule is kept."""
    for seed in range(CAUGHT_WITHIN[rule]):
        with switched_off([rule]):
            outcome = run(aim(rule, seed))
        if any(SAYS[rule] in problem for problem in outcome.problems):
            break
    else:
        pytest.fail(f"{CAUGHT_WITHIN[rule]} schedules have not shown that {rule} is off")
    check(aim(rule, seed), f"aim({rule!r}, {seed})")


def test_a_decision_that_was_applied_nowhere_else_is_not_mixed_up() -> None:
    """A replica of the abandoned timeline comes back with a larger step, and joins."""
    faults = (
        Fault(What.DECIDE_ONE, When(1, "vote", 1), "0.0", 25.0),
        Fault(What.FREEZE, When(1, "decide", 1, reply=True), "source", 12.0),
    )
    schedule = Schedule(seed=1, counting=True, steps=3, replicas=2, standbys=1, faults=faults)
    outcome = run(schedule)
    assert len(outcome.befell) == 2
    assert not outcome.problems


# -- the same again --------------------------------------------------------------------------


def digest_in_another_process(seed: int, hash_seed: int) -> str:
    code = (
        "import sys; from tests.chaos.chaos import run; from tests.chaos.schedule import draw; "
        "print(run(draw(int(sys.argv[1]))).digest)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(seed)],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    """All messages, by whom to whom and when, are the same."""
    seed = next(s for s in range(100) if len(draw(s).faults) >= 5)
    here = run(draw(seed))
    assert here.messages > 100
    assert run(draw(seed)).digest == here.digest
    assert digest_in_another_process(seed, 1) == here.digest
    assert run(draw(seed + 1)).digest != here.digest


def test_a_failing_schedule_is_shrunk_to_what_matters() -> None:
    with switched_off(["add"]):
        seed = next(s for s in range(50) if len(draw(s).faults) > 1 and run(draw(s)).problems)
        like = alike(run(draw(seed)))
        small = shrink(whole(seed), lambda schedule: like(run(schedule)))
        assert like(run(small.schedule))
        shorter = replace(small.schedule, steps=small.schedule.steps - 1)
        assert not like(run(shorter)), "no step is left that it does not need"
    (fault,) = small.schedule.faults
    assert fault.what in (What.FAIL_TO_ADD, What.KILL_WHILE_ADDING)
    kept = small.kept[0]
    assert small.command(["add"]).startswith(f"python scripts/chaos.py --seed {seed} --keep {kept}")
