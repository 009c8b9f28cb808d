"""A stage's books: whole or not at all, below the bar never, one sum a round."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from peers.stage import StageOwner
from swarm.core import flight
from swarm.core.step import Decision
from swarm.core.update import Update
from swarm.model.device import CPU
from swarm.model.gpu import Gpu
from swarm.model.registry import model_spec
from swarm.types import FRESH, Attempt, Mark, Stamp, Term
from tests.chaos.harness import DIGITS, digits_manifest
from tests.fake_card import FakeCard

TERM = Term(1, "aa")
TO, NEXT = Mark(TERM, 1), Mark(TERM, 2)
UPDATE = Update(0.1, 1.0, 0.1, 0.05, False)
SKIP = Update(0.1, 1.0, 0.1, 0.05, True)


ALL = slice(0, None)


def stamp(n: int) -> Stamp:
    return Stamp(TERM, n)


def decision(round_: Stamp, digest: str, *, mark: Mark = FRESH, to: Mark = TO) -> Decision:
    """One that names this sum for stage 1; 3 and 5 microbatches of peer "p" count."""
    rounds = ((stamp(1), "of stage 0"), (round_, digest))
    return Decision(mark, to, rounds, UPDATE, ({"p": 3}, {"p": 5}), 1.0, 2.0, 1)


def skip(mark: Mark = FRESH, to: Mark = TO) -> Decision:
    return Decision(mark, to, (), SKIP, ({}, {}), math.nan, math.nan, 0)


def summed(owner: StageOwner, n: int = 2, *, alone: bool = True) -> Decision:
    """A round over all that is held, sealed, and the decision that names it."""
    assert owner.prepare(stamp(n), frozenset(owner.ledger.held))
    total = owner.total(alone=alone)
    if not alone:
        total.copy_(owner.model.accumulators * 2)  # a mate held the same
    sealed = owner.seal(stamp(n))
    assert sealed is not None
    assert owner.mark is not None
    return decision(stamp(n), sealed.digest, mark=owner.mark, to=Mark(TERM, owner.mark.t + 1))


def attempt(m: int, n: int, mask=frozenset({0, 1}), mark: Mark = FRESH) -> Attempt:
    return Attempt(stamp(n), mark, m, frozenset(mask))


@pytest.fixture(params=["cpu", "gpu"])
def owner(request: pytest.FixtureRequest) -> StageOwner:
    """The last of two stages, at the initial weights."""
    manifest = digits_manifest()
    device = CPU if request.param == "cpu" else Gpu(FakeCard())
    made = StageOwner(manifest, model_spec(manifest, {DIGITS}), 1, device=device)
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

    def half(*, ahead: bool) -> None:
        assert not ahead
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
    assert owner.decide(decision(stamp(2), sealed.digest)) == FRESH


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


@pytest.mark.parametrize("wrong", ["mark", "round", "digest", "no sum", "stage left out"])
def test_a_decision_is_applied_only_by_who_holds_exactly_that_sum(owner, wrong: str) -> None:
    count(owner, 0, 1)
    owner.prepare(stamp(2), frozenset({0}))
    owner.total(alone=True)
    sealed = None if wrong == "no sum" else owner.seal(stamp(2))
    told = decision(
        stamp(3) if wrong == "round" else stamp(2),
        "ab" if sealed is None or wrong == "digest" else sealed.digest,
        mark=Mark(TERM, 0) if wrong == "mark" else FRESH,
    )
    if wrong == "stage left out":
        told = replace(told, rounds=told.rounds[:1])
    before = owner.model.weights.clone()
    assert owner.decide(told) == FRESH
    assert torch.equal(owner.model.weights, before)
    assert owner.ledger.held == {0}
    assert (owner.decision, owner.decided) == (told, None)


def test_a_decision_is_applied_once(owner: StageOwner) -> None:
    count(owner, 0, 1)
    told = summed(owner)
    before = owner.model.weights.clone()
    assert owner.decide(told) == TO
    after = owner.model.weights.clone()
    assert not torch.equal(before, after)
    assert not owner.model.accumulators.any()
    assert owner.decide(told) == TO
    assert torch.equal(owner.model.weights, after)
    assert (owner.applied, owner.totals) == (1, ({"p": 3}, {"p": 5}))


def test_totals_add_up_from_step_to_step(owner: StageOwner) -> None:
    count(owner, 0, 1)
    owner.decide(summed(owner, 2))
    count(owner, 0, 3, mark=TO)
    assert owner.decide(replace(summed(owner, 4), applied=2)) == NEXT
    assert (owner.applied, owner.totals) == (2, ({"p": 6}, {"p": 10}))


def test_the_last_decision_heard_of_is_kept_and_no_older_one_takes_its_place(owner) -> None:
    later = decision(stamp(9), "ab", mark=TO, to=NEXT)
    assert owner.decide(later) == FRESH
    assert owner.decide(decision(stamp(8), "ab")) == FRESH
    assert owner.decision == later


def test_a_skipped_step_moves_the_mark_and_nothing_else(owner: StageOwner) -> None:
    count(owner, 0, 1)
    before = owner.model.weights.clone()
    assert owner.decide(skip()) == TO
    assert torch.equal(owner.model.weights, before)
    assert not owner.ledger.held
    assert not owner.model.accumulators.any()
    assert not owner.losses
    assert (owner.applied, owner.totals) == (0, ({}, {}))


def test_an_optimizer_that_fails_half_way_leaves_no_mark(owner: StageOwner) -> None:
    initial = owner.model.weights.clone()
    count(owner, 0, 1)
    told = summed(owner)

    def half(total: torch.Tensor, update: Update) -> None:
        owner.model.weights[:3] += 1
        raise RuntimeError("no memory")

    owner.model.apply = half  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        owner.decide(told)
    assert owner.mark is None
    assert owner.decided is None
    owner.begin()  # from the initial weights, whatever was left of them
    assert owner.mark == FRESH
    assert torch.equal(owner.model.weights, initial)
    assert not owner.ledger.held


# -- the sum that was applied ---------------------------------------------------------------


@pytest.mark.parametrize("alone", [True, False])
def test_the_sum_of_a_step_is_kept_until_the_next_is_applied(owner, alone: bool) -> None:
    """Alone, the accumulators are the sum: they are given away, not copied."""
    for t in range(4):
        mark = FRESH if t == 0 else Mark(TERM, t)
        count(owner, t, 2 * t, mark=mark)
        told = summed(owner, 2 * t + 1, alone=alone)
        expected = owner.total(alone=alone).clone()
        assert expected.any()
        owner.decide(told)
        assert owner.decided == told
        kept = owner.decided_sum(mark, ALL)
        assert kept is not None
        assert torch.equal(kept, expected)
        assert not owner.model.accumulators.any(), "the next step begins with nothing"
        count(owner, t, 2 * t + 2, mark=told.to)  # into other memory than the sum's
        again = owner.decided_sum(mark, slice(3, 9))
        assert again is not None
        assert torch.equal(again, expected[3:9])
        if t > 0:
            assert owner.decided_sum(Mark(TERM, t - 1), ALL) is None
        owner.drop()


def test_what_is_given_of_a_sum_is_a_copy(owner: StageOwner) -> None:
    count(owner, 0, 1)
    owner.decide(summed(owner))
    given = owner.decided_sum(FRESH, ALL)
    assert given is not None
    before = given.clone()
    given.zero_()
    kept = owner.decided_sum(FRESH, ALL)
    assert kept is not None
    assert torch.equal(kept, before)


@pytest.mark.parametrize("alone", [True, False])
def test_a_skipped_step_has_no_sum_and_the_next_one_has_again(owner, alone: bool) -> None:
    count(owner, 0, 1)
    owner.decide(summed(owner, 2, alone=alone))
    assert owner.decide(skip(TO, NEXT)) == NEXT
    assert owner.decided == skip(TO, NEXT)
    assert owner.decided_sum(FRESH, ALL) is None
    assert owner.decided_sum(TO, ALL) is None
    count(owner, 0, 3, mark=NEXT)
    told = summed(owner, 4, alone=alone)
    expected = owner.total(alone=alone).clone()
    owner.decide(told)
    kept = owner.decided_sum(NEXT, ALL)
    assert kept is not None
    assert torch.equal(kept, expected)


def test_a_sum_that_was_not_applied_is_not_given(owner: StageOwner) -> None:
    count(owner, 0, 1)
    summed(owner)
    assert owner.decided_sum(FRESH, ALL) is None


# -- from one version to another ------------------------------------------------------------


def test_who_leaves_its_mark_holds_nothing_and_begins_from_the_initial_weights(
    owner: StageOwner,
) -> None:
    initial = owner.model.weights.clone()
    count(owner, 0, 1)
    told = summed(owner)
    owner.leave_mark()
    assert owner.mark is None
    assert not owner.ledger.held
    assert not owner.losses
    assert not owner.model.accumulators.any()
    assert (owner.round, owner.sealed) == (None, None)
    assert owner.decide(told) is None
    owner.model.weights.add_(1.0)
    owner.begin()
    assert owner.mark == FRESH
    assert torch.equal(owner.model.weights, initial)


def test_who_arrives_counts_for_the_new_mark_alone(owner: StageOwner) -> None:
    owner.leave_mark()
    owner.arrive(NEXT, 7, ({"a": 1}, {"b": 2}))
    assert (owner.mark, owner.applied, owner.totals) == (NEXT, 7, ({"a": 1}, {"b": 2}))
    assert count(owner, 0, 3) not in (flight.COUNTED, flight.HELD)
    assert count(owner, 0, 4, mark=NEXT) == flight.COUNTED


def test_who_arrives_forgets_what_was_held_for_the_mark_before(owner: StageOwner) -> None:
    count(owner, 0, 1)
    owner.arrive(TO, 1, ({}, {}))
    assert not owner.ledger.held
    assert not owner.model.accumulators.any()
    assert count(owner, 0, 2, mark=TO) == flight.COUNTED


def test_the_initial_weights_and_the_optimizers_state_can_be_had_again(owner) -> None:
    initial = {name: vector.clone() for name, vector in owner.model.state().items()}
    loss = owner.model.forward_loss(*inputs())[0]
    count(owner, 0, 1)
    owner.decide(summed(owner))
    assert not torch.equal(owner.model.weights, initial["weights"])
    owner.initialise()
    assert owner.mark is None
    for name, vector in owner.model.state().items():
        assert torch.equal(vector, initial[name])
    assert owner.model.forward_loss(*inputs())[0] == loss, "the layers see them too"
