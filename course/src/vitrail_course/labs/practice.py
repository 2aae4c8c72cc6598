"""Lab `practice`: the exercise of note 002, from its weak model to its solution, one change at a time.

Each step is a change of the lecture notes, including the learning rate; nothing else is tuned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from vitrail.experiment.interval import fraction_interval
from vitrail.experiment.study import Difference, resolve_arm
from vitrail.experiment.trial import map_in_processes
from vitrail.images.formats.sources import Dataset
from vitrail.model import ViT
from vitrail.model.config import format_sides
from vitrail.training.recipes.settings import Recipe
from vitrail.views.canvas import FAINT, LINES, new_figure, styled
from vitrail_course.labs.custom_run import CustomRun, train_run
from vitrail_course.labs.datasets import describe_dataset, input_fields, load_dataset, resize_dataset
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import Statement, Verdict, decide, format_points, gain, reaches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "practice"
TITLE = "a weak ViT can reach 98 %"
NOTE = '002 "Practice: Inspect a Basic ViT model"'
CLAIM = (
    "A weak ViT (width 9, patch size 16) reaches 98 % accuracy on MNIST with smaller patches, more width, "
    "fewer layers, a lower learning rate, larger batches, more epochs, attention dropout and weight decay."
)
ACCEPTS = "MNIST as IDX files, a .npz, or a folder of images"

_ATTENTION_DROPOUT, _WEIGHT_DECAY = 0.1, 0.05  # the lecture notes give no numbers
_CLAIMED_ACCURACY, _CLAIMED_IMAGES = 0.98, 60_000  # on MNIST, in the lecture notes
_PLAIN_LOOP = 0.9794  # one run of a plain PyTorch loop with PyTorch's initialization, at the listed settings
_LONGER = 3  # factor on the epochs for "more training", also without a number


@dataclass(frozen=True)
class _ExerciseStep:
    """One change of the exercise."""

    name: str
    model: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""
    """The step that it changes; by default the previous one."""


_WEAK = "mnist-weak"  # the recipe of the model that the exercise starts from
START = _ExerciseStep(
    "start", {"size": 32, "patch": 16}, {"lr": 5e-3, "batch": 128, "epochs": 5}
)  # the fields of the recipe that depend on the data, or are divided
STEPS = [
    _ExerciseStep("28 px with patch 4", {"size": 28, "patch": 4}),
    _ExerciseStep("width 64 with 4 heads", {"width": 64, "heads": 4}),
    _ExerciseStep("2 layers", {"depth": 2}),
    _ExerciseStep("lr 0.001", train={"lr": 1e-3}),
    _ExerciseStep("batch 256", train={"batch": 256}),
    _ExerciseStep("10 epochs", train={"epochs": 10}),
    _ExerciseStep("attention dropout", {"attention_dropout": _ATTENTION_DROPOUT}),
    _ExerciseStep("weight decay", train={"weight_decay": _WEIGHT_DECAY}),
    _ExerciseStep("more training", train={"epochs": 10 * _LONGER}),
]
_LISTED, _SOLUTION = STEPS[-2].name, STEPS[-1].name  # the settings of the slide, and "more training"
VARIANTS = [  # further questions of the exercise, for the solution before longer training
    _ExerciseStep("trainable positions", {"position": "learned"}, base="weight decay"),
    _ExerciseStep("no class token", {"class_token": False, "pool": "mean"}, base="weight decay"),
]

_Scores = dict[str, list[float]]


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    small = size == "small"
    images = load_dataset(data, *((48, 32) if small else (60_000, 10_000)))
    seeds = 2 if small else 3
    # For small data sets, batches are smaller, so that an epoch has about as many steps.
    batch_divisor = 1 if len(images.train) >= 10_000 else 8
    steps = cumulative_steps(batch_divisor, 5 if small else 1)
    keys = [(step.name, seed) for step in steps for seed in range(seeds)]
    train_key = partial(_train_step, images=images, steps={step.name: step for step in steps})
    score_of = dict(zip(keys, map_in_processes(train_key, keys, process_count(size)), strict=True))
    scores = {step.name: [score_of[step.name, seed] for seed in range(seeds)] for step in steps}
    held_out = len(images.eval_split)
    gains = {step.name: Difference.of(scores[step.name], scores[step.base], held_out) for step in steps[1:]}
    total = Difference.of(scores[_SOLUTION], scores[START.name], held_out)
    E = _check_E(recipe_for(steps[-2], images, 0))
    return LabResult(
        number=100 * total.mean,
        unit="percentage points of accuracy, all changes and more training minus start",
        n=seeds,
        sentence=summarize(scores, gains, images, E),
        figure=draw(scores, gains),
        interval=total.interval and (100 * total.interval[0], 100 * total.interval[1]),
        numbers={
            "scores": scores,
            "E": E,
            "images": len(images.train),
            "held out": len(images.eval_split),
            "batch size and epochs divided by": (batch_divisor, 5 if small else 1),
        },
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """The solution must be better than the start and reach 98 %, which the notes report on all of MNIST."""
    scores, images, held_out = (numbers[key] for key in ("scores", "images", "held out"))
    listed, longer = (
        Difference.of(scores[name], scores[START.name], held_out) for name in (_LISTED, _SOLUTION)
    )
    statements = [
        gain("the listed settings with 10 epochs make the weak ViT better", listed),
        gain(f"the listed settings with {10 * _LONGER} epochs make it better", longer),
    ]
    plain = f"; one plain loop with PyTorch's default initialization reached {100 * _PLAIN_LOOP:.2f} %"
    for name, text, more in (
        (_LISTED, "with the listed settings, 10 epochs and our initialization it reaches 98 %", plain),
        (_SOLUTION, f"with more training, {10 * _LONGER} epochs, it reaches 98 %", ""),
    ):
        interval = fraction_interval(scores[name], held_out)
        found = reaches(text, fmean(scores[name]), interval, _CLAIMED_ACCURACY, n=len(scores[name]))
        statement = Statement(text, found.true, found.evidence + more)
        if images < _CLAIMED_IMAGES:
            evidence = f"{statement.evidence}, but with {images:,} images instead of {_CLAIMED_IMAGES:,}"
            statement = Statement(text, None, evidence)
        statements.append(statement)
    return decide(statements)


def summarize(scores: _Scores, gains: Mapping[str, Difference], images: Dataset, E: Mapping[str, Any]) -> str:
    steps = "; ".join(f"{step.name} {format_points(gains[step.name])}" for step in STEPS)
    variants = "; ".join(f"{step.name} {format_points(gains[step.name])}" for step in VARIANTS)
    return (
        f"On {describe_dataset(images)} ({len(scores[_SOLUTION])} seeds), accuracy is "
        f"{fmean(scores[START.name]):.1%} at the start, {fmean(scores[_LISTED]):.2%} with the listed "
        f"settings and {fmean(scores[_SOLUTION]):.2%} with more training; the notes report 98 % on MNIST; "
        "the recipe mnist-notes, with learned positions and a higher learning rate that decays, has 98.6 % "
        f"after 10 epochs. Gains of the steps, each compared with all before it: {steps}. Other variants, "
        f"compared with the listed settings: {variants}. E is {E['name']}, stored as "
        f"{format_sides(E['stored'])}; as a matrix it is {format_sides(E['as a matrix'])}, and x_p E + b "
        f"and the model's tokens {format_difference(E['difference'])}."
    )


def format_difference(largest: float) -> str:
    """ "differ by at most 1e-07", or "are exactly equal"."""
    return f"differ by at most {largest:.0e}" if largest else "are exactly equal"


# ---- runs -----------------------------------------------------------------------------------


def cumulative_steps(batches: int, epochs: int) -> list[_ExerciseStep]:
    """Every step with all changes before it, and with batch size and epochs divided."""
    steps: dict[str, _ExerciseStep] = {}
    previous = ""
    for step in (START, *STEPS, *VARIANTS):
        base = steps.get(step.base or previous, _ExerciseStep(""))
        steps[step.name] = _ExerciseStep(
            step.name, {**base.model, **step.model}, {**base.train, **step.train}, base.name
        )
        previous = step.name

    def divide(step: _ExerciseStep) -> _ExerciseStep:
        train = {**step.train, "batch": step.train["batch"] // batches}
        return _ExerciseStep(
            step.name, step.model, {**train, "epochs": step.train["epochs"] // epochs}, step.base
        )

    return [divide(step) for step in steps.values()]


def recipe_for(step: _ExerciseStep, data: Dataset, seed: int) -> Recipe:
    changes = {**step.train, "model": {**input_fields(data), **step.model}}
    return resolve_arm(_WEAK, data, {}, changes, changes.pop("lr"), seed)


def _train_step(key: tuple[str, int], images: Dataset, steps: Mapping[str, _ExerciseStep]) -> float:
    """Accuracy of a step on the held-out images."""
    step, seed = steps[key[0]], key[1]
    resized = resize_dataset(images, step.model["size"])
    return train_run(CustomRun(recipe_for(step, images, seed)), resized).score


def _check_E(recipe: Recipe) -> dict[str, Any]:
    """The name and the shape of E, and how far x_p E + b is from the model's patch tokens."""
    torch.manual_seed(0)
    model, config = ViT(recipe.model), recipe.model
    kernel, bias = model.get_parameter("tokens.proj.weight"), model.get_parameter("tokens.proj.bias")
    E = kernel.flatten(1).T  # (C P P, D)
    image = torch.rand(1, *config.input_shape)
    (height, width), (h, w) = config.patch_pixels, config.grid
    pixels = image.unflatten(3, (w, width)).unflatten(2, (h, height))  # (1, C, h, P, w, P)
    x_p = pixels.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (1, N, C P P)
    with torch.no_grad():
        difference = (x_p @ E + bias - model.tokens(image)).abs().max().item()
    return {
        "name": "tokens.proj.weight",
        "stored": tuple(kernel.shape),
        "as a matrix": tuple(E.shape),
        "difference": difference,
    }


