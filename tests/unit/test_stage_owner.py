"""A stage's books: whole or not at all, below the bar never, one sum a round."""

from __future__ import annotations

import math

import pytest
import torch

from peers.stage import StageOwner
from swarm.core import flight
from swarm.core.update import Update
from swarm.model.registry import model_spec
from swarm.types import FRESH, Attempt, Mark, Stamp, Term
from tests.chaos.harness import DIGITS, digits_manifest

TERM = Term(1, "aa")
TO = Mark(TERM, 1)
UPDATE = Update(0.1, 1.0, 0.1, 0.05, False)
SKIP = Update(0.1, 1.0, 0.1, 0.05, True)


def stamp(n: int) -> Stamp:
    return Stamp(TERM, n)


def attempt(m: int, n: int, mask=frozenset({0, 1}), mark: Mark = FRESH) -> Attempt:
    return Attempt(stamp(n), mark, m, frozenset(mask))


@pytest.fixture
def owner() -> StageOwner:
    """The last of two stages, at the initial weights."""
    manifest = digits_manifest()
    made = StageOwner(manifest, model_spec(manifest, {DIGITS}), 1)
    made.begin()
    return made


def inputs(m: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m)
    return torch.rand(4, 32, generator=generator), torch.tensor([1, 2, 3, 4])


def count(owner: StageOwner, m: int, n: int, **more) -> str:
    return owner.forward_backward(attempt(m, n, **more), *inputs(m)).verdict


def test_a_microbatch_is_counted_once_and_its_loss_kept(owner: StageOwner) -> None:
    assert count(owner, 3, 1) == flight.COUNTED
    held = owner.model.accumulators.clone()
    assert count(owner, 3, 2) == flight.HELD
    assert torch.equal(owner.model.accumulators, held)
    assert owner.cancel(stamp(2), 3) == (True, owner.losses[3])
    assert owner.cancel(stamp(2), 4) == (False, None)


@pytest.mark.parametrize("how", ["cancelled", "below the bar", "another mark", "not in the mask"])
def test_what_must_not_count_leaves_no_trace(owner: StageOwner, how: str) -> None:
    if how == "cancelled":
        owner.cancel(stamp(5), 0)
    elif how == "below the bar":
        owner.reset(stamp(5))
    mark = TO if how == "another mark" else FRESH
    mask = frozenset({0}) if how == "not in the mask" else frozenset({0, 1})
    assert count(owner, 0, 5, mark=mark, mask=mask) not in (flight.COUNTED, flight.HELD)
    assert not owner.model.accumulators.any()
    assert not owner.ledger.held
    assert not owner.losses


@pytest.mark.parametrize("error", [RuntimeError("no memory"), MemoryError(), IndexError()])
def test_adding_is_whole_or_not_at_all(owner: StageOwner, error: Exception) -> None:
    count(owner, 0, 1)
    accumulate = owner.model.accumulate

    def half() -> None:
        owner.model.accumulators[:5] += 1
        raise error

    owner.model.accumulate = half  # type: ignore[method-assign]
    assert count(owner, 1, 2) == flight.DROPPED
    assert not owner.model.accumulators.any()
    assert owner.ledger.held == set()
    owner.model.accumulate = accumulate  # type: ignore[method-assign]
    assert count(owner, 1, 3) == flight.COUNTED


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_inputs_that_are_not_finite_are_blamed_on_the_sender(owner, value: float) -> None:
    x, targets = inputs()
    x[2, 3] = value
    passed = owner.forward_backward(attempt(0, 1), x, targets)
    assert (passed.verdict, passed.blame_sender) == (flight.NOT_FINITE, True)
    assert not owner.ledger.held


def test_large_inputs_whose_sum_overflows_are_finite(owner: StageOwner) -> None:
    x, targets = inputs()
    x[:] = 1e38
    passed = owner.forward_backward(attempt(0, 1), x, targets)
    assert not passed.blame_sender


