"""Lab `norms`: the effect of norms and residuals, and of the position of the norm.

Four notes define four different blocks. Two measurements compare them: the gradient norm of each block before
the first step of a deep model, and the accuracy of a shallower one, each at its own best learning rate.
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

from vitrail.evaluation.forward import resize_split
from vitrail.experiment.study import Study, draw_arm, study
from vitrail.images.formats.sources import Dataset
from vitrail.images.loader import Reader
from vitrail.images.normalize import normalize_batch
from vitrail.model import ViT
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail.weights.load import load
from vitrail_course.labs.datasets import arm_recipe, describe_dataset, load_dataset, plain_settings
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import OURS, Verdict, compare_arms, exceeds, gain, identity, percent_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "norms"
TITLE = "residuals and norms help"
NOTE = (
    '000 "Breaking the equations down - 2", 003 "Residual pathways and layer normalization", 001 '
    '"Residual Connection"'
)
CLAIM = (
    "Skip connection solves the problem of vanishing gradient effect. [...] Standardization allows "
    "smoother gradient and better accuracy (000). Guarantees mean = 0 and variance = 1 (003)."
)
ACCEPTS = "labeled images"

ARMS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"block": "post-norm"},
    "res-post-norm": {"block": "res-post-norm"},
    "no norm": {"norm": "none"},
    "no residual": {"block": "no-residual"},
    "neither": {"block": "no-residual", "norm": "none"},
}
_NO_WARMUP = ("pre-norm", "post-norm")  # also trained without warmup, which post-norm is said to need
_VANISHED = 0.01  # gradient norm of the first block over that of the last
_TOLERANCE = 0.01  # for mean 0 and variance 1; eps reduces small variances a little


@dataclass(frozen=True)
class NormStatistics:
    """The mean furthest from 0 and the variance furthest from 1, over all tokens and norms of a model."""

    mean: float
    variance: float

    @property
    def is_standard(self) -> bool:
        return abs(self.mean) < _TOLERANCE and abs(self.variance - 1) < _TOLERANCE


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    full = size == "full"
    images = load_dataset(data) if full else load_dataset(data, 256, 256)
    gradient_depth, seeds, width = (24, 10, 32) if full else (8, 2, 16)
    epochs, depth = (8, 8) if full else (1, 2)
    shared = plain_settings(images, epochs, width=width, depth=depth, heads=2)
    gradients = {
        name: [gradient_by_block(images, shared, fields, gradient_depth, seed) for seed in range(seeds)]
        for name, fields in ARMS.items()
    }
    arms: dict[str, dict[str, Any]] = {name: {"model": fields} for name, fields in ARMS.items()}
    if full:
        arms |= {f"{name} no warmup": {"model": ARMS[name], "warmup": 0.0} for name in _NO_WARMUP}
    result = study(
        images,
        arms=arms,
        out=out / "runs",
        seeds=13 if full else 2,
        lrs=[1.25e-4, 5e-4, 2e-3, 8e-3] if full else [1e-3],
        processes=process_count(size),
        **shared,
    )
    best_run = f"lr {result.arms['pre-norm'].lr:g}, seed 0"
    model = load(result.out / "runs" / "pre-norm" / best_run / "last.safetensors").model
    before, after = norm_statistics(model, _first_batch(images, shared)[0])
    shutil.rmtree(result.out)
    residual_gain = compare_arms(
        result.arms["pre-norm"].scores, result.arms["no residual"].scores, len(images.eval_split)
    )
    return LabResult(
        number=100 * residual_gain.mean,
        unit="percentage points of accuracy, pre-norm minus no residual",
        n=residual_gain.n,
        setting=f"Gradients of models with {gradient_depth} blocks before the first step; accuracy of "
        "models with "
        f"{depth} blocks on {describe_dataset(images)}, {epochs} epochs.",
        figure=draw(gradients, result),
        interval=percent_interval(residual_gain),
        numbers={
            "gradient by seed, first and last block": {
                name: [(run[0], run[-1]) for run in runs] for name, runs in gradients.items()
            },
            "accuracy": {name: arm.numbers() for name, arm in result.arms.items()},
            "mean and variance": {"before gain and bias": vars(before), "after": vars(after)},
            "held out": len(images.eval_split),
        },
        warnings=result.notes,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Residuals and norms must help, gradients must vanish without residuals, and LayerNorm must normalize.

    Which position of the norm is better is no part of the claim.
    """
    accuracy, images = numbers["accuracy"], numbers["held out"]
    before, after = (
        NormStatistics(**numbers["mean and variance"][when]) for when in ("before gain and bias", "after")
    )
    better = {
        arm: compare_arms(accuracy["pre-norm"]["scores"], accuracy[arm]["scores"], images)
        for arm in ("no residual", "no norm")
    }
    logs = {
        arm: [math.log10(first / last) for first, last in runs]
        for arm, runs in numbers["gradient by seed, first and last block"].items()
    }
    vanish = [
        exceeds(
            f"gradients vanish without {what}: log10 of the first block's over the last's",
            logs[arm],
            math.log10(_VANISHED),
            OURS,
            form=".1f",
            below=True,
        )
        for arm, what in (("no residual", "residuals"), ("neither", "residuals and norms"))
    ]
    return Verdict(
        [
            gain("training is better with residuals than without", better["no residual"]),
            *vanish,
            identity(
                "LayerNorm gives mean 0 and variance 1",
                before.is_standard,
                f"means up to {abs(before.mean):.0e}, variances to {before.variance:.6f}; after gain and "
                "bias "
                f"{abs(after.mean):.2f} and {after.variance:.2f}",
                f"{_TOLERANCE:g}",
                "eps = 1e-6 reduces small variances",
                "" if after.is_standard else "meant before the learned gain and bias",
            ),
            gain("accuracy is better with norms than without", better["no norm"]),
        ]
    )


