"""Lab `norms`: what norm and residual are each good for, and whether it matters where the norm stands.

Four notes write four blocks. Two measurements tell them apart: how large the gradient of each block is
before the first step of a deep model, and how well a less deep one learns, each at its own best rate.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.loader import Reader
from vitrail.data.sources import Dataset
from vitrail.evaluation.forward import inputs_of, sized
from vitrail.inspect.canvas import LINES, canvas, in_our_style
from vitrail.labs.given import described, opened, plainly, recipe_of
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.labs.study import Difference, Study, draw_arm, study
from vitrail.labs.trial import processes_for
from vitrail.model import ViT
from vitrail.weights.load import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "norms"
NOTE = (
    '000 "Breaking the equations down - 2", 001 "Residual Connection", '
    '003 "Residual pathways and layer normalization", 004 "Transformer Architecture"'
)
CLAIM = (
    "Residuals stabilise descent (003): without them gradients vanish (000, 001). LayerNorm guarantees mean "
    "0 and variance 1 (003) and gives better accuracy (000). It stands before each branch (000, 001, 004) or "
    "after it (004)."
)
TAKES = "labelled pictures"

ARMS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"block": "post-norm"},
    "res-post-norm": {"block": "res-post-norm"},
    "no norm": {"norm": "none"},
    "no residual": {"block": "no-residual"},
    "neither": {"block": "no-residual", "norm": "none"},
}
COLD = ("pre-norm", "post-norm")  # tried without warm-up too, which post-norm is said to need
PLACES = ("post-norm", "res-post-norm")
VANISHED = 0.01  # the first block's gradient, as a share of the last one's
STANDARD = 0.01  # how far from mean 0 and variance 1 is still there: eps takes a little of a small variance


@dataclass(frozen=True)
class Spread:
    """Over all tokens and all norms of a model: the mean furthest from 0, the variance furthest from 1."""

    mean: float
    variance: float

    @property
    def standard(self) -> bool:
        return abs(self.mean) < STANDARD and abs(self.variance - 1) < STANDARD


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    full = size == "full"
    pictures = opened(data) if full else opened(data, 256, 256)
    deep, seeds, width = (24, 10, 32) if full else (8, 2, 16)
    epochs, depth = (8, 8) if full else (1, 2)
    shared = plainly(pictures, epochs, width=width, depth=depth, heads=2)
    gradients = {
        name: [gradient_by_block(pictures, shared, change, deep, seed) for seed in range(seeds)]
        for name, change in ARMS.items()
    }
    arms: dict[str, dict[str, Any]] = {name: {"model": change} for name, change in ARMS.items()}
    if full:
        arms |= {f"{name} no warm-up": {"model": ARMS[name], "warmup": 0.0} for name in COLD}
    found = study(
        pictures,
        arms=arms,
        out=place / "runs",
        seeds=3 if full else 2,
        rates=[1.25e-4, 5e-4, 2e-3, 8e-3] if full else [1e-3],
        processes=processes_for(size),
        **shared,
    )
    best = f"rate {found.arms['pre-norm'].rate:g}, seed 0"
    trained = load(found.out / "runs" / "pre-norm" / best / "last.safetensors").model
    before, after = spreads(trained, batch_of(pictures, shared)[0])
    shutil.rmtree(found.out)
    compared = {name: found.compare("pre-norm", name) for name in ARMS if name != "pre-norm"}
    ratios = {name: fall(runs) for name, runs in gradients.items()}
    answer = compared["no residual"]
    return Result(
        number=100 * answer.mean,
        unit="points of accuracy, pre-norm more than without residuals",
        n=answer.n,
        verdict=judge(compared, ratios, before, after),
        sentence=sentence(pictures, shared, deep, found, gradients, before, after),
        figure=draw(gradients, found),
        interval=None if answer.interval is None else (100 * answer.interval[0], 100 * answer.interval[1]),
        numbers={
            "gradient, first block over last": ratios,
            "gradient of the first block": {name: typical(runs)[0] for name, runs in gradients.items()},
            "accuracy": {
                name: {"mean": arm.mean, "interval": arm.interval, "rate": arm.rate, "scores": arm.scores}
                for name, arm in found.arms.items()
            },
            "pre-norm more than": {name: vars(one) for name, one in compared.items()},
            "mean and variance": {"before gain and shift": vars(before), "after": vars(after)},
            "notes": found.notes,
        },
    )


def judge(
    compared: Mapping[str, Difference], ratios: Mapping[str, float], before: Spread, after: Spread
) -> Verdict:
    """Whether the residual is needed decides; what must be added to the notes' words is the condition.

    Args:
        compared: by how much pre-norm is better than each other arm.
        ratios: the gradient of the first block over that of the last.
    """

    def better(than: str) -> bool:
        return compared[than].clear and compared[than].mean > 0

    if not better("no residual"):
        return Verdict("does not hold", ": residuals bring no clear gain here")
    if not before.standard:
        return Verdict("does not hold", ": LayerNorm does not give mean 0 and variance 1")
    conditions = []
    if ratios["neither"] < VANISHED <= ratios["no residual"]:
        conditions.append(
            "gradients vanish where norms are missing too: with norms they keep their size without "
            "residuals, and learning fails all the same"
        )
    elif ratios["no residual"] >= VANISHED:
        conditions.append("no word is said of gradients that vanish: they do not at this depth")
    if not after.standard:
        conditions.append("mean 0 and variance 1 are meant before the learned gain and shift")
    if not better("no norm"):
        few = compared["no norm"]
        conditions.append(
            f"the norm's gain, {100 * few.mean:+.0f} points, is believed: {few.n} seeds do not make it clear"
        )
    apart = [
        f"{'worse' if compared[name].mean > 0 else 'better'} {name}"
        for name in PLACES
        if compared[name].clear
    ]
    if apart:
        conditions.append(f"where the norm stands is not all one: beside pre-norm, {' and '.join(apart)}")
    return Verdict("holds if", "; ".join(conditions)) if conditions else Verdict("holds")


# ---- gradients before the first step --------------------------------------------------------


def gradient_by_block(
    data: Dataset, shared: Mapping[str, Any], change: Mapping[str, Any], depth: int, seed: int
) -> list[float]:
    """How long the gradient of each block's parameters is, first block first.

    The head begins with zeros, behind which nothing has a gradient; here it gets values of variance 1/D.
    """
    images, labels = batch_of(data, shared)
    torch.manual_seed(seed)
    model = ViT(recipe_of(data, shared, {"model": {**change, "depth": depth}}).model).double()
    assert isinstance(model.head, nn.Linear)
    nn.init.normal_(model.head.weight, std=model.config.width**-0.5)
    F.cross_entropy(model(images), labels).backward()
    return [length(block) for block in model.blocks]


def length(block: nn.Module) -> float:
    parts = [parameter.grad.square().sum() for parameter in block.parameters() if parameter.grad is not None]
    return torch.stack(parts).sum().sqrt().item()


def batch_of(data: Dataset, shared: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The first 64 pictures in float64, and what they show."""
    preprocess = recipe_of(data, shared, {}).preprocess
    which = torch.arange(min(64, len(data.train)))
    reader = Reader(sized(data.train.take(which.numpy()), preprocess), preprocess)
    levels = next(reader.batches(iter([(0, which)]))).images
    labels = torch.from_numpy(data.train.labels[: len(which)])
    return inputs_of(levels, preprocess, torch.zeros((), dtype=torch.float64)), (
        labels if labels.ndim == 1 else labels.double()
    )


