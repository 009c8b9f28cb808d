"""What may be counted: once, when asked, at the mark, above the bar, unless cancelled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.ledger import Ledger, Verdict
from swarm.types import FRESH, Attempt, Mark, Stamp, Term

TERM = Term(3, "aa")
MARK = Mark(TERM, 7)
STAGE = 1


def stamp(n: int, term: Term = TERM) -> Stamp:
    return Stamp(term, n)


def attempt(n: int, m: int = 0, *, mark: Mark = MARK, mask: tuple[int, ...] = (0, 1)) -> Attempt:
    return Attempt(stamp(n), mark, m, frozenset(mask))


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(STAGE, MARK)


def test_a_microbatch_counts_once(ledger: Ledger) -> None:
    ledger.count(attempt(1, m=4))
    assert ledger.held == {4}
    assert ledger.verdict(attempt(1, m=4)) is Verdict.HELD
    assert ledger.verdict(attempt(2, m=4)) is Verdict.HELD
    assert ledger.verdict(attempt(2, m=5)) is Verdict.COUNT


def test_counting_against_the_rules_is_refused_and_changes_nothing(ledger: Ledger) -> None:
    ledger.count(attempt(1, m=4))
    with pytest.raises(ValueError, match="microbatch 4 must not be counted: held"):
        ledger.count(attempt(2, m=4))
    with pytest.raises(ValueError, match="microbatch 5 must not be counted: not asked"):
        ledger.count(attempt(2, m=5, mask=(0, 2)))
    assert ledger.held == {4}


def test_a_stage_outside_the_mask_does_not_count(ledger: Ledger) -> None:
    assert ledger.verdict(attempt(1, mask=(0, 2))) is Verdict.NOT_ASKED
    assert ledger.verdict(attempt(1, mask=(STAGE,))) is Verdict.COUNT


def test_what_is_held_is_told_even_where_it_need_not_count(ledger: Ledger) -> None:
    ledger.count(attempt(1, m=4))
    assert ledger.verdict(attempt(2, m=4, mask=(0,))) is Verdict.HELD


def test_an_evaluation_is_not_taken_for_the_training_microbatch_of_its_number(
    ledger: Ledger,
) -> None:
    ledger.count(attempt(1, m=4))
    assert ledger.verdict(attempt(2, m=4, mask=())) is Verdict.NOT_ASKED


@pytest.mark.parametrize("other", [Mark(TERM, 6), Mark(TERM, 8), Mark(Term(2, "aa"), 7), FRESH])
def test_work_of_another_mark_does_not_count(ledger: Ledger, other: Mark) -> None:
    assert ledger.verdict(attempt(9, mark=other)) is Verdict.OTHER_MARK


def test_what_was_sent_before_the_bar_never_counts(ledger: Ledger) -> None:
    assert ledger.verdict(attempt(5)) is Verdict.COUNT
    ledger.raise_bar(stamp(5))
    assert ledger.verdict(attempt(4)) is Verdict.BELOW_BAR
    assert ledger.verdict(attempt(5)) is Verdict.BELOW_BAR
    assert ledger.verdict(attempt(6)) is Verdict.COUNT


def test_an_old_prepare_does_not_lower_the_bar(ledger: Ledger) -> None:
    ledger.raise_bar(stamp(9))
    ledger.raise_bar(stamp(2))
    assert ledger.bar == stamp(9)
    assert ledger.verdict(attempt(5)) is Verdict.BELOW_BAR


def test_the_bar_of_a_higher_term_bars_all_of_a_lower_one(ledger: Ledger) -> None:
    ledger.raise_bar(stamp(1, Term(4, "00")))
    assert ledger.verdict(attempt(10**9)) is Verdict.BELOW_BAR


def test_a_cancelled_attempt_never_counts_but_another_of_the_same_microbatch_does(
    ledger: Ledger,
) -> None:
    assert ledger.cancel(stamp(5), 4) is False
    assert ledger.verdict(attempt(5, m=4)) is Verdict.CANCELLED
    assert ledger.verdict(attempt(6, m=4)) is Verdict.COUNT


def test_a_cancel_that_comes_too_late_says_that_the_microbatch_is_held(ledger: Ledger) -> None:
    ledger.count(attempt(5, m=4))
    assert ledger.cancel(stamp(5), 4) is True
    assert ledger.held == {4}


def test_a_cancel_outlives_a_step_and_a_lower_bar(ledger: Ledger) -> None:
    ledger.cancel(stamp(5), 4)
    ledger.raise_bar(stamp(3))
    to = Mark(TERM, 8)
    ledger.advance(to)
    assert ledger.verdict(attempt(5, m=4, mark=to)) is Verdict.CANCELLED


def test_after_a_drop_everything_may_be_counted_again_but_only_above_the_bar(
    ledger: Ledger,
) -> None:
    ledger.count(attempt(1, m=4))
    ledger.raise_bar(stamp(3))
    ledger.drop()
    assert ledger.held == set()
    assert ledger.verdict(attempt(2, m=4)) is Verdict.BELOW_BAR
    assert ledger.verdict(attempt(4, m=4)) is Verdict.COUNT


def test_a_new_mark_begins_an_empty_ledger_under_the_same_bar(ledger: Ledger) -> None:
    ledger.count(attempt(1, m=4))
    ledger.raise_bar(stamp(3))
    to = Mark(TERM, 8)
    ledger.advance(to)
    assert (ledger.mark, ledger.held, ledger.bar) == (to, set(), stamp(3))
    assert ledger.verdict(attempt(4, m=4)) is Verdict.OTHER_MARK
    assert ledger.verdict(attempt(3, m=4, mark=to)) is Verdict.BELOW_BAR
    assert ledger.verdict(attempt(4, m=4, mark=to)) is Verdict.COUNT


EVENTS = st.lists(
    st.tuples(st.sampled_from(["work", "bar", "cancel"]), st.integers(1, 12), st.integers(0, 3)),
    max_size=40,
)


@settings(deadline=None, derandomize=True)
@given(EVENTS)
def test_in_any_order_of_events_nothing_counts_twice_below_the_bar_or_cancelled(
    events: list[tuple[str, int, int]],
) -> None:
    ledger = Ledger(STAGE, MARK)
    counted: list[int] = []
    bar, cancelled = 0, set()
    for event, n, m in events:
        if event == "bar":
            ledger.raise_bar(stamp(n))
            bar = max(bar, n)
        elif event == "cancel":
            assert ledger.cancel(stamp(n), m) is (m in counted)
            cancelled.add(n)
        elif ledger.verdict(attempt(n, m)) is Verdict.COUNT:
            assert n > bar
            assert n not in cancelled
            ledger.count(attempt(n, m))
            counted.append(m)
        else:
            assert n <= bar or n in cancelled or m in counted
    assert sorted(counted) == sorted(ledger.held)
