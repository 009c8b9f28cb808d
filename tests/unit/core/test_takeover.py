"""Where a new trainer goes on: the highest version that every stage can reach."""

from __future__ import annotations

import random
from dataclasses import replace
from math import nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.step import Decision
from swarm.core.takeover import Found, Reach, lacking, reach
from swarm.core.totals import Totals
from swarm.core.update import Update
from swarm.types import FRESH, NO_TERM, Mark, Replica, Stamp, Term

TERM, LATER = Term(1, "trainer"), Term(2, "other")
AT = Mark(TERM, 41)
TO = Mark(TERM, 42)
UPDATE = Update(0.1, 1.0, 0.9, 0.99, False)
SKIP = replace(UPDATE, skip=True)
SUMS = ((Stamp(TERM, 7), "sum0"), (Stamp(TERM, 8), "sum1"))
DECISION = Decision(AT, TO, SUMS, UPDATE, ({"a": 3}, {"b": 3}), 1.5, 0.5, 40)
TOTALS: Totals = ({"a": 10}, {"b": 10})


def found(
    name: str,
    stage: int,
    mark: Mark | None = AT,
    *,
    applied: int = 39,
    sum: tuple[Stamp, str] | None = None,
    decision: Decision | None = None,
    totals: Totals = TOTALS,
) -> Found:
    replica = Replica(name, "boot")
    return Found(replica, stage, mark, applied, frozenset(), {}, sum, decision, totals)


def holding(name: str, stage: int, decision: Decision | None = None) -> Found:
    """A replica at ``AT`` with the sum that ``DECISION`` names."""
    return found(name, stage, sum=SUMS[stage], decision=decision)


def applied(name: str, stage: int, decision: Decision = DECISION) -> Found:
    """A replica that has applied ``decision``."""
    totals: Totals = ({"a": 13}, {"b": 13})
    return found(name, stage, decision.to, applied=40, decision=decision, totals=totals)


def names(ones: tuple[Found, ...]) -> list[str]:
    return [one.replica.peer for one in ones]


def reached(*ones: Found, stages: int = 2) -> Reach:
    where = reach(ones, stages)
    assert where is not None
    assert lacking(ones, stages) == []
    return where


def test_where_all_are_at_one_mark_the_run_goes_on_there() -> None:
    where = reached(found("c", 1), found("b", 0), found("a", 0))
    assert (where.mark, where.decision, where.applied, where.totals) == (AT, None, 39, TOTALS)
    assert names(where.there) == ["a", "b", "c"]
    assert where.followers == ()


def test_a_fresh_run_goes_on_from_its_initial_weights() -> None:
    ones = [found(name, stage, FRESH, applied=0, totals=()) for stage, name in enumerate("ab")]
    where = reached(*ones)
    assert (where.mark, where.applied, where.totals) == (FRESH, 0, ({}, {}))


def test_a_half_applied_step_is_finished_by_those_who_hold_the_sum() -> None:
    where = reached(applied("a", 0), holding("b", 0), holding("c", 1), found("d", 1))
    assert (where.mark, where.decision) == (TO, DECISION)
    assert names(where.there) == ["a"]
    assert names(where.followers) == ["b", "c"]
    assert (where.applied, where.totals) == (40, ({"a": 13}, {"b": 13}))


def test_a_decision_that_nobody_has_applied_yet_is_applied() -> None:
    where = reached(holding("a", 0, DECISION), holding("b", 1))
    assert (where.mark, where.decision, where.there) == (TO, DECISION, ())
    assert (where.applied, where.totals) == (40, ({"a": 13}, {"b": 13}))


def test_a_decision_known_only_to_one_without_weights_counts_too() -> None:
    assert reached(found("x", 0, None, decision=DECISION), holding("a", 0), holding("b", 1))


@pytest.mark.parametrize(
    "sum", [None, (SUMS[1][0], "other digest"), (Stamp(TERM, 9), SUMS[1][1]), SUMS[0]]
)
def test_without_the_very_sum_a_stage_cannot_follow(sum: tuple[Stamp, str] | None) -> None:
    """Nor can the stage that has applied it go back: nothing is reachable."""
    ones = [applied("a", 0), found("b", 1, sum=sum)]
    assert reach(ones, 2) is None
    assert lacking(ones, 2) == ["stage 1: its replicas are at step 41 and cannot get to step 42"]


def test_one_that_went_ahead_alone_is_left_behind() -> None:
    where = reached(applied("a", 0), found("b", 0), found("c", 1))
    assert where.mark == AT
    assert where.decision is None
    assert names(where.there) == ["b", "c"]


def test_the_sum_is_of_no_use_at_another_mark_than_the_decision_leads_on_from() -> None:
    elsewhere = replace(holding("b", 1), mark=Mark(NO_TERM, 41))
    assert reach([applied("a", 0), elsewhere], 2) is None


