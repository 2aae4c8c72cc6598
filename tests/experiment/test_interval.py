"""Intervals of fractions: within 0 to 1, never of zero width."""

import numpy as np
import pytest
from scipy import stats

from vitrail.experiment.interval import (
    confidence_interval,
    difference_interval,
    fraction_interval,
    share_interval,
    wilson_interval,
)
from vitrail.experiment.study import Arm, Difference


@pytest.mark.parametrize(("correct", "items"), [(0, 10), (3, 10), (10, 10), (897, 1000), (500, 500)])
def test_wilson_is_that_of_scipy(correct, items):
    expected = stats.binomtest(correct, items).proportion_ci(method="wilson")
    assert wilson_interval(correct / items, items) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_perfect_scores_do_not_prove_perfection():
    low, high = fraction_interval([1.0, 1.0, 1.0], 500)
    assert (low, high) == (pytest.approx(0.9924, abs=1e-3), 1.0)
    assert fraction_interval([0.0, 0.0], 500)[0] == 0
    assert fraction_interval([0.0, 0.0], 500)[1] > 0


@pytest.mark.parametrize(
    "scores", [[0.7, 0.328, 0.253], [0.592, 0.297, 0.1], [0.99, 1.0, 0.95], [0.5, 0.5, 0.5], [0.01, 0.0, 0.0]]
)
def test_fractions_stay_between_0_and_1_and_have_width(scores):
    low, high = fraction_interval(scores, 360)
    assert 0 <= low < np.mean(scores) < high <= 1
    assert fraction_interval(scores[:1], 360) is None


def test_interval_of_fractions_counts_both_runs_and_items():
    scores = [0.90, 0.88, 0.92]
    narrow, wide = fraction_interval(scores, 100_000), fraction_interval(scores, 100)
    assert narrow == pytest.approx(confidence_interval(scores), abs=0.02), "many items: that between runs"
    assert wide[1] - wide[0] > narrow[1] - narrow[0]
    same = fraction_interval([0.9, 0.9, 0.9], 100)
    assert same == pytest.approx(wilson_interval(0.9, 100)), "equal runs: that of the items"


def test_intervals_of_fractions_cover_the_truth():
    """Of 400 experiments with three runs each, the interval contains the true mean in about 95 %."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        fractions = rng.binomial(360, np.clip(rng.normal(0.9, 0.02, 3), 0, 1)) / 360
        low, high = fraction_interval(fractions.tolist(), 360)
        covered += low <= 0.9 <= high
    assert covered > 0.92 * 400


def test_differences_have_the_width_of_the_rule_of_three():
    assert difference_interval([0.0, 0.0, 0.0], 500) == pytest.approx((-0.006, 0.006))
    assert difference_interval([0.0, 0.0, 0.0]) == (0.0, 0.0)
    assert difference_interval([0.9, -0.9], 10) == (-1.0, 1.0)
    wide = [0.2, 0.3, 0.25]
    assert difference_interval(wide, 10_000) == pytest.approx(confidence_interval(wide))
    assert difference_interval([0.1], 10) is None
    assert not Difference.of([1.0, 1.0], [0.998, 0.998], 500).significant
    assert Difference.of([1.0, 1.0], [0.9, 0.9], 500).significant


def test_shares_stay_between_0_and_1():
    low, high = share_interval([0.99, 0.5, 0.97])
    assert 0 < low < 0.9 < high < 1
    assert share_interval([0.956, 0.957, 0.955]) == pytest.approx((0.9534, 0.9585), abs=1e-3)


def test_an_arm_of_a_study_has_such_an_interval():
    arm = Arm("a", {}, 1e-3, [1.0, 1.0], [], 1, 1.0, 360)
    assert arm.interval == pytest.approx((0.9894, 1.0), abs=1e-3)