# ---- gradients before the first step --------------------------------------------------------


def gradient_by_block(
    data: Dataset, shared: Mapping[str, Any], fields: Mapping[str, Any], depth: int, seed: int
) -> list[float]:
    """The gradient norm of each block's parameters, first block first.

    A head initialized to zero passes no gradient to the blocks; here it gets values of variance 1/D.
    """
    images, labels = _first_batch(data, shared)
    torch.manual_seed(seed)
    model = ViT(arm_recipe(data, shared, {"model": {**fields, "depth": depth}}).model).double()
    assert isinstance(model.head, nn.Linear)
    nn.init.normal_(model.head.weight, std=model.config.width**-0.5)
    F.cross_entropy(model(images), labels).backward()
    return [_gradient_norm(block) for block in model.blocks]


def _gradient_norm(block: nn.Module) -> float:
    parts = [parameter.grad.square().sum() for parameter in block.parameters() if parameter.grad is not None]
    return torch.stack(parts).sum().sqrt().item()


def _first_batch(data: Dataset, shared: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The first 64 images in float64, and their labels."""
    preprocess = arm_recipe(data, shared, {}).preprocess
    indices = torch.arange(min(64, len(data.train)))
    reader = Reader(resize_split(data.train.take(indices.numpy()), preprocess), preprocess)
    pixels = next(reader.batches(iter([(0, indices)]))).images
    labels = torch.from_numpy(data.train.labels[: len(indices)])
    return normalize_batch(pixels, preprocess, torch.zeros((), dtype=torch.float64)), (
        labels if labels.ndim == 1 else labels.double()
    )


def _geometric_mean_by_block(runs: Sequence[Sequence[float]]) -> list[float]:
    """For each block, the geometric mean over seeds."""
    return [
        math.exp(fmean(math.log(max(value, 1e-300)) for value in seeds)) for seeds in zip(*runs, strict=True)
    ]


# ---- statistics of LayerNorm ----------------------------------------------------------------


def norm_statistics(model: ViT, images: Tensor) -> tuple[NormStatistics, NormStatistics]:
    """Statistics of LayerNorm's outputs before and after the learned gain and bias."""
    normalized: list[Tensor] = []
    outputs: list[Tensor] = []

    def record_hook(norm: Any, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        normalized.append(F.layer_norm(inputs[0], norm.normalized_shape, eps=norm.eps))
        outputs.append(out)

    norms = [part for part in model.modules() if isinstance(part, nn.LayerNorm)]
    hooks = [norm.register_forward_hook(record_hook) for norm in norms]
    with torch.no_grad():
        model.double().eval()(images)
    for hook in hooks:
        hook.remove()
    return _worst_statistics(normalized), _worst_statistics(outputs)


def _worst_statistics(outputs: Sequence[Tensor]) -> NormStatistics:
    """The mean furthest from 0 and the variance furthest from 1, over all tokens."""
    rows = torch.cat([out.flatten(0, -2) for out in outputs])
    means, variances = rows.mean(dim=-1), rows.var(dim=-1, correction=0)
    return NormStatistics(
        means[means.abs().argmax()].item(), variances[(variances - 1).abs().argmax()].item()
    )


# ---- summary and figure ---------------------------------------------------------------------


@styled
def draw(gradients: Mapping[str, Sequence[Sequence[float]]], result: Study) -> Figure:
    """Gradient norm of every block before training; accuracy of every arm after it."""
    figure = new_figure(7.6, 3.4)
    left, right = figure.subplots(1, 2)
    colors = dict(zip(ARMS, LINES, strict=True))
    for name, runs in gradients.items():
        blocks = range(len(runs[0]))
        left.plot(blocks, _geometric_mean_by_block(runs), "o-", color=colors[name], label=name, markersize=3)
    left.set(yscale="log", xlabel="block, from 0", title="gradient norm before the first step")
    figure.legend(loc="outside lower center", ncols=len(ARMS), fontsize=8)
    for n, arm in enumerate(result.arms.values()):
        draw_arm(right, n, arm, colors[arm.name.removesuffix(" no warmup")])
    right.set(yticks=range(len(result.arms)), yticklabels=list(result.arms), xlabel="held-out accuracy")
    right.set(title=f"{len(result.seeds)} seeds, mean and 95 % confidence interval", xlim=(0, 1))
    right.invert_yaxis()
    return figure