def test_of_a_skipped_step_no_sum_is_needed() -> None:
    skip = replace(DECISION, update=SKIP, rounds=(), applied=39, loss=nan, norm=nan)
    where = reached(applied("a", 0, skip), found("b", 1))
    assert where.mark == TO
    assert where.decision is skip
    assert names(where.followers) == ["b"]


def test_the_higher_term_is_the_higher_mark_whatever_the_step() -> None:
    rolled_back = Mark(LATER, 30)
    ones = [
        found(f"{stage}{mark.t}", stage, mark) for stage in (0, 1) for mark in (AT, rolled_back)
    ]
    assert reached(*ones).mark == rolled_back


def test_the_decision_that_led_to_the_mark_is_shown_even_if_nobody_has_to_be_told() -> None:
    where = reached(applied("a", 0), found("b", 1, TO))
    assert where.decision == DECISION
    assert where.followers == ()


MALFORMED = [
    replace(DECISION, rounds=()),
    replace(DECISION, rounds=SUMS[:1]),
    replace(DECISION, rounds=(*SUMS, SUMS[0])),
    replace(DECISION, applied=-1),
    replace(DECISION, to=AT),
    replace(DECISION, to=Mark(NO_TERM, 42)),
    replace(DECISION, to=Mark(LATER, 41)),
    replace(DECISION, to=Mark(TERM, 1000)),
]


@pytest.mark.parametrize("decision", MALFORMED)
def test_a_malformed_decision_leads_nowhere(decision: Decision) -> None:
    where = reached(holding("a", 0, decision), holding("b", 1, decision))
    assert (where.mark, where.decision, where.followers) == (AT, None, ())


def test_a_decision_under_an_earlier_term_than_it_leads_on_from_is_malformed() -> None:
    back = replace(DECISION, to=Mark(NO_TERM, 42))
    assert reach([found("a", 0, back.to), holding("b", 1, back)], 2) is None


def test_counts_of_too_few_stages_do_no_harm() -> None:
    where = reached(holding("a", 0, replace(DECISION, counts=({"a": 3},))), holding("b", 1))
    assert where.totals == ({"a": 13}, {"b": 10})


def test_a_stage_that_the_run_does_not_have_is_ignored() -> None:
    foreign = [found("x", 2, TO), found("y", -1, TO, decision=DECISION)]
    assert reached(found("a", 0), found("b", 1), *foreign).there == (found("a", 0), found("b", 1))
    assert reach([found("a", 0, TO), *foreign], 2) is None


def test_of_two_answers_by_one_replica_the_later_holds() -> None:
    assert reached(found("a", 0), applied("b", 1), found("b", 1)).mark == AT


FORGED = replace(DECISION, update=SKIP, rounds=())
"""A second decision that leads to the same mark."""


def test_of_two_decisions_the_applied_one_holds_even_against_more() -> None:
    liars = [found(name, 1, decision=FORGED) for name in "wxyz"]
    where = reached(applied("a", 0), holding("b", 1), *liars)
    assert where.decision == DECISION
    assert names(where.followers) == ["b"]


def test_where_one_decision_was_applied_no_other_may_lead_to_that_mark() -> None:
    """Else the followers' weights would differ from those that bear the same mark."""
    ones = [applied("a", 0), found("b", 0), found("x", 1, decision=FORGED)]
    assert reached(*ones).mark == AT
    assert reach(ones[:1] + ones[2:], 2) is None


def test_of_two_decisions_that_nobody_has_applied_the_one_that_more_show_comes_first() -> None:
    ones = [holding("a", 0, DECISION), holding("b", 1, DECISION), found("x", 1, decision=FORGED)]
    assert reached(*ones).decision == DECISION
    ones += [found("y", 1, decision=FORGED), found("z", 1, decision=FORGED)]
    assert reached(*ones).decision == FORGED


def test_the_second_decision_is_taken_where_the_first_leads_nowhere() -> None:
    other = replace(DECISION, rounds=((Stamp(TERM, 9), "x"), (Stamp(TERM, 9), "x")))
    ones = [found(name, 0, decision=other) for name in "xyz"]
    assert reached(*ones, holding("a", 0, DECISION), holding("b", 1)).decision == DECISION


def test_decisions_that_differ_in_their_counts_alone_are_two() -> None:
    """Of which, shown equally often, the smallest is taken, in whatever order they are found."""
    less = replace(DECISION, counts=({"a": 2}, {"b": 3}))
    ones = [holding("a", 0, DECISION), holding("b", 1, less)]
    assert reached(*ones).decision == less
    ones = [holding("a", 0, less), holding("b", 1, DECISION)]
    assert reached(*ones).decision == less


