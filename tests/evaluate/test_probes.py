"""Probes against brute force and scikit-learn, and what they are computed from."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import vitrail as vt
from conftest import shake
from vitrail.errors import InputError
from vitrail.evaluation import probes
from vitrail.evaluation.probes import Labelled, check_layers, check_probes, collector, probe, unpack


def clouds(count, seed, classes=4, width=6):
    """Points around a centre for each class, too wide to be told apart without mistakes."""
    centres = np.random.default_rng(0).normal(size=(classes, width))
    chance = np.random.default_rng(seed)
    y = chance.integers(0, classes, count)
    x = centres[y] + 0.8 * chance.normal(size=(count, width))
    return torch.from_numpy(x).float(), torch.from_numpy(y)


def test_neighbours_by_brute_force(monkeypatch):
    monkeypatch.setattr(probes, "MOST_NUMBERS", 1000)  # so that there are several blocks
    (x, y), (seen, _) = clouds(120, 1), clouds(50, 2)
    for k, said in zip((1, 10, 100), probes.knn(x, y, seen, 4, (1, 10, 100)), strict=True):
        for i in range(50):
            a, b = x.double().numpy(), seen[i].double().numpy()
            near = a @ b / np.linalg.norm(a, axis=1) / np.linalg.norm(b)
            best = np.argsort(-near)[:k]
            votes = np.zeros(4)
            for j in best:
                votes[y[j]] += np.exp(near[j] / 0.07)
            assert said[i] == votes.argmax()


def test_only_as_many_neighbours_as_there_are():
    (x, y), (seen, answers) = clouds(110, 1), clouds(50, 2)
    rows = list(probes.knn_rows(x, y, seen, answers, 4, 3, "mean"))
    assert [(row.setting, row.layer, row.feature) for row in rows] == [
        ("k 10", 3, "mean"),
        ("k 20", 3, "mean"),
        ("k 100", 3, "mean"),
    ]
    said = probes.knn(x, y, seen, 4, [20])[0]
    assert rows[1].top1 == (said == answers).double().mean()
    assert [row.setting for row in probes.knn_rows(x[:7], y[:7], seen, answers, 4, 0, "mean")] == ["k 7"]


@pytest.mark.parametrize("penalty", [1.0, 1e-2, 1e-4])
def test_the_linear_probe_is_logistic_regression(penalty):
    (x, y), (seen, _) = clouds(200, 3), clouds(300, 4)
    x, seen = 5 * x + 3, 5 * seen + 3
    (said,) = probes.linear(x, y, seen, 4, [penalty])
    mean, std = x.double().mean(0), x.double().std(0, correction=0)
    theirs = LogisticRegression(C=1 / (penalty * len(x)), tol=1e-8, max_iter=2000)
    theirs.fit((x - mean) / std, y)
    assert (said.numpy() == theirs.predict((seen - mean) / std)).mean() > 0.99
    assert (said != 0).any()


def test_the_penalty_is_chosen_on_pictures_that_are_held_out(monkeypatch):
    x, y = clouds(200, 3)
    seen = []
    real = probes.linear

    def watch(x, y, held, classes, penalties):
        seen.append((len(x), len(held), len(set(map(tuple, torch.cat([x, held]).tolist())))))
        return real(x, y, held, classes, penalties)

    monkeypatch.setattr(probes, "linear", watch)
    chosen = probes.choose_penalty(x, y, 4)
    assert seen == [(160, 40, 200)]
    order = probes.shuffle([0, 0], 200)
    held, rest = order[:40], order[40:]
    shares = [
        (real(x[rest], y[rest], x[held], 4, [p])[0] == y[held]).double().mean().item()
        for p in probes.PENALTIES
    ]
    assert shares[probes.PENALTIES.index(chosen)] == max(shares)
    assert probes.choose_penalty(x[:4], y[:4], 4) in probes.PENALTIES  # too few to hold any out


@pytest.mark.parametrize("count", [4, 40])  # fewer and more pictures than numbers
def test_few_shot_is_ridge_regression(count):
    (x, y), (seen, _) = clouds(count, 5), clouds(60, 6)
    said = probes.ridge(x, y, seen, 4)
    mean, std = x.double().mean(0), x.double().std(0, correction=0) + 1e-5
    wide = [torch.nn.functional.pad((a - mean) / std, (0, 1), value=100.0).numpy() for a in (x, seen)]
    goal = 2 * np.eye(4)[y.numpy()] - 1
    theirs = Ridge(alpha=1024, fit_intercept=False, solver="svd").fit(wide[0], goal)
    assert (said.numpy() == theirs.predict(wide[1]).argmax(axis=1)).all()


def test_few_shot_draws():
    (x, y), (seen, answers) = clouds(60, 7), clouds(200, 8)
    one, five = probes.drawn(y, 1, 2), probes.drawn(y, 5, 2)
    assert y[one].bincount().tolist() == [1] * 4
    assert y[five].bincount().tolist() == [5] * 4
    assert set(one.tolist()) < set(five.tolist())
    assert probes.drawn(y, 5, 3).tolist() != five.tolist()
    rows = list(probes.fewshot_rows(x, y, seen, answers, 4, 0, "both"))
    fewest = int(y.bincount().min())
    assert [row.setting for row in rows] == [f"{n} each" for n in (1, 5, 10) if n <= fewest]
    shares = [
        (probes.ridge(x[w], y[w], seen, 4) == answers).double().mean().item()
        for w in (probes.drawn(y, 5, draw) for draw in range(5))
    ]
    assert rows[1].top1 == pytest.approx(np.mean(shares))
    assert rows[1].spread == pytest.approx(np.std(shares, ddof=1))


# ---- features -------------------------------------------------------------------------------


def test_one_pass_gives_logits_and_every_feature(tiny, pictures):
    with torch.no_grad():
        logits, features = unpack(collector(tiny, [1, 0])(pictures), tiny.config, [1, 0])
        encoded = tiny.encode(pictures, layers=[0, 1])
        assert torch.equal(logits, tiny(pictures))
    assert features.shape == (4, 2, 2, 12)
    for place, layer in enumerate((1, 0)):
        seen = encoded.layers[layer]
        classes, mean = seen.prefix[:, 0], seen.patches.flatten(1, 2).mean(1)
        assert torch.equal(probes.pick(features[:, place], "class"), classes)
        assert torch.equal(probes.pick(features[:, place], "mean"), mean)
        assert torch.equal(probes.pick(features[:, place], "both"), torch.cat([classes, mean], 1))


def test_without_a_class_token_or_a_head(pictures):
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
    model = shake(vt.ViT(config))
    with torch.no_grad():
        logits, features = unpack(collector(model, [0])(pictures), config, [0])
        assert torch.equal(features[:, 0, 0], model.encode(pictures).patches.flatten(1, 2).mean(1))
    assert (logits.shape, features.shape) == ((4, 0), (4, 1, 1, 12))
    known = Labelled(torch.randn(30, 1, 1, 12), torch.arange(30) % 2)
    assert {row.feature for row in probe(["knn"], known, known, 2, [0])} == {"mean"}


def test_a_row_for_each_probe_layer_and_feature():
    known = Labelled(torch.randn(60, 2, 2, 5), torch.arange(60) % 3)
    known.features[:, 1, 1] += 9 * torch.nn.functional.one_hot(
        known.labels, 5
    )  # only the mean of layer 7 tells
    rows = probe(["knn", "linear", "fewshot"], known, known, 3, [4, 7])
    assert [(row.probe, row.setting) for row in rows if (row.layer, row.feature) == (4, "both")] == [
        ("knn", "k 10"),
        ("knn", "k 20"),
        ("linear", ""),
        ("fewshot", "1 each"),
        ("fewshot", "5 each"),
        ("fewshot", "10 each"),
    ]
    assert len(rows) == 6 * 2 * 3
    best = {(row.layer, row.feature): row.top1 for row in rows if row.setting == "10 each"}
    assert best[7, "mean"] > 0.95
    assert max(best[4, "class"], best[4, "mean"], best[7, "class"]) < 0.8
    assert rows == probe(["knn", "linear", "fewshot", "knn"], known, known, 3, [4, 7])  # the same every time
    with torch.inference_mode(False), torch.no_grad():
        assert rows[12:18] == probe(["linear"], known, known, 3, [4, 7])


def test_words_and_layers():
    with pytest.raises(
        InputError,
        match=r"^A probe is one of knn, linear, fewshot. Got 'kn'. Did you mean 'knn'\? There is: knn, linear, fewshot.$",
    ):
        check_probes(["kn"])
    assert check_layers(None, 3) == [2]
    assert check_layers("all", 3) == [0, 1, 2]
    assert check_layers([2, 0, 2], 3) == [2, 0]
    for bad in ([3], [-1], [], ["0"], [True], "0"):
        with pytest.raises(
            InputError,
            match=r'^layers must be "all" or block numbers from 0 to 2. Got .*. Blocks count from 0.$',
        ):
            check_layers(bad, 3)