# ---- figure ---------------------------------------------------------------------------------


@styled
def draw(scores: _Scores, gains: Mapping[str, Difference]) -> Figure:
    """Accuracy of every step, and its gain with a confidence interval."""
    names, rows = list(scores), range(len(scores))
    figure = new_figure(7.6, 0.9 + 0.3 * len(names))
    left, right = figure.subplots(1, 2, sharey=True)
    variant_names = {step.name for step in VARIANTS}
    for row, (name, values) in enumerate(scores.items()):
        color = LINES[1] if name in variant_names else LINES[0]
        left.plot(values, [row] * len(values), "o", color=color, alpha=0.35, markersize=5)
        left.plot([fmean(values)], [row], "|", color=color, markersize=12, markeredgewidth=2)
        if name in gains:
            gain = gains[name]
            right.plot([100 * gain.mean], [row], "o", color=color, markersize=5)
            if gain.interval is not None:
                right.plot([100 * end for end in gain.interval], [row, row], color=color, linewidth=2)
    step_gains = [fmean(values) for name, values in scores.items() if name not in variant_names]
    left.plot(step_gains, rows[: len(step_gains)], color=LINES[0], linewidth=0.8)
    left.set(yticks=rows, yticklabels=names, xlabel="held-out accuracy")
    left.set_title("each step with all before it", loc="left")
    right.axvline(0, color=FAINT, linewidth=0.8)
    right.set(xlabel="percentage points")
    right.set_title("gain of each step, 95 % confidence interval", loc="left")
    left.invert_yaxis()
    return figure
