from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from qhyer.report.statistics import iqm, mean_and_std, mean_of_tasks, seed_bootstrap, wilson


def test_wilson_worked_numbers():
    # 8 of 10, as printed in any table of the score interval
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    # 0 of n and n of n have closed forms: z² / (n + z²) away from the end
    z2 = scipy.stats.norm.ppf(0.975) ** 2
    assert wilson(0, 20) == pytest.approx((0.0, z2 / (20 + z2)))
    assert wilson(20, 20) == pytest.approx((20 / (20 + z2), 1.0))
    assert all(math.isnan(value) for value in wilson(0, 0))


@pytest.mark.parametrize(("successes", "trials"), [(1, 1), (3, 7), (25, 50), (249, 250)])
def test_wilson_agrees_with_scipy(successes, trials):
    expected = scipy.stats.binomtest(successes, trials).proportion_ci(method="wilson")
    assert wilson(successes, trials) == pytest.approx((expected.low, expected.high))


def test_mean_and_std_are_over_seeds():
    assert mean_and_std([1.0, 3.0]) == pytest.approx((2.0, math.sqrt(2)))
    mean, std = mean_and_std([0.5])
    assert mean == 0.5 and math.isnan(std)


def test_iqm_drops_a_quarter_at_each_end():
    scores = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])
    assert iqm([scores]) == pytest.approx((0.4 + 0.6 + 0.8 + 1.0) / 4)
    odd = np.random.default_rng(0).random(13)
    assert iqm([odd[:6], odd[6:]]) == pytest.approx(scipy.stats.trim_mean(odd, 0.25))


def test_every_task_weighs_the_same():
    assert mean_of_tasks([np.array([1.0]), np.array([0.0, 0.0, 0.0])]) == 0.5


def test_bootstrap_is_a_function_of_its_generator():
    strata = np.random.default_rng(1).random((2, 8))
    first = seed_bootstrap(strata, np.random.default_rng(7))
    np.random.seed(0)  # the global generator has no say
    assert seed_bootstrap(strata, np.random.default_rng(7)) == first
    assert seed_bootstrap(strata, np.random.default_rng(8)) != first


def test_bootstrap_closed_forms():
    generator = np.random.default_rng(0)
    assert seed_bootstrap([[0.25] * 4, [0.75] * 4], generator) == (0.5, 0.5)
    # Two seeds, 0 and 1: the mean of a resample is 0 or 1 with probability ¼ each, so these are the ends.
    assert seed_bootstrap([[0.0, 1.0]], generator) == (0.0, 1.0)
    # Many seeds: the interval is the normal one, 1.96 standard errors of a seed's mean over tasks.
    n = 400
    scores = np.tile([0.0, 1.0], n // 2)
    half = 1.96 * 0.5 / math.sqrt(n)
    assert seed_bootstrap([scores, scores], generator) == pytest.approx((0.5 - half, 0.5 + half), abs=2e-3)
    assert seed_bootstrap([scores, 1.0 - scores], generator) == (0.5, 0.5)  # what one task gains the other loses


def test_bootstrap_of_few_seeds_reaches_their_scores():
    """Tasks of a seed come from one training. Drawn apart, their spread would average out, and the interval of two
    seeds, 0 and 60 %, would hold neither."""
    weak, strong = [0.0, 0.0, 0.0, 0.0], [0.4, 0.6, 0.6, 0.8]
    assert seed_bootstrap(list(zip(weak, strong)), np.random.default_rng(0)) == pytest.approx((0.0, 0.6))
    with pytest.raises(ValueError, match="every seed"):  # which scores belong together?
        seed_bootstrap([*zip(weak, strong), (0.0, 0.5, 1.0)], np.random.default_rng(0))


def test_bootstrap_agrees_with_scipy_on_one_task():
    scores = np.random.default_rng(3).random(8)
    expected = scipy.stats.bootstrap(
        (scores,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(0)
    ).confidence_interval
    ours = seed_bootstrap([scores], np.random.default_rng(1), resamples=20_000)
    assert ours == pytest.approx((expected.low, expected.high), abs=0.01)
