"""Probes of frozen features: k nearest neighbors, a linear probe, few-shot classification, and a new head.

The features of a block are the class token and the mean of the patch tokens (after the final norm, where the
model has it before the pool). Probes run on either, and on `both` concatenated.

| probe   | method                                                                                        |
|---------|-----------------------------------------------------------------------------------------------|
| knn     | weighted vote of the k nearest training images (Wu et al. 2018; T = 0.07 and the ks of DINO) |
| linear  | logistic regression; its L2 is selected on a held-out fifth of the training set               |
| fewshot | ridge regression to -1 and 1 on n images per class (as in big_vision), over several draws     |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.base.errors import InputError, suggest
from vitrail.evaluation.forward import BATCH, LabeledFeatures, run_model
from vitrail.evaluation.selection import Progress
from vitrail.images.formats.sources import Dataset, Split
from vitrail.images.loader import CorruptFiles
from vitrail.images.rng import random_permutation
from vitrail.model import ViT, surgery
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.own_shape import reading_preprocess

PROBES = ("knn", "linear", "fewshot")
_NEIGHBORS = (10, 20, 100, 200)
_KNN_TEMPERATURE = 0.07
_SHOTS = (1, 5, 10)
_DRAWS = 5
_L2 = (1e0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # candidates for the linear probe, strongest first
_RIDGE, _BIAS = 2.0**10, 100.0  # big_vision's; the bias input is so large that ridge hardly shrinks it
_MAX_SIMILARITIES = 1 << 26  # in memory at once

Layers = Sequence[int] | Literal["all"] | None
Scored = Iterator[tuple[str, float, float | None, float | None]]
"""The setting of a probe, its accuracy, the standard deviation over draws, and the selected L2."""


@dataclass(frozen=True)
class ProbeResult:
    """Accuracy of one probe on one feature."""

    probe: str
    setting: str
    """ "k=20" or "5-shot"; empty for the linear probe."""
    layer: int
    feature: str
    """class, mean or both."""
    top1: float
    std: float | None = None
    """Standard deviation over the draws, for few-shot."""
    l2: float | None = None
    """The selected L2 of the linear probe."""


def check_probes(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each once."""
    for name in names:
        if name not in PROBES:
            raise InputError(f"Unknown probe {name!r}. {suggest(name, PROBES)}")
    return tuple(dict.fromkeys(names))


def check_layers(layers: Layers, depth: int) -> list[int]:
    """Block indices from 0, each once; the last block by default."""
    if layers is None:
        return [depth - 1]
    if layers == "all":
        return list(range(depth))
    indices = list(dict.fromkeys(layers))
    if not indices or not all(type(layer) is int and 0 <= layer < depth for layer in indices):
        raise InputError(
            f'layers must be "all" or block numbers from 0 to {depth - 1}, not {layers!r}; blocks are '
            "counted from 0."
        )
    return indices


# ---- all probes -----------------------------------------------------------------------------


def run_probes(
    names: Sequence[str],
    train: LabeledFeatures,
    test: LabeledFeatures,
    classes: int,
    layers: Sequence[int],
    device: torch.device | str = "cpu",
) -> list[ProbeResult]:
    """Fit each probe on each feature of `train`, and evaluate it on `test`."""
    results = []
    y, y_test = train.labels.to(device), test.labels.to(device)
    for name in check_probes(names):
        run = {"knn": _knn_scores, "linear": _linear_scores, "fewshot": _few_shot_scores}[name]
        for index, layer in enumerate(layers):
            for feature in ("class", "mean", "both") if train.features.shape[2] == 2 else ("mean",):
                x, x_test = (
                    _select_feature(part.features[:, index], feature).to(device) for part in (train, test)
                )
                for setting, top1, std, l2 in run(x, y, x_test, y_test, classes):
                    results.append(ProbeResult(name, setting, layer, feature, top1, std, l2))
    return results


def _select_feature(features: Tensor, feature: str) -> Tensor:
    """One feature (N, D) or (N, 2 D) from the parts (N, parts, D) of a block."""
    return {"class": features[:, 0], "mean": features[:, -1], "both": features.flatten(1)}[feature]


