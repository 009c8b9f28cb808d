"""Averages that are steady under noise and quick after a change."""

from __future__ import annotations

import random

import pytest

from swarm.core.estimates import Estimate


def after(*samples: float) -> Estimate:
    estimate = Estimate()
    for sample in samples:
        estimate.update(sample)
    return estimate


def test_without_samples_the_default_is_given() -> None:
    estimate = Estimate()
    assert estimate.value is None
    assert estimate.get(3.5) == 3.5


def test_the_first_sample_is_the_estimate() -> None:
    estimate = Estimate()
    assert estimate.update(0.25) == 0.25
    assert estimate.get(3.5) == 0.25


def test_early_samples_weigh_equally() -> None:
    assert after(1.0, 1.2, 0.9, 1.1).value == pytest.approx(1.05)


def test_in_the_long_run_a_sample_weighs_a_tenth() -> None:
    assert after(*[1.0] * 50, 1.2).value == pytest.approx(1.02)


def test_one_outlier_hardly_moves_it() -> None:
    assert after(*[1.0] * 50, 4.0).value == pytest.approx(1.3)
    assert after(*[1.0] * 50, 4.0, 1.0, 4.0).value < 1.7


@pytest.mark.parametrize("new", [4.0, 0.25, 1.5, 0.6])
def test_a_change_is_followed_within_two_samples(new: float) -> None:
    assert after(*[1.0] * 50, new, new).value == pytest.approx(new)


def test_after_a_jump_the_next_samples_refine_it_quickly() -> None:
    assert after(*[1.0] * 50, 4.0, 5.0, 4.2).value == pytest.approx(4.4)


def test_outliers_to_both_sides_are_noise() -> None:
    value = after(*[1.0] * 50, *[2.0, 0.4] * 3).value
    assert value is not None
    assert 0.8 < value < 1.4


def test_two_outliers_with_a_good_sample_between_them_are_noise() -> None:
    assert after(*[1.0] * 50, 2.0, 1.1, 2.0).value < 1.35


def test_an_estimate_of_zero_is_left_when_the_samples_grow() -> None:
    assert after(0.0, 0.0, 1.0, 1.0).value == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_twenty_percent_stays_within_the_change_threshold(seed: int) -> None:
    rng = random.Random(seed)
    estimate = Estimate()
    for _ in range(500):
        assert estimate.update(rng.uniform(0.8, 1.2)) == pytest.approx(1.0, abs=0.25)
