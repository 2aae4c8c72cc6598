"""What a model's features are worth without its head: nearest neighbours, linear and few-shot probes.

One pass collects, for each wanted layer, the class token and the mean of the patches, after the last
norm where that stands before the pool; `both` is the two side by side. Every probe is computed from these.

| probe   | what it is                                                                             |
|---------|----------------------------------------------------------------------------------------|
| knn     | the k nearest training pictures vote (Wu et al. 2018; T 0.07 and the ks as in DINO)     |
| linear  | logistic regression, its L2 chosen on a fifth of train that is held out for it          |
| fewshot | ridge regression to -1 and 1 from n pictures of each class (big_vision), several draws  |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.chance import shuffle
from vitrail.errors import InputError, suggest

if TYPE_CHECKING:
    from vitrail.config import ViTConfig
    from vitrail.model import ViT

PROBES = ("knn", "linear", "fewshot")
NEIGHBOURS = (10, 20, 100, 200)
TEMPERATURE = 0.07
SHOTS = (1, 5, 10)
DRAWS = 5
PENALTIES = (1e0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # L2 of the linear probe
RIDGE, BIAS = 2.0**10, 100.0  # big_vision's: a constant so large that it is hardly held back
MOST_NUMBERS = 1 << 26  # in a block of similarities

Layers = Sequence[int] | Literal["all"] | None


@dataclass(frozen=True)
class Row:
    """How good one probe is on one feature."""

    probe: str
    setting: str
    """ "k 20", "5 each"; the linear probe has none."""
    layer: int
    feature: str
    """class, mean or both."""
    top1: float
    spread: float | None = None
    """Standard deviation over the draws, where there are several."""
    penalty: float | None = None
    """The L2 that was chosen."""


@dataclass(frozen=True, eq=False)
class Labelled:
    """Features (N, layers, parts, D) of some pictures, and their classes (N,)."""

    features: Tensor
    labels: Tensor


def check_probes(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in PROBES:
            raise InputError(f"A probe is one of {', '.join(PROBES)}.", repr(name), suggest(name, PROBES))
    return tuple(dict.fromkeys(names))


def check_layers(layers: Layers, depth: int) -> list[int]:
    """Blocks from 0, each once; the last one without a wish."""
    if layers is None:
        return [depth - 1]
    if layers == "all":
        return list(range(depth))
    wanted = list(dict.fromkeys(layers))
    if not wanted or not all(type(layer) is int and 0 <= layer < depth for layer in wanted):
        must = f'layers must be "all" or block numbers from 0 to {depth - 1}.'
        raise InputError(must, repr(layers), "Blocks count from 0.")
    return wanted


def parts_of(config: ViTConfig) -> tuple[str, ...]:
    """What is collected of each layer."""
    return ("class", "mean") if config.class_token else ("mean",)


def collector(model: ViT, layers: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """A function from pictures to a row of numbers each: logits, if the model has a head, then features."""
    parts = parts_of(model.config)

    def collect(images: Tensor) -> Tensor:
        encoded = model.encode(images, layers=layers)
        rows = [model.logits(model.head(encoded.pooled))] if model.config.classes else []
        for layer in layers:
            seen = encoded.layers[layer]
            each = {"class": seen.prefix[:, :1].flatten(1), "mean": seen.patches.flatten(1, -2).mean(dim=1)}
            rows += [each[part] for part in parts]
        return torch.cat(rows, dim=1)

    return collect


def unpack(rows: Tensor, config: ViTConfig, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What `collector` made as logits (N, K) and features (N, layers, parts, D)."""
    logits, flat = rows[:, : config.classes], rows[:, config.classes :]
    return logits, flat.unflatten(1, (len(layers), len(parts_of(config)), -1))


def probe(
    names: Sequence[str],
    train: Labelled,
    test: Labelled,
    classes: int,
    layers: Sequence[int],
    device: torch.device | str = "cpu",
) -> list[Row]:
    """Every wanted probe on every feature: fitted on train, judged on test."""
    rows = []
    y, answers = train.labels.to(device), test.labels.to(device)
    for name in check_probes(names):
        run = {"knn": knn_rows, "linear": linear_rows, "fewshot": fewshot_rows}[name]
        for place, layer in enumerate(layers):
            for feature in ("class", "mean", "both") if train.features.shape[2] == 2 else ("mean",):
                x, seen = (pick(one.features[:, place], feature).to(device) for one in (train, test))
                rows += list(run(x, y, seen, answers, classes, layer, feature))
    return rows


def pick(features: Tensor, feature: str) -> Tensor:
    """One feature (N, D) or (N, 2 D) of a layer's (N, parts, D)."""
    return {"class": features[:, 0], "mean": features[:, -1], "both": features.flatten(1)}[feature]


def share(said: Tensor, labels: Tensor) -> float:
    return (said == labels).double().mean().item()


# ---- nearest neighbours ---------------------------------------------------------------------


def knn_rows(
    x: Tensor, y: Tensor, seen: Tensor, answers: Tensor, classes: int, layer: int, feature: str
) -> Iterator[Row]:
    ks = [k for k in NEIGHBOURS if k <= len(x)] or [len(x)]
    for k, said in zip(ks, knn(x, y, seen, classes, ks), strict=True):
        yield Row("knn", f"k {k}", layer, feature, share(said, answers))