def _accuracy(predicted: Tensor, labels: Tensor) -> float:
    return (predicted == labels).double().mean().item()


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of features in float64, (D,) each."""
    return x.mean(dim=0), x.std(dim=0, correction=0) + 1e-5


def _standardize(x: Tensor, x_test: Tensor) -> tuple[Tensor, Tensor]:
    """Standardize both by the mean and standard deviation of x, in float64."""
    x, x_test = x.double(), x_test.double()
    mean, std = _moments(x)
    return (x - mean) / std, (x_test - mean) / std


# ---- k nearest neighbors --------------------------------------------------------------------


def _knn_scores(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, classes: int) -> Scored:
    ks = [k for k in _NEIGHBORS if k <= len(x)] or [len(x)]
    for k, predicted in zip(ks, predict_knn(x, y, x_test, classes, ks), strict=True):
        yield f"k={k}", _accuracy(predicted, y_test), None, None


def predict_knn(x: Tensor, y: Tensor, x_test: Tensor, classes: int, ks: Sequence[int]) -> list[Tensor]:
    """Predictions for each k, by votes of weight exp(cosine similarity / T)."""
    x, x_test = F.normalize(x.float(), dim=1), F.normalize(x_test.float(), dim=1)
    predicted: list[list[Tensor]] = [[] for _ in ks]
    for chunk in x_test.split(max(1, _MAX_SIMILARITIES // len(x))):
        similarity, neighbors = (chunk @ x.T).topk(max(ks), dim=1)  # (b, k), nearest first
        weights = (similarity.double() / _KNN_TEMPERATURE).exp()
        for index, k in enumerate(ks):
            votes = torch.zeros(len(chunk), classes, dtype=torch.float64, device=x.device)
            votes.scatter_add_(1, y[neighbors[:, :k]], weights[:, :k])
            predicted[index].append(votes.argmax(dim=1))
    return [torch.cat(chunks) for chunks in predicted]


# ---- logistic regression --------------------------------------------------------------------


def _linear_scores(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, classes: int) -> Scored:
    l2 = select_l2(x, y, classes)
    (predicted,) = predict_logistic(x, y, x_test, classes, [l2])
    yield "", _accuracy(predicted, y_test), None, l2


def select_l2(x: Tensor, y: Tensor, classes: int) -> float:
    """The L2 with the best accuracy on a fixed held-out fifth of x; the strongest of equals."""
    order = random_permutation([0, 0], len(x)).to(x.device)
    held_out, rest = order[: len(x) // 5], order[len(x) // 5 :]
    if not len(held_out):
        return _L2[len(_L2) // 2]
    predicted = predict_logistic(x[rest], y[rest], x[held_out], classes, _L2)
    accuracies = [_accuracy(one, y[held_out]) for one in predicted]
    return _L2[accuracies.index(max(accuracies))]


def predict_logistic(
    x: Tensor, y: Tensor, x_test: Tensor, classes: int, l2_values: Sequence[float]
) -> list[Tensor]:
    """Predictions of logistic regression on standardized features, for each L2."""
    x, x_test = _standardize(x, x_test)
    weight, bias = _zeros(x, classes)
    predicted = []
    for l2 in l2_values:  # warm start: each fit begins at the solution of the previous one
        _fit_logistic(x, y, weight, bias, l2)
        predicted.append((x_test @ weight.detach() + bias.detach()).argmax(dim=1))
    return predicted


def fit_head(x: Tensor, y: Tensor, classes: int, l2: float) -> tuple[Tensor, Tensor]:
    """Weight (K, D) and bias (K,) of logistic regression, for features that are not standardized."""
    x = x.double()
    mean, std = _moments(x)
    weight, bias = _zeros(x, classes)
    _fit_logistic((x - mean) / std, y, weight, bias, l2)
    scaled = (weight.detach() / std[:, None]).T
    return scaled, bias.detach() - scaled @ mean


def _zeros(x: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Initial weight (D, K) and bias (K,) of logistic regression."""
    return (x.new_zeros(x.shape[1], classes, requires_grad=True), x.new_zeros(classes, requires_grad=True))


@torch.enable_grad()
def _fit_logistic(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, l2: float) -> None:
    """Minimize mean cross-entropy + l2 / 2 * |weight|^2 in place, by at most 100 steps of L-BFGS."""
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=100,
        tolerance_grad=1e-5,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight + bias, y) + l2 / 2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


# ---- few-shot -------------------------------------------------------------------------------


