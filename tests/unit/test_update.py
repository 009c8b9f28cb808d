"""The scalars of a step, with the meaning of batch, learning rate and clip pinned by number."""

from __future__ import annotations

import itertools
import math

import pytest

from swarm.core.update import Update, global_norm, learning_rate, make_update
from swarm.manifest_sections import Optimizer

PLAIN = Optimizer.model_validate({"lr": 1.0, "clip": 0.0, "betas": [0.9, 0.99]})
CLIPPED = Optimizer.model_validate({"lr": 1.0, "clip": 1.0})


def test_warm_up_is_linear_and_reaches_the_full_rate() -> None:
    optimizer = Optimizer.model_validate({"lr": 0.4, "warmup_steps": 4})
    rates = [learning_rate(optimizer, t) for t in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_cosine_ends_at_the_lowest_rate_and_stays() -> None:
    optimizer = Optimizer.model_validate(
        {"lr": 1.0, "warmup_steps": 2, "total_steps": 10, "min_lr_ratio": 0.1}
    )
    rates = [learning_rate(optimizer, t) for t in range(13)]
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[6] == pytest.approx(0.55)
    assert rates[10:] == pytest.approx([0.1, 0.1, 0.1])
    assert all(a > b for a, b in itertools.pairwise(rates[2:11]))


def test_the_norm_is_over_all_stages() -> None:
    assert global_norm([9.0, 16.0]) == 5.0
    assert global_norm([0.0]) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_norm_that_is_no_number_is_nan(bad: float) -> None:
    assert math.isnan(global_norm([1.0, bad]))


def test_a_norm_that_overflows_is_nan() -> None:
    assert math.isnan(global_norm([1.7e308, 1.7e308]))


def test_the_clip_scales_the_global_norm_down_and_never_up() -> None:
    assert make_update(CLIPPED, 0, 0, [9.0, 16.0], True).scale == pytest.approx(0.2, rel=1e-6)
    assert make_update(CLIPPED, 0, 0, [0.01, 0.01], True).scale == 1.0
    assert make_update(PLAIN, 0, 0, [9.0, 16.0], True).scale == 1.0


def test_bias_corrections_follow_applied_steps_not_the_step_count() -> None:
    update = make_update(PLAIN, 7, 2, [1.0], True)
    assert update.bias1 == pytest.approx(1 - 0.9**3)
    assert update.bias2 == pytest.approx(1 - 0.99**3)


def test_sgd_has_no_bias_correction() -> None:
    optimizer = Optimizer.model_validate({"kind": "sgd", "lr": 0.5, "clip": 0.0})
    assert make_update(optimizer, 3, 3, [4.0], True) == Update(0.5, 1.0, 1.0, 1.0, False)


@pytest.mark.parametrize(
    ("norms", "finite"), [([math.nan], True), ([math.inf], True), ([1.0], False)]
)
def test_what_is_not_finite_is_skipped(norms: list[float], finite: bool) -> None:
    update = make_update(CLIPPED, 0, 0, norms, finite)
    assert update.skip
    assert math.isfinite(update.scale)
