"""Calibration: ECE by hand, temperatures known in advance, thresholds by brute force."""

import numpy as np
import pytest
import torch

import vitrail as vt
from vitrail.base.errors import InputError
from vitrail.evaluation.calibration import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    calibrate,
    ece,
    find_threshold,
    fit_temperature,
    predict_top1,
    reliability_bins,
    with_calibration,
)


def calibrated(count=4000, classes=8, seed=0):
    """Logits, and labels sampled from their softmax."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(count, classes)) * 2
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = (rng.random((count, 1)) > p.cumsum(axis=1)).sum(axis=1).clip(max=classes - 1)
    return logits, labels


def cross_entropy(logits, labels, temperature):
    return torch.nn.functional.cross_entropy(
        torch.from_numpy(np.asarray(logits, dtype=np.float64)) / temperature, torch.from_numpy(labels)
    ).item()


def test_ece_by_hand():
    confidence = np.array([0.30, 0.32, 0.90, 0.95, 1.0])
    correct = np.array([True, False, True, False, True])
    # bins of 1/15: 0.30 and 0.32 in (4/15, 5/15], 0.90 in (13/15, 14/15], 0.95 and 1.0 in the last
    by_hand = (2 * abs(0.31 - 0.5) + 1 * abs(0.90 - 1) + 2 * abs(0.975 - 0.5)) / 5
    bins = reliability_bins(confidence, correct)
    assert ece(bins) == pytest.approx(by_hand, abs=1e-15)
    assert [one.count for one in bins] == [0, 0, 0, 0, 2, *[0] * 8, 1, 2]
    assert (bins[4].low, bins[4].high, bins[4].accuracy) == (4 / 15, 5 / 15, 0.5)
    assert bins[4].confidence == pytest.approx(0.31)


def test_a_confidence_on_an_edge_belongs_to_the_lower_bin():
    bins = reliability_bins(np.array([0.0, 0.2, 0.4, 1.0]), np.ones(4), bins=5)
    assert [one.count for one in bins] == [2, 1, 0, 0, 1]


def test_confidence_is_the_largest_softmax_probability():
    logits = calibrated(50)[0]
    predicted, confidence = predict_top1(logits, 1.7)
    p = torch.softmax(torch.from_numpy(logits) / 1.7, dim=1)
    assert (predicted == p.argmax(dim=1).numpy()).all()
    np.testing.assert_allclose(confidence, p.amax(dim=1), rtol=1e-12)


@pytest.mark.parametrize("factor", [0.05, 0.5, 1.0, 3.0, 20.0])
def test_the_temperature_undoes_a_known_factor(factor):
    logits, labels = calibrated()
    base = fit_temperature(logits, labels)
    assert base == pytest.approx(1, abs=0.05)
    assert fit_temperature(factor * logits, labels) == pytest.approx(factor * base, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_no_temperature_has_a_smaller_loss(seed):
    logits, labels = calibrated(300, 5, seed)
    logits = 4 * logits.astype(np.float32)
    best = fit_temperature(logits, labels)
    least = cross_entropy(logits, labels, best)
    grid = np.geomspace(MIN_TEMPERATURE, MAX_TEMPERATURE, 400)
    assert least <= min(cross_entropy(logits, labels, t) for t in [*grid, best * 1.001, best / 1.001]) + 1e-15


def test_without_a_minimum_the_temperature_stays_1():
    logits, labels = calibrated(200)
    assert fit_temperature(logits, logits.argmax(axis=1)) == MIN_TEMPERATURE
    assert fit_temperature(logits, logits.argmin(axis=1)) == MAX_TEMPERATURE
    assert fit_temperature(np.zeros((200, 8)), labels) == 1
    for all_or_none in (logits.argmax(axis=1), logits.argmin(axis=1)):
        result = calibrate(logits, all_or_none, 0.9)
        assert (result.temperature, result.fitted) == (1.0, False)
        assert result.ece == result.ece_scaled


def test_temperature_scaling_reduces_ece_and_keeps_predictions():
    logits, labels = calibrated()
    result = calibrate(3 * logits, labels, 0.9)
    assert result.fitted
    assert result.ece > 0.15
    assert result.ece_scaled < 0.03
    assert result.ece == ece(result.bins)
    predicted, confidence = predict_top1(3 * logits, result.temperature)
    assert (predict_top1(3 * logits)[0] == predicted).all()
    assert result.threshold == find_threshold(confidence, logits.argmax(1) == labels, 0.9)


@pytest.mark.parametrize("target", [0.3, 0.5, 0.75, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_the_threshold_is_the_lowest_that_reaches_the_accuracy(target, seed):
    rng = np.random.default_rng(seed)
    confidence = np.round(rng.random(60), 1 if seed % 2 else 6)  # with and without ties
    correct = rng.random(60) < confidence * 0.9
    reaching = [t for t in np.unique(confidence) if correct[confidence >= t].mean() >= target]
    threshold = find_threshold(confidence, correct, target)
    if not reaching:
        assert threshold is None
        return
    assert threshold.confidence == min(reaching)
    assert threshold.accepted == (confidence >= threshold.confidence).sum()
    assert threshold.accuracy == pytest.approx(correct[confidence >= threshold.confidence].mean())
    assert threshold.accuracy >= target


def test_an_accuracy_that_cannot_be_reached():
    assert find_threshold(np.array([0.9, 0.8]), np.array([False, True]), 0.6) is None
    assert find_threshold(np.array([0.9, 0.9]), np.array([True, False]), 0.6) is None  # accepted together
    assert find_threshold(np.zeros(0), np.zeros(0, dtype=bool), 0.6) is None
    for bad in (0, 1.01, float("nan")):
        with pytest.raises(InputError, match=rf"above 0 and at most 1, not {bad:g}; use 0\.95"):
            find_threshold(np.array([0.9]), np.array([True]), bad)


def test_calibration_is_stored_in_the_file_and_evaluated_again(tiny, tmp_path):
    logits, labels = calibrated(500)
    result = calibrate(2.5 * logits, labels, 0.9)
    bundle = vt.Bundle(model=tiny, card=vt.Card(license="MIT", metrics={"top1": 0.5, "threshold": 2.0}))
    with_calibration(bundle, result).save(tmp_path / "x.safetensors")
    assert bundle.card.metrics == {"top1": 0.5, "threshold": 2.0}
    card = vt.load(tmp_path / "x.safetensors").card
    assert card.license == "MIT"
    assert card.metrics == {
        "top1": 0.5,
        "temperature": result.temperature,
        "threshold": result.threshold.confidence,
    }
    stored = calibrate(2.5 * logits, labels, 0.9, dict(card.metrics)).stored
    assert (stored.temperature, stored.ece, stored.threshold) == (
        result.temperature,
        result.ece_scaled,
        result.threshold,
    )


def test_a_missing_threshold_is_not_stored(tiny):
    result = calibrate(np.eye(3)[[0, 1, 2, 0]] * 3, np.array([1, 2, 0, 1]), 0.9)
    assert result.threshold is None
    bundle = with_calibration(vt.Bundle(model=tiny, card=vt.Card(metrics={"threshold": 0.4})), result)
    assert bundle.card.metrics == {"temperature": result.temperature}


@pytest.mark.parametrize(
    "metrics",
    [{}, {"threshold": 0.5}, {"temperature": "1"}, {"temperature": 0.0}, {"temperature": float("nan")}],
)
def test_a_file_without_a_usable_temperature(metrics):
    assert calibrate(*calibrated(50), 0.9, metrics).stored is None