def _few_shot_scores(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, classes: int) -> Scored:
    counts = y.bincount(minlength=classes)
    smallest = int(counts[counts > 0].min())
    for shots in (n for n in _SHOTS if n <= smallest):
        draws = [draw_shots(y, shots, draw) for draw in range(_DRAWS)]
        predicted = [predict_ridge(x[rows], y[rows], x_test, classes) for rows in draws]
        accuracies = torch.tensor([_accuracy(one, y_test) for one in predicted], dtype=torch.float64)
        yield f"{shots}-shot", accuracies.mean().item(), accuracies.std().item(), None


def draw_shots(y: Tensor, shots: int, draw: int) -> Tensor:
    """Indices of `shots` images of each class; within a draw, fewer shots are a subset of more."""
    order = random_permutation([draw, 1], len(y)).to(y.device)
    return torch.cat([order[y[order] == label][:shots] for label in y.unique().tolist()])


def predict_ridge(x: Tensor, y: Tensor, x_test: Tensor, classes: int) -> Tensor:
    """Predictions of ridge regression to -1 and 1, by the smaller of the two equivalent systems."""
    x, x_test = _standardize(x, x_test)
    x, x_test = (F.pad(one, (0, 1), value=_BIAS) for one in (x, x_test))
    target = 2 * F.one_hot(y, classes).to(x.dtype) - 1
    ridge = _RIDGE * torch.eye(min(x.shape), dtype=x.dtype, device=x.device)
    if len(x) < x.shape[1]:
        weight = x.T @ torch.linalg.solve(x @ x.T + ridge, target)
    else:
        weight = torch.linalg.solve(x.T @ x + ridge, x.T @ target)
    return (x_test @ weight).argmax(dim=1)


# ---- a head without training -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ProbedModel:
    """A model with a new head, and how good it is."""

    bundle: Bundle
    images: int
    """Training images that could be read."""
    l2: float
    """Selected on a fifth of them."""
    accuracy: float | None
    """On the validation set, or else the test set; None without one."""
    evaluated: int


def probe_head(
    bundle: Bundle,
    data: Dataset,
    *,
    batch: int = BATCH,
    workers: Any = "auto",
    progress: Progress = lambda split, done, total: None,
) -> ProbedModel:
    """Fit a linear head for the classes of a data set on the frozen features of a model."""
    if bundle.preprocess is None:
        raise InputError(f"A probe needs a model of images, and this one takes {bundle.model.config.input}.")
    if data.multilabel:
        raise InputError(
            "A probe needs one label per image, and this data has several; train a head instead."
        )
    if len(data.classes) < 2 or not len(data.train):
        raise InputError("A probe needs training images of at least two classes.")
    frozen = surgery.reclass(bundle.model, 0)
    reading = reading_preprocess(bundle, frozen)

    def features(name: str, split: Split) -> tuple[Tensor, Tensor]:
        """The pooled vectors (N, D) of the images that can be read, and their labels."""
        rows, valid = run_model(
            frozen,
            split,
            reading,
            batch=batch,
            workers=workers,
            corrupt=CorruptFiles("skip"),
            progress=lambda done: progress(name, done, len(split)),
        )
        return rows[valid > 0], torch.from_numpy(split.labels).long()[valid > 0]

    x, y = features("train", data.train)
    l2 = select_l2(x, y, len(data.classes))
    weight, bias = fit_head(x, y, len(data.classes), l2)
    accuracy, evaluated = None, 0
    if held_out := data.val or data.test:
        x_test, y_test = features("val", held_out)
        evaluated = len(y_test)
        predicted = (x_test.double() @ weight.T + bias).argmax(dim=1)
        accuracy = _accuracy(predicted, y_test) if evaluated else None
    new = Bundle(
        model=_with_head(frozen, weight, bias),
        preprocess=bundle.preprocess,
        labels=list(data.classes),
        card=bundle.card,
        notes=bundle.notes,
        guess=bundle.guess,
        native=bundle.native,
    )
    return ProbedModel(new, len(y), l2, accuracy, evaluated)


def _with_head(model: ViT, weight: Tensor, bias: Tensor) -> ViT:
    """The model with this linear head."""
    config = replace(model.config, classes=len(bias), head="linear", head_bias=True, head_hidden=None)
    new = ViT(config)
    new.load_state_dict({**model.state_dict(), "head.weight": weight.float(), "head.bias": bias.float()})
    return new.to(next(model.parameters()).device).eval()
