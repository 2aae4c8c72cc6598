"""Thresholds of multi-label models: the best F1 of each class."""

import numpy as np
import pytest
from sklearn.metrics import f1_score

from vitrail.weights.bundle.scores import choose_thresholds, sigmoid


def test_no_other_threshold_has_a_better_f1():
    rng = np.random.default_rng(0)
    targets = (rng.random((200, 4)) < [0.5, 0.1, 0.3, 0.8]).astype(np.int64)
    logits = rng.normal(size=(200, 4)) * 2 + targets * [1.0, 4.0, 0.0, 2.0] - [0, 3, 1, -2]
    scores = sigmoid(logits)
    for k, threshold in enumerate(choose_thresholds(logits, targets)):
        chosen = f1_score(targets[:, k], scores[:, k] > threshold)
        others = [f1_score(targets[:, k], scores[:, k] >= one) for one in scores[:, k]]
        assert chosen == pytest.approx(max(others))


def test_separated_scores_get_the_threshold_between_them_that_is_nearest_to_one_half():
    logits = np.array([[5.0]] * 6 + [[-5.0]] * 6)
    assert choose_thresholds(logits, np.array([[1]] * 6 + [[0]] * 6)) == pytest.approx((0.5,))


def test_tied_scores_are_accepted_or_rejected_together():
    logits, targets = np.zeros((12, 1)), np.array([[1]] * 6 + [[0]] * 6)
    assert choose_thresholds(logits, targets)[0] < 0.5  # all of them: F1 2/3 instead of 0


def test_too_few_images_keep_one_half():
    rng = np.random.default_rng(0)
    targets = np.zeros((50, 2), np.int64)
    targets[:4, 0], targets[:47, 1] = 1, 1
    assert choose_thresholds(rng.normal(size=(50, 2)) - 4, targets) == (0.5, 0.5)