def knn(x: Tensor, y: Tensor, seen: Tensor, classes: int, ks: Sequence[int]) -> list[Tensor]:
    """What the k nearest say, for each k: each has exp(cosine / T) votes."""
    x, seen = F.normalize(x.float(), dim=1), F.normalize(seen.float(), dim=1)
    said: list[list[Tensor]] = [[] for _ in ks]
    for part in seen.split(max(1, MOST_NUMBERS // len(x))):
        near, which = (part @ x.T).topk(max(ks), dim=1)  # (b, k), nearest first
        votes = (near.double() / TEMPERATURE).exp()
        for place, k in enumerate(ks):
            counted = torch.zeros(len(part), classes, dtype=torch.float64, device=x.device)
            counted.scatter_add_(1, y[which[:, :k]], votes[:, :k])
            said[place].append(counted.argmax(dim=1))
    return [torch.cat(parts) for parts in said]


# ---- logistic regression --------------------------------------------------------------------


def linear_rows(
    x: Tensor, y: Tensor, seen: Tensor, answers: Tensor, classes: int, layer: int, feature: str
) -> Iterator[Row]:
    penalty = choose_penalty(x, y, classes)
    (said,) = linear(x, y, seen, classes, [penalty])
    yield Row("linear", "", layer, feature, share(said, answers), penalty=penalty)


def choose_penalty(x: Tensor, y: Tensor, classes: int) -> float:
    """The L2 that is best on a fifth of train, the same fifth every time; of equals the strongest."""
    order = shuffle([0, 0], len(x)).to(x.device)
    held, rest = order[: len(x) // 5], order[len(x) // 5 :]
    if not len(held):
        return PENALTIES[len(PENALTIES) // 2]
    said = linear(x[rest], y[rest], x[held], classes, PENALTIES)
    shares = [share(one, y[held]) for one in said]
    return PENALTIES[shares.index(max(shares))]


def linear(x: Tensor, y: Tensor, seen: Tensor, classes: int, penalties: Sequence[float]) -> list[Tensor]:
    """What logistic regressions say, one for each L2, on features brought to mean 0 and spread 1."""
    x, seen = standardised(x, seen)
    weight = torch.zeros(x.shape[1], classes, dtype=x.dtype, device=x.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=x.dtype, device=x.device, requires_grad=True)
    said = []
    for penalty in penalties:  # each begins where the one before ended
        with torch.enable_grad():
            descend(x, y, weight, bias, penalty)
        said.append((seen @ weight.detach() + bias.detach()).argmax(dim=1))
    return said


def descend(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, penalty: float) -> None:
    """Mean cross-entropy plus penalty / 2 of the weights' squares, to its minimum or 100 steps."""
    search = "strong_wolfe"
    steps = torch.optim.LBFGS(
        [weight, bias], max_iter=100, tolerance_grad=1e-5, tolerance_change=1e-10, line_search_fn=search
    )

    def loss() -> Tensor:
        steps.zero_grad()
        value = F.cross_entropy(x @ weight + bias, y) + penalty / 2 * weight.square().sum()
        value.backward()
        return value

    steps.step(loss)


def standardised(x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Both by the mean and the spread of x, in float64."""
    x, seen = x.double(), seen.double()
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0) + 1e-5
    return (x - mean) / std, (seen - mean) / std


# ---- few-shot -------------------------------------------------------------------------------


def fewshot_rows(
    x: Tensor, y: Tensor, seen: Tensor, answers: Tensor, classes: int, layer: int, feature: str
) -> Iterator[Row]:
    counts = y.bincount(minlength=classes)
    fewest = int(counts[counts > 0].min())
    for shots in (n for n in SHOTS if n <= fewest):
        shares = []
        for draw in range(DRAWS):
            which = drawn(y, shots, draw)
            shares.append(share(ridge(x[which], y[which], seen, classes), answers))
        found = torch.tensor(shares, dtype=torch.float64)
        yield Row("fewshot", f"{shots} each", layer, feature, found.mean().item(), found.std().item())


def drawn(y: Tensor, shots: int, draw: int) -> Tensor:
    """So many pictures of each class; more shots of the same draw hold the fewer."""
    order = shuffle([draw, 1], len(y)).to(y.device)
    return torch.cat([order[y[order] == kind][:shots] for kind in y.unique().tolist()])


def ridge(x: Tensor, y: Tensor, seen: Tensor, classes: int) -> Tensor:
    """What a least-squares fit to -1 and 1 says, by the smaller of the two matrices that give it."""
    x, seen = standardised(x, seen)
    x, seen = (F.pad(one, (0, 1), value=BIAS) for one in (x, seen))
    goal = 2 * F.one_hot(y, classes).to(x.dtype) - 1
    held = RIDGE * torch.eye(min(x.shape), dtype=x.dtype, device=x.device)
    if len(x) < x.shape[1]:
        weight = x.T @ torch.linalg.solve(x @ x.T + held, goal)
    else:
        weight = torch.linalg.solve(x.T @ x + held, x.T @ goal)
    return (seen @ weight).argmax(dim=1)
