"""Feature statistics: Mahalanobis distances, their threshold, and their place in a file."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from typer.testing import CliRunner

import vitrail as vt
from tests.support.models import add_noise
from vitrail.cli import app
from vitrail.evaluation.trained_images import SHRINKAGE, fit_statistics
from vitrail.weights.bundle.feature_statistics import FeatureStatistics, parse_statistics

MUCH = 10**9


@pytest.fixture(scope="module")
def features():
    """Three classes of correlated features: for training, for validation, and of a fourth class."""
    rng = np.random.default_rng(0)
    mix, means = rng.normal(size=(12, 12)), 6 * rng.normal(size=(4, 12))
    labels = np.arange(300) % 3
    train, val = (rng.normal(size=(300, 12)) @ mix + means[labels] for _ in range(2))
    return train, labels, val, rng.normal(size=(100, 12)) @ mix + means[3]


def test_distances_are_those_of_scipy(features):
    train, labels, val, other = features
    statistics = fit_statistics(train, labels, val, MUCH)
    train, other = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (train, other))
    means = np.stack([train[labels == k].mean(axis=0) for k in range(3)])
    residual = train - means[labels]
    covariance = residual.T @ residual / len(train)
    spread = np.trace(covariance) / 12
    inverse = np.linalg.inv((1 - SHRINKAGE) * covariance + SHRINKAGE * spread * np.eye(12))
    expected = [min(mahalanobis(x, mean, inverse) for mean in means) / 12**0.5 for x in other]
    assert statistics.distances(3 * other) == pytest.approx(expected, rel=0.01)  # stored in half precision


@pytest.mark.parametrize("count", [1, 19, 20, 21, 100, 300])
def test_at_most_five_percent_of_the_validation_set_is_flagged(features, count):
    train, labels, val, other = features
    statistics = fit_statistics(train, labels, val[:count], MUCH)
    flagged = (statistics.scores(val[:count]) > 1).sum()
    assert flagged == int(0.05 * count)
    assert count < 20 or (statistics.scores(other) > 1).mean() > 0.9


def test_multi_label_features_have_one_mean(features):
    train, labels, val, _ = features
    hot = np.eye(3, dtype=np.int64)[labels]
    statistics = fit_statistics(train, hot, val, MUCH)
    assert statistics.means.shape == (1, 12)
    assert (statistics.scores(val) > 1).mean() <= 0.05


def test_no_statistics_without_room_or_without_images(features):
    train, labels, val, _ = features
    size = fit_statistics(train, labels, val, MUCH).bytes
    assert size == 4 * 12 + 2 * 12 * 12 + 2 * 3 * 12 + 4
    assert fit_statistics(train, labels, val, size - 1) is None
    assert fit_statistics(train, labels, val[:0], MUCH) is None
    assert fit_statistics(np.ones((9, 12)), np.zeros(9, np.int64), val, MUCH) is None  # no spread at all


# ---- in a file ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle():
    torch.manual_seed(0)
    model = add_noise(vt.create("mu/8", classes=3))
    D, rng = model.config.pooled_width, np.random.default_rng(1)
    train, val = rng.normal(size=(200, D)), rng.normal(size=(50, D))
    statistics = fit_statistics(train, np.arange(200) % 3, val, MUCH)
    return vt.Bundle(model=model, labels=["cat", "dog", "eel"], statistics=statistics)


@pytest.mark.parametrize("spread", [1e-3, 1e-5, 5e-6, 1e-9, 0.0])
def test_features_that_hardly_differ_have_no_statistics_or_finite_ones(spread):
    """A model that has learned nothing must not end its run with an error."""
    rng = np.random.default_rng(0)
    features = 1.0 + spread * rng.normal(size=(300, 16))
    labels = rng.integers(0, 3, 300)
    statistics = fit_statistics(features, labels, features[:50], MUCH)
    assert (statistics is None) == (spread < 1e-4)


def test_an_evaluation_counts_images_out_of_distribution(bundle, tmp_path):
    """The same images as `predict` flags, whatever the batch size, and with probes."""
    rng = np.random.default_rng(2)
    size = bundle.model.config.pixels
    images = rng.integers(0, 255, (9, *size, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", images=images, labels=np.arange(9) % 3, classes=np.array(bundle.labels))
    scores = np.array([one.ood_score for one in vt.Predictor(bundle)(list(images))])
    middle = float(np.median(scores))
    threshold = (bundle.statistics.threshold * middle * 1.0001).astype(np.float32)
    moved = replace(bundle, statistics=replace(bundle.statistics, threshold=threshold))
    for how in (dict(batch=128), dict(batch=2)):
        found = vt.evaluate(moved, tmp_path / "x.npz", **how)
        assert (found.out_of_distribution.images, found.out_of_distribution.fraction) == (4, 4 / 9)
    assert found.as_dict()["out_of_distribution"] == {"images": 4, "fraction": 4 / 9}
    assert "4 images (44.4%) are unlike the training images" in repr(found)
    probed = vt.evaluate(moved, tmp_path / "x.npz", probe="knn", split="all")
    assert probed.out_of_distribution.images == 4
    without = vt.evaluate(replace(bundle, statistics=None), tmp_path / "x.npz", batch=2)
    assert without.out_of_distribution is None
    assert without.metrics == found.metrics
    moved.save(tmp_path / "x.safetensors")
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "x.safetensors"), str(tmp_path / "x.npz")])
    assert "out of distribution  4 images (44.4%)" in done.output


def equal(one, other):
    pairs = zip(one.arrays().items(), other.arrays().items(), strict=True)
    return all(a == b and x.dtype == y.dtype and np.array_equal(x, y) for (a, x), (b, y) in pairs)


def test_round_trip(bundle, tmp_path):
    bundle.save(tmp_path / "x.safetensors")
    assert equal(vt.load(tmp_path / "x.safetensors").statistics, bundle.statistics)
    assert equal(parse_statistics(json.loads(json.dumps(bundle.statistics.describe()))), bundle.statistics)


@pytest.mark.parametrize("change", [dict(size=64), dict(classes=5), dict(activation="relu")], ids=str)
def test_a_changed_model_has_no_statistics(bundle, tmp_path, change):
    bundle.save(tmp_path / "x.safetensors")
    assert vt.load(tmp_path / "x.safetensors", **change).statistics is None


def test_statistics_that_do_not_fit_are_refused(bundle, tmp_path):
    good = bundle.statistics
    with pytest.raises(vt.ConfigError, match="do not fit together: means has shape"):
        replace(good, means=good.means[:, 1:])
    with pytest.raises(vt.ConfigError, match="NaN, infinity or a threshold"):
        replace(good, threshold=np.array([np.nan], np.float32))
    narrow = FeatureStatistics(good.center[1:], good.whitening[1:], good.means, good.threshold)
    with pytest.raises(vt.ConfigError, match="of width"):
        replace(bundle, statistics=narrow)
    broken = replace(bundle)
    broken.statistics = narrow  # past the checks, as a damaged file is
    broken.save(tmp_path / "x.safetensors")
    with pytest.raises(vt.FileError, match=r"x.safetensors is damaged: the feature statistics are of width"):
        vt.load(tmp_path / "x.safetensors")
