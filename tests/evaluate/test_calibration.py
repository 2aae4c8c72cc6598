"""ECE by hand, a temperature that is known, thresholds by brute force."""

import numpy as np
import pytest
import torch

import vitrail as vt
from vitrail.errors import InputError
from vitrail.evaluation.calibration import (
    COLDEST,
    HOTTEST,
    calibrate,
    ece,
    fit_temperature,
    reliability,
    surest,
    threshold_for,
    with_calibration,
)


def calibrated(count=4000, classes=8, seed=0):
    """Logits, and labels drawn from just the chances that they give."""
    chance = np.random.default_rng(seed)
    logits = chance.normal(size=(count, classes)) * 2
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = (chance.random((count, 1)) > p.cumsum(axis=1)).sum(axis=1).clip(max=classes - 1)
    return logits, labels


def loss(logits, labels, temperature):
    return torch.nn.functional.cross_entropy(
        torch.from_numpy(np.asarray(logits, dtype=np.float64)) / temperature, torch.from_numpy(labels)
    ).item()


def test_ece_by_hand():
    scores = np.array([0.30, 0.32, 0.90, 0.95, 1.0])
    right = np.array([True, False, True, False, True])
    # bins of 1/15: 0.30 and 0.32 in (4/15, 5/15], 0.90 in (13/15, 14/15], 0.95 and 1.0 in the last
    by_hand = (2 * abs(0.31 - 0.5) + 1 * abs(0.90 - 1) + 2 * abs(0.975 - 0.5)) / 5
    bins = reliability(scores, right)
    assert ece(bins) == pytest.approx(by_hand, abs=1e-15)
    assert [one.count for one in bins] == [0, 0, 0, 0, 2, *[0] * 8, 1, 2]
    assert (bins[4].low, bins[4].high, bins[4].right) == (4 / 15, 5 / 15, 0.5)
    assert bins[4].score == pytest.approx(0.31)


def test_a_score_on_an_edge_belongs_below():
    assert [one.count for one in reliability(np.array([0.0, 0.2, 0.4, 1.0]), np.ones(4), bins=5)] == [
        2,
        1,
        0,
        0,
        1,
    ]


def test_surest_is_softmax():
    logits = calibrated(50)[0]
    said, scores = surest(logits, 1.7)
    p = torch.softmax(torch.from_numpy(logits) / 1.7, dim=1)
    assert (said == p.argmax(dim=1).numpy()).all()
    np.testing.assert_allclose(scores, p.amax(dim=1), rtol=1e-12)


@pytest.mark.parametrize("factor", [0.05, 0.5, 1.0, 3.0, 20.0])
def test_a_known_factor_is_found_again(factor):
    logits, labels = calibrated()
    base = fit_temperature(logits, labels)
    assert base == pytest.approx(1, abs=0.05)
    assert fit_temperature(factor * logits, labels) == pytest.approx(factor * base, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_no_temperature_has_a_smaller_loss(seed):
    logits, labels = calibrated(300, 5, seed)
    logits = 4 * logits.astype(np.float32)
    found = fit_temperature(logits, labels)
    least = loss(logits, labels, found)
    grid = np.geomspace(COLDEST, HOTTEST, 400)
    assert least <= min(loss(logits, labels, t) for t in [*grid, found * 1.001, found / 1.001]) + 1e-15


def test_where_there_is_nothing_to_fit():
    logits, labels = calibrated(200)
    assert fit_temperature(logits, logits.argmax(axis=1)) == COLDEST
    assert fit_temperature(logits, logits.argmin(axis=1)) == HOTTEST
    assert fit_temperature(np.zeros((200, 8)), labels) == 1
    for answers in (logits.argmax(axis=1), logits.argmin(axis=1)):
        found = calibrate(logits, answers, 0.9)
        assert (found.temperature, found.fitted) == (1.0, False)
        assert found.before == found.after


def test_a_temperature_brings_ece_down_and_changes_no_answer():
    logits, labels = calibrated()
    found = calibrate(3 * logits, labels, 0.9)
    assert found.fitted
    assert found.before > 0.15
    assert found.after < 0.03
    assert found.before == ece(found.bins)
    assert (surest(3 * logits)[0] == surest(3 * logits, found.temperature)[0]).all()
    assert found.threshold == threshold_for(
        surest(3 * logits, found.temperature)[1], logits.argmax(1) == labels, 0.9
    )


@pytest.mark.parametrize("precision", [0.3, 0.5, 0.75, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_the_threshold_is_the_lowest_that_will_do(precision, seed):
    chance = np.random.default_rng(seed)
    scores = np.round(chance.random(60), 1 if seed % 2 else 6)  # with ties and without
    right = chance.random(60) < scores * 0.9
    good = [t for t in np.unique(scores) if right[scores >= t].mean() >= precision]
    found = threshold_for(scores, right, precision)
    if not good:
        assert found is None
        return
    assert found.score == min(good)
    assert found.answered == (scores >= found.score).sum()
    assert found.precision == pytest.approx(right[scores >= found.score].mean())
    assert found.precision >= precision


def test_a_threshold_that_cannot_be():
    assert threshold_for(np.array([0.9, 0.8]), np.array([False, True]), 0.6) is None
    assert threshold_for(np.array([0.9, 0.9]), np.array([True, False]), 0.6) is None  # answered together
    assert threshold_for(np.zeros(0), np.zeros(0, dtype=bool), 0.6) is None
    for bad in (0, 1.01, float("nan")):
        with pytest.raises(
            InputError, match=r"^A precision must be above 0 and at most 1. Got .*. Such as 0.95.$"
        ):
            threshold_for(np.array([0.9]), np.array([True]), bad)


def test_it_is_kept_in_the_file_and_tried_again(tiny, tmp_path):
    logits, labels = calibrated(500)
    found = calibrate(2.5 * logits, labels, 0.9)
    before = vt.Bundle(model=tiny, card=vt.Card(licence="MIT", metrics={"top1": 0.5, "threshold": 2.0}))
    with_calibration(before, found).save(tmp_path / "x.safetensors")
    assert before.card.metrics == {"top1": 0.5, "threshold": 2.0}
    card = vt.load(tmp_path / "x.safetensors").card
    assert card.licence == "MIT"
    assert card.metrics == {"top1": 0.5, "temperature": found.temperature, "threshold": found.threshold.score}
    again = calibrate(2.5 * logits, labels, 0.9, dict(card.metrics)).stored
    assert (again.temperature, again.ece, again.threshold) == (
        found.temperature,
        found.after,
        found.threshold,
    )


def test_a_threshold_that_cannot_be_is_not_kept(tiny):
    found = calibrate(np.eye(3)[[0, 1, 2, 0]] * 3, np.array([1, 2, 0, 1]), 0.9)
    assert found.threshold is None
    bundle = with_calibration(vt.Bundle(model=tiny, card=vt.Card(metrics={"threshold": 0.4})), found)
    assert bundle.card.metrics == {"temperature": found.temperature}


@pytest.mark.parametrize(
    "metrics",
    [{}, {"threshold": 0.5}, {"temperature": "1"}, {"temperature": 0.0}, {"temperature": float("nan")}],
)
def test_a_file_without_a_usable_temperature(metrics):
    assert calibrate(*calibrated(50), 0.9, metrics).stored is None
