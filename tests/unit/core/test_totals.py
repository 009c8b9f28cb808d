"""How many microbatches each peer has counted in the run."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.totals import MAX_PEERS, OTHERS, fold

COUNTS = st.dictionaries(st.sampled_from(["a", "b", "c", OTHERS]), st.integers(1, 9))


def full(named: int = MAX_PEERS - 1) -> dict[str, int]:
    """As many names as fit beside the one for all others."""
    return {f"peer{n:05}": 1 for n in range(named)}


@settings(deadline=None, derandomize=True)
@given(st.lists(st.lists(COUNTS, min_size=2, max_size=2), max_size=5))
def test_each_peer_has_the_sum_of_its_counts(decisions: list[list[dict[str, int]]]) -> None:
    totals = fold(({}, {}), [])
    for counts in decisions:
        totals = fold(totals, counts)
    for stage in range(2):
        for peer in ("a", "b", "c", OTHERS):
            counted = sum(counts[stage].get(peer, 0) for counts in decisions)
            assert totals[stage].get(peer, 0) == counted


def test_the_arguments_stay_as_they_are() -> None:
    before, counts = ({"a": 1},), [{"a": 2}]
    assert fold(before, counts) == ({"a": 3},)
    assert (before, counts) == (({"a": 1},), [{"a": 2}])


def test_counts_of_too_few_or_too_many_stages_change_only_the_stages_of_the_run() -> None:
    assert fold(({"a": 1}, {"b": 1}), [{"a": 2}]) == ({"a": 3}, {"b": 1})
    assert fold(({"a": 1},), [{"a": 2}, {"b": 5}]) == ({"a": 3},)


def test_counts_that_are_not_positive_are_ignored() -> None:
    assert fold(({"a": 5},), [{"a": -3, "b": 0}]) == ({"a": 5},)


def test_beyond_the_bound_peers_are_counted_under_others() -> None:
    (total,) = fold((full(),), [{"late": 3, "later": 4, "peer00000": 5}])
    assert len(total) == MAX_PEERS
    assert total[OTHERS] == 7
    assert total["peer00000"] == 6


def test_others_once_there_leave_the_names_their_room() -> None:
    (total,) = fold((full(MAX_PEERS - 2) | {OTHERS: 2},), [{"late": 3, "later": 4}])
    assert len(total) == MAX_PEERS
    assert (total["late"], total[OTHERS]) == (3, 6)


def test_the_order_of_the_counts_does_not_decide_who_is_named() -> None:
    counts = full(MAX_PEERS + 10)
    backwards = dict(reversed(counts.items()))
    assert fold(({},), [counts]) == fold(({},), [backwards])


def test_totals_that_are_too_long_are_brought_within_the_bound() -> None:
    (total,) = fold((full(MAX_PEERS + 10),), [{}])
    assert len(total) == MAX_PEERS
    assert sum(total.values()) == MAX_PEERS + 10
