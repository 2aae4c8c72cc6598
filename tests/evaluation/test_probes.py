"""Probes against brute force and scikit-learn, and the features they use."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import vitrail as vt
from tests.support.models import add_noise
from vitrail.base.errors import InputError
from vitrail.evaluation import forward, probes
from vitrail.evaluation.probes import (
    LabeledFeatures,
    check_layers,
    check_probes,
    run_probes,
)
from vitrail.images.rng import random_permutation


def clusters(count, seed, classes=4, width=6):
    """Overlapping Gaussian clusters, one per class."""
    centers = np.random.default_rng(0).normal(size=(classes, width))
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, count)
    x = centers[y] + 0.8 * rng.normal(size=(count, width))
    return torch.from_numpy(x).float(), torch.from_numpy(y)


def test_nearest_neighbors_by_brute_force(monkeypatch):
    monkeypatch.setattr(probes, "_MAX_SIMILARITIES", 1000)  # several chunks
    (x, y), (x_test, _) = clusters(120, 1), clusters(50, 2)
    for k, predicted in zip((1, 10, 100), probes.predict_knn(x, y, x_test, 4, (1, 10, 100)), strict=True):
        for i in range(50):
            a, b = x.double().numpy(), x_test[i].double().numpy()
            near = a @ b / np.linalg.norm(a, axis=1) / np.linalg.norm(b)
            best = np.argsort(-near)[:k]
            votes = np.zeros(4)
            for j in best:
                votes[y[j]] += np.exp(near[j] / 0.07)
            assert predicted[i] == votes.argmax()


def test_k_is_at_most_the_number_of_training_images():
    (x, y), (x_test, y_test) = clusters(110, 1), clusters(50, 2)
    rows = list(probes._knn_scores(x, y, x_test, y_test, 4))
    assert [setting for setting, *_ in rows] == ["k=10", "k=20", "k=100"]
    predicted = probes.predict_knn(x, y, x_test, 4, [20])[0]
    assert rows[1][1] == (predicted == y_test).double().mean()
    assert [setting for setting, *_ in probes._knn_scores(x[:7], y[:7], x_test, y_test, 4)] == ["k=7"]


@pytest.mark.parametrize("penalty", [1.0, 1e-2, 1e-4])
def test_the_linear_probe_matches_logistic_regression(penalty):
    (x, y), (x_test, _) = clusters(200, 3), clusters(300, 4)
    x, x_test = 5 * x + 3, 5 * x_test + 3
    (predicted,) = probes.predict_logistic(x, y, x_test, 4, [penalty])
    mean, std = x.double().mean(0), x.double().std(0, correction=0)
    theirs = LogisticRegression(C=1 / (penalty * len(x)), tol=1e-8, max_iter=2000)
    theirs.fit((x - mean) / std, y)
    assert (predicted.numpy() == theirs.predict((x_test - mean) / std)).mean() > 0.99
    assert (predicted != 0).any()


def test_l2_is_selected_on_held_out_images(monkeypatch):
    x, y = clusters(200, 3)
    calls = []
    predict_logistic = probes.predict_logistic

    def spy(x, y, held_out, classes, l2_values):
        calls.append((len(x), len(held_out), len(set(map(tuple, torch.cat([x, held_out]).tolist())))))
        return predict_logistic(x, y, held_out, classes, l2_values)

    monkeypatch.setattr(probes, "predict_logistic", spy)
    selected = probes.select_l2(x, y, 4)
    assert calls == [(160, 40, 200)]
    order = random_permutation([0, 0], 200)
    held_out, rest = order[:40], order[40:]
    accuracies = [
        (predict_logistic(x[rest], y[rest], x[held_out], 4, [l2])[0] == y[held_out]).double().mean().item()
        for l2 in probes._L2
    ]
    assert accuracies[probes._L2.index(selected)] == max(accuracies)
    assert probes.select_l2(x[:4], y[:4], 4) in probes._L2  # too few images to hold any out


@pytest.mark.parametrize("count", [4, 40])  # fewer and more images than features
def test_few_shot_matches_ridge_regression(count):
    (x, y), (x_test, _) = clusters(count, 5), clusters(60, 6)
    predicted = probes.predict_ridge(x, y, x_test, 4)
    mean, std = x.double().mean(0), x.double().std(0, correction=0) + 1e-5
    padded = [torch.nn.functional.pad((a - mean) / std, (0, 1), value=100.0).numpy() for a in (x, x_test)]
    target = 2 * np.eye(4)[y.numpy()] - 1
    theirs = Ridge(alpha=1024, fit_intercept=False, solver="svd").fit(padded[0], target)
    assert (predicted.numpy() == theirs.predict(padded[1]).argmax(axis=1)).all()


def test_few_shot_draws_are_nested_and_differ():
    (x, y), (x_test, y_test) = clusters(60, 7), clusters(200, 8)
    one, five = probes.draw_shots(y, 1, 2), probes.draw_shots(y, 5, 2)
    assert y[one].bincount().tolist() == [1] * 4
    assert y[five].bincount().tolist() == [5] * 4
    assert set(one.tolist()) < set(five.tolist())
    assert probes.draw_shots(y, 5, 3).tolist() != five.tolist()
    rows = list(probes._few_shot_scores(x, y, x_test, y_test, 4))
    smallest = int(y.bincount().min())
    assert [setting for setting, *_ in rows] == [f"{n}-shot" for n in (1, 5, 10) if n <= smallest]
    accuracies = [
        (probes.predict_ridge(x[w], y[w], x_test, 4) == y_test).double().mean().item()
        for w in (probes.draw_shots(y, 5, draw) for draw in range(5))
    ]
    assert rows[1][1] == pytest.approx(np.mean(accuracies))
    assert rows[1][2] == pytest.approx(np.std(accuracies, ddof=1))


# ---- features -------------------------------------------------------------------------------


def collect(model, layers, images):
    """Logits (B, K), and features (B, layers, parts, D)."""
    rows = forward._build_collector(vt.Bundle(model=model), layers, None)(images)
    logits, flat = rows.split([model.config.classes, rows.shape[1] - model.config.classes], dim=1)
    return logits, flat.unflatten(1, (len(layers), -1, model.config.width))


def test_one_forward_pass_collects_logits_and_features(tiny, images):
    with torch.no_grad():
        logits, features = collect(tiny, [1, 0], images)
        encoded = tiny.encode(images, layers=[0, 1])
        assert torch.equal(logits, tiny(images))
    assert features.shape == (4, 2, 2, 12)
    for index, layer in enumerate((1, 0)):
        tokens = encoded.layers[layer]
        classes, mean = tokens.prefix[:, 0], tokens.patches.flatten(1, 2).mean(1)
        assert torch.equal(probes._select_feature(features[:, index], "class"), classes)
        assert torch.equal(probes._select_feature(features[:, index], "mean"), mean)
        assert torch.equal(probes._select_feature(features[:, index], "both"), torch.cat([classes, mean], 1))


def test_features_without_a_class_token_or_a_head(images):
    config = vt.ViTConfig(
        width=12,
        depth=1,
        heads=3,
        patch=6,
        size=12,
        channels=2,
        classes=0,
        class_token=False,
        pool="mean",
        registers=2,
    )
    model = add_noise(vt.ViT(config))
    with torch.no_grad():
        logits, features = collect(model, [0], images)
        assert torch.equal(features[:, 0, 0], model.encode(images).patches.flatten(1, 2).mean(1))
    assert (logits.shape, features.shape) == ((4, 0), (4, 1, 1, 12))
    data = LabeledFeatures(torch.randn(30, 1, 1, 12), torch.arange(30) % 2)
    assert {row.feature for row in run_probes(["knn"], data, data, 2, [0])} == {"mean"}


def test_a_result_for_each_probe_layer_and_feature():
    data = LabeledFeatures(torch.randn(60, 2, 2, 5), torch.arange(60) % 3)
    data.features[:, 1, 1] += 9 * torch.nn.functional.one_hot(
        data.labels, 5
    )  # only the mean of layer 7 separates the classes
    rows = run_probes(["knn", "linear", "fewshot"], data, data, 3, [4, 7])
    assert [(row.probe, row.setting) for row in rows if (row.layer, row.feature) == (4, "both")] == [
        ("knn", "k=10"),
        ("knn", "k=20"),
        ("linear", ""),
        ("fewshot", "1-shot"),
        ("fewshot", "5-shot"),
        ("fewshot", "10-shot"),
    ]
    assert len(rows) == 6 * 2 * 3
    best = {(row.layer, row.feature): row.top1 for row in rows if row.setting == "10-shot"}
    assert best[7, "mean"] > 0.95
    assert max(best[4, "class"], best[4, "mean"], best[7, "class"]) < 0.8
    assert rows == run_probes(["knn", "linear", "fewshot", "knn"], data, data, 3, [4, 7])  # deterministic
    with torch.inference_mode(False), torch.no_grad():
        assert rows[12:18] == run_probes(["linear"], data, data, 3, [4, 7])


def test_unknown_probes_and_layers_are_refused():
    with pytest.raises(InputError, match=r"Unknown probe 'kn'\. Did you mean 'knn'\?"):
        check_probes(["kn"])
    assert check_layers(None, 3) == [2]
    assert check_layers("all", 3) == [0, 1, 2]
    assert check_layers([2, 0, 2], 3) == [2, 0]
    for bad in ([3], [-1], [], ["0"], [True], "0"):
        with pytest.raises(InputError, match=r'"all" or block numbers from 0 to 2, not .* counted from 0'):
            check_layers(bad, 3)