def typical(runs: Sequence[Sequence[float]]) -> list[float]:
    """Block by block, the geometric mean over seeds: sizes differ by factors."""
    return [math.exp(fmean(math.log(max(one, 1e-300)) for one in seeds)) for seeds in zip(*runs, strict=True)]


def fall(runs: Sequence[Sequence[float]]) -> float:
    """The gradient of the first block over that of the last."""
    found = typical(runs)
    return found[0] / found[-1]


# ---- what LayerNorm guarantees --------------------------------------------------------------


def spreads(model: ViT, images: Tensor) -> tuple[Spread, Spread]:
    """Before the learned gain and shift, and after them."""
    plain: list[Tensor] = []
    learned: list[Tensor] = []

    def look(norm: Any, given: tuple[Tensor, ...], out: Tensor) -> None:
        plain.append(F.layer_norm(given[0], norm.normalized_shape, eps=norm.eps))
        learned.append(out)

    norms = [part for part in model.modules() if isinstance(part, nn.LayerNorm)]
    hooks = [norm.register_forward_hook(look) for norm in norms]
    with torch.no_grad():
        model.double().eval()(images)
    for hook in hooks:
        hook.remove()
    return furthest(plain), furthest(learned)


def furthest(outputs: Sequence[Tensor]) -> Spread:
    """Of all tokens, the mean furthest from 0 and the variance furthest from 1."""
    rows = torch.cat([out.flatten(0, -2) for out in outputs])
    means, variances = rows.mean(dim=-1), rows.var(dim=-1, correction=0)
    return Spread(means[means.abs().argmax()].item(), variances[(variances - 1).abs().argmax()].item())


# ---- words and picture ----------------------------------------------------------------------


def sentence(
    data: Dataset,
    shared: Mapping[str, Any],
    deep: int,
    found: Study,
    gradients: Mapping[str, Sequence[Sequence[float]]],
    before: Spread,
    after: Spread,
) -> str:
    model, epochs = shared["model"], shared["epochs"]
    sizes = ", ".join(
        f"{name} {fall(runs):.2g} (first {typical(runs)[0]:.1g})" for name, runs in gradients.items()
    )
    scores = ", ".join(f"{name} {arm.mean:.1%}" for name, arm in found.arms.items())
    return (
        f"Before the first step of {deep} blocks, the gradient of the first over that of the last is: "
        f"{sizes}. "
        f"After {epochs} epoch{'s' * (epochs > 1)} of {model['depth']} blocks of width {model['width']} "
        f"({described(data)}), each at its own best rate, {found.arms['pre-norm'].n} seeds: {scores}. "
        f"In the trained pre-norm model LayerNorm's tokens have mean 0 to {abs(before.mean):.0e} and "
        f"variance 1 to {abs(before.variance - 1):.0e} before its gain and shift; after them means reach "
        f"{after.mean:.2f} and variances {after.variance:.2f}."
    )


@in_our_style
def draw(gradients: Mapping[str, Sequence[Sequence[float]]], found: Study) -> Figure:
    """The gradient of every block at the start; the accuracy of every arm at the end."""
    figure = canvas(7.6, 3.4)
    left, right = figure.subplots(1, 2)
    colours = dict(zip(ARMS, LINES, strict=True))
    for name, runs in gradients.items():
        blocks = range(1, len(runs[0]) + 1)
        left.plot(blocks, typical(runs), "o-", color=colours[name], label=name, markersize=3)
    left.set(yscale="log", xlabel="block", title="gradient before the first step")
    figure.legend(loc="outside lower center", ncols=len(ARMS), fontsize=8)
    for n, arm in enumerate(found.arms.values()):
        draw_arm(right, n, arm, colours[arm.name.removesuffix(" no warm-up")])
    right.set(yticks=range(len(found.arms)), yticklabels=list(found.arms), xlabel="held-out pictures right")
    right.set(title=f"{len(found.seeds)} seeds, mean and 95 % interval", xlim=(0, 1))
    right.invert_yaxis()
    return figure