def test_a_skip_without_a_norm_is_one_decision_however_many_show_it() -> None:
    """NaN differs from itself, yet it is the same decision."""
    skips = [replace(FORGED, loss=float("nan"), norm=float("nan")) for _ in range(2)]
    ones = [found("x", 0, decision=skips[0]), found("y", 1, decision=skips[1])]
    others = [holding("a", 0, DECISION), holding("b", 1)]
    decision = reached(*ones, *others).decision
    assert decision is not None
    assert decision.update.skip


def test_where_replicas_disagree_on_counts_most_are_believed_then_the_smallest() -> None:
    other: Totals = ({"a": 9}, {"b": 10})
    wrong = found("a", 0, applied=7, totals=other)
    where = reached(wrong, found("b", 0), found("c", 1))
    assert (where.applied, where.totals) == (39, TOTALS)
    where = reached(wrong, found("c", 1))
    assert (where.applied, where.totals) == (7, other)


def test_who_is_there_is_believed_before_the_decision() -> None:
    ones = [replace(applied("a", 0), applied=37), holding("b", 1)]
    assert reached(*ones).applied == 37


def test_followers_that_disagree_on_counts_are_believed_likewise() -> None:
    wrong = replace(holding("a", 0, DECISION), totals=({"a": 99}, {}))
    assert reached(wrong, holding("b", 1)).totals == ({"a": 13}, {"b": 13})


def test_totals_of_another_number_of_stages_say_nothing() -> None:
    where = reached(found("a", 0, totals=()), found("b", 0, totals=()), found("c", 1))
    assert where.totals == TOTALS
    ones = [replace(applied("a", 0), totals=()), holding("b", 1)]
    assert reached(*ones).totals == ({"a": 13}, {"b": 13}), "from the follower"
    ones = [replace(one, totals=()) for one in ones]
    assert reached(*ones).totals == DECISION.counts


def test_what_is_lacking_is_said_stage_by_stage() -> None:
    ones = [
        *(found("a", 0, TO), found("b", 1, TO)),
        *(found("c", 2, Mark(TERM, 39)), found("d", 2, AT), found("e", 2, None)),
        found("f", 3, None),
        found("g", 4, Mark(NO_TERM, 42)),
    ]
    assert reach(ones, 6) is None
    assert lacking(ones, 6) == [
        "stage 2: its replicas are at steps 39 to 41 and cannot get to step 42",
        "stage 3: no replica that was found has weights",
        "stage 4: its replicas are at step 42 and cannot get to the version of step 42 "
        "that other stages have",
        "stage 5: nobody was found",
    ]


def test_where_nobody_has_weights_every_stage_lacks_them() -> None:
    assert lacking([found("a", 0, None)], 2) == [
        "stage 0: no replica that was found has weights",
        "stage 1: nobody was found",
    ]
    assert reach([], 2) is None


MARKS = [None, FRESH, Mark(TERM, 1), Mark(TERM, 2), Mark(LATER, 1)]
DECISIONS = [
    None,
    *MALFORMED,
    replace(DECISION, mark=FRESH, to=Mark(TERM, 1)),
    replace(DECISION, mark=FRESH, to=Mark(LATER, 1)),
    replace(DECISION, mark=Mark(TERM, 1), to=Mark(TERM, 2), update=SKIP, rounds=()),
    replace(DECISION, mark=Mark(TERM, 1), to=Mark(TERM, 2), loss=2.0),
]
ANSWERS = st.builds(
    lambda name, stage, mark, sum, decision, applied: found(
        f"{stage}{name}", stage, mark, sum=sum, decision=decision, applied=applied
    ),
    st.sampled_from("abc"),
    st.integers(0, 2),
    st.sampled_from(MARKS),
    st.sampled_from([None, *SUMS]),
    st.sampled_from(DECISIONS),
    st.integers(0, 2),
)


@settings(deadline=None, derandomize=True)
@given(st.lists(ANSWERS, unique_by=lambda one: one.replica), st.randoms(use_true_random=False))
def test_every_stage_can_get_where_the_run_goes_on(ones: list[Found], rng: random.Random) -> None:
    where = reach(ones, 2)
    rng.shuffle(ones)
    assert reach(ones, 2) == where, "whoever asks, in whatever order"
    assert (where is None) == bool(lacking(ones, 2))
    at = [{one.mark for one in ones if one.stage == stage} for stage in (0, 1)]
    common = {mark for mark in at[0] & at[1] if mark is not None}
    if where is None:
        assert not common
        return
    assert all(mark <= where.mark for mark in common)
    assert {one.stage for one in (*where.there, *where.followers)} == {0, 1}
    assert {one.mark for one in where.there} <= {where.mark}
    for one in where.followers:
        decision = where.decision
        assert decision is not None
        assert (decision.mark, decision.to) == (one.mark, where.mark)
        assert decision.update.skip or one.sum == decision.rounds[one.stage]