def test_a_round_ends_when_anything_new_is_counted(owner: StageOwner) -> None:
    count(owner, 0, 1)
    assert owner.prepare(stamp(2), frozenset({0}))
    owner.total(alone=True)
    sealed = owner.seal(stamp(2))
    assert sealed is not None
    assert sealed.finite
    assert count(owner, 1, 3) == flight.COUNTED
    assert owner.seal(stamp(2)) is None
    assert owner.decide(FRESH, TO, (stamp(2), sealed.digest), UPDATE) == FRESH


def test_what_was_sent_before_a_prepare_never_counts_after_it(owner: StageOwner) -> None:
    count(owner, 0, 1)
    assert owner.prepare(stamp(3), frozenset({0}))
    assert count(owner, 1, 2) not in (flight.COUNTED, flight.HELD)
    assert owner.round == stamp(3)
    assert owner.ledger.held == {0}


def test_a_differing_ledger_takes_no_part_and_is_kept(owner: StageOwner) -> None:
    count(owner, 0, 1)
    held = owner.model.accumulators.clone()
    assert not owner.prepare(stamp(2), frozenset({0, 1}))
    assert owner.round is None
    assert torch.equal(owner.model.accumulators, held)


def test_an_old_prepare_or_reset_that_comes_late_changes_nothing(owner: StageOwner) -> None:
    count(owner, 0, 1)
    assert owner.prepare(stamp(4), frozenset({0}))
    assert not owner.prepare(stamp(2), frozenset({0}))
    assert owner.round == stamp(4)
    owner.reset(stamp(3))
    assert owner.round == stamp(4)
    assert owner.ledger.held == {0}


@pytest.mark.parametrize("wrong", ["mark", "round", "digest", "no sum"])
def test_a_decision_is_applied_only_by_who_holds_exactly_that_sum(owner, wrong: str) -> None:
    count(owner, 0, 1)
    owner.prepare(stamp(2), frozenset({0}))
    owner.total(alone=True)
    sealed = None if wrong == "no sum" else owner.seal(stamp(2))
    digest = "ab" if sealed is None or wrong == "digest" else sealed.digest
    round_ = stamp(3) if wrong == "round" else stamp(2)
    mark = Mark(TERM, 0) if wrong == "mark" else FRESH
    before = owner.model.weights.clone()
    assert owner.decide(mark, TO, (round_, digest), UPDATE) == FRESH
    assert torch.equal(owner.model.weights, before)
    assert owner.ledger.held == {0}


def test_a_decision_is_applied_once(owner: StageOwner) -> None:
    count(owner, 0, 1)
    owner.prepare(stamp(2), frozenset({0}))
    owner.total(alone=True)
    sealed = owner.seal(stamp(2))
    assert sealed is not None
    before = owner.model.weights.clone()
    assert owner.decide(FRESH, TO, (stamp(2), sealed.digest), UPDATE) == TO
    after = owner.model.weights.clone()
    assert not torch.equal(before, after)
    assert not owner.model.accumulators.any()
    assert owner.decide(FRESH, TO, (stamp(2), sealed.digest), UPDATE) == TO
    assert torch.equal(owner.model.weights, after)


def test_a_skipped_step_moves_the_mark_and_nothing_else(owner: StageOwner) -> None:
    count(owner, 0, 1)
    before = owner.model.weights.clone()
    assert owner.decide(FRESH, TO, None, SKIP) == TO
    assert torch.equal(owner.model.weights, before)
    assert not owner.ledger.held
    assert not owner.model.accumulators.any()


def test_an_optimizer_that_fails_half_way_leaves_no_mark(owner: StageOwner) -> None:
    count(owner, 0, 1)
    owner.prepare(stamp(2), frozenset({0}))
    owner.total(alone=True)
    sealed = owner.seal(stamp(2))
    assert sealed is not None

    def half(total: torch.Tensor, update: Update) -> None:
        owner.model.weights[:3] += 1
        raise RuntimeError("no memory")

    owner.model.apply = half  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        owner.decide(FRESH, TO, (stamp(2), sealed.digest), UPDATE)
    owner.begin()
    assert owner.mark is None


def test_weights_are_copied_at_their_mark_only(owner: StageOwner) -> None:
    piece = owner.copy_weights(FRESH, 2, 6)
    assert piece is not None
    assert torch.equal(piece, owner.model.weights[2:6])
    assert owner.copy_weights(TO, 2, 6) is None
