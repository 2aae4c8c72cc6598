"""Lab `resolution`: fine-tuning at a higher resolution, with and without interpolated positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from vitrail.experiment.interval import fraction_interval
from vitrail.experiment.study import Difference, best_lr, edge_note, resolve_arm, scores_by_lr
from vitrail.experiment.trial import Trial, map_in_processes
from vitrail.images.formats.sources import Dataset
from vitrail.model import ViT, surgery
from vitrail.model.config import format_sides
from vitrail.views.canvas import FAINT, LINES, new_figure, styled
from vitrail_course.labs.custom_run import CustomRun, initial_accuracy, set_weights, train_run
from vitrail_course.labs.datasets import describe_dataset, lecture_model_fields, load_dataset, resize_dataset
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import Verdict, compare_arms, gain, percent_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitrail_course.labs.custom_run import Weights

NAME = "resolution"
TITLE = "fine-tune at higher resolution"
NOTE = '002 "Finetuning"'
CLAIM = (
    "Finetuning often at higher resolution: same patch size, longer sequence. Interpolate position "
    "embeddings to span the larger area."
)
ACCEPTS = "MNIST as IDX files, a .npz, or a folder of images"

RECIPE = "mnist-notes"
_FIRST_LR = 3e-3  # of the training at low resolution, the same for all arms
INTERPOLATED, RANDOM = "interpolated", "new random"
ARMS = (INTERPOLATED, RANDOM)
SIGMA = 0.02  # of new position embeddings, as at initialization

_Scores = Mapping[str, Sequence[float]]


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    small, digits = size == "small", data is None
    images = load_dataset(data, *((200, 60) if small else (10_000, 5_000)))
    fields = lecture_model_fields(images)
    if digits:  # 8 x 8 pixels, upsampled so that a patch of 4 is more than a single pixel
        fields |= {"size": (16, 16), "patch": (4, 4)}
    if small:
        fields |= {"width": 16, "depth": 1, "heads": 2}
    low, high = (resize_by(images, fields["size"], factor) for factor in (1, 2))
    lrs, seeds = ([1e-3], 2) if small else ([1e-3, 3e-3, 1e-2, 3e-2], 5 if digits else 3)
    epochs, tuning_epochs = (6, 1) if small else (30, 3) if digits else (10, 2)
    changes: dict[str, Any] = {"model": fields, "batch": 20 if small else 64}
    processes = process_count(size)
    first = {**changes, "epochs": epochs}
    recipes = [resolve_arm(RECIPE, low, {}, first, _FIRST_LR, seed) for seed in range(seeds)]
    runs = [CustomRun(recipe, snapshot_epochs=(epochs,)) for recipe in recipes]
    pretrained = map_in_processes(partial(train_run, data=low), runs, processes)
    models = [
        set_weights(ViT(recipe.model), result.snapshots[epochs])
        for recipe, result in zip(recipes, pretrained, strict=True)
    ]
    starts = {arm: [resize_positions(arm, model, seed) for seed, model in enumerate(models)] for arm in ARMS}
    second = changes | {"model": {**fields, "size": _double(fields["size"])}, "epochs": tuning_epochs}
    before, after, best_lrs, sweep = _fine_tune(starts, high, second, lrs, processes)
    base_scores = [result.score for result in pretrained]
    gained = Difference.of(before[INTERPOLATED], before[RANDOM], len(images.eval_split))
    return LabResult(
        number=100 * gained.mean,
        unit="percentage points of accuracy before fine-tuning, interpolated minus new random positions",
        n=seeds,
        setting=f"The model of note 002 on {describe_dataset(images)}: {epochs} epochs at "
        f"{format_sides(fields['size'])} pixels, then {tuning_epochs} at twice the side, upsampled.",
        figure=draw(base_scores, before, after, tuning_epochs, len(images.eval_split)),
        interval=percent_interval(gained),
        numbers={
            "at the low resolution": base_scores,
            "before fine-tuning": before,
            "after fine-tuning": after,
            "lrs": best_lrs,
            "sweep": sweep,
            "images": len(images.train),
            "held out": len(images.eval_split),
            "epochs": (epochs, tuning_epochs),
        },
        warnings=[note for arm in ARMS if (note := edge_note(f"{arm} positions", best_lrs[arm], lrs))],
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Interpolated embeddings must be better than the others, before and after fine-tuning."""
    # Only the learning rates of fine-tuning were swept.
    compare = {"before fine-tuning": Difference.of, "after fine-tuning": compare_arms}
    return Verdict(
        [
            gain(
                f"{when}, interpolated positions are better than new random ones",
                function(numbers[when][INTERPOLATED], numbers[when][RANDOM], numbers["held out"]),
            )
            for when, function in compare.items()
        ]
    )


# ---- positions for a larger grid ------------------------------------------------------------


def resize_positions(arm: str, model: ViT, seed: int) -> Weights:
    """The weights at twice the resolution, with the position embeddings of the arm."""
    resized = surgery.resize(model, _double(model.config.size))
    table, prefix = resized.get_parameter("position.table"), model.config.prefix
    if arm == RANDOM:
        with torch.no_grad():
            rng = torch.Generator().manual_seed(seed)
            table[prefix:] = SIGMA * torch.randn(len(table) - prefix, table.shape[1], generator=rng)
    return {name: tensor.numpy().copy() for name, tensor in resized.state_dict().items()}


def _double(size: Any) -> tuple[int, int]:
    height, width = size
    return 2 * height, 2 * width


def resize_by(data: Dataset, size: tuple[int, int], factor: int) -> Dataset:
    return resize_dataset(data, (factor * size[0], factor * size[1]))


# ---- fine-tuning ----------------------------------------------------------------------------


def _fine_tune(
    starts: Mapping[str, Sequence[Weights]],
    data: Dataset,
    changes: dict[str, Any],
    lrs: Sequence[float],
    processes: int,
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, float], dict[str, dict[float, float]]]:
    """Accuracy of each arm before and after; its learning rate, the best on the first seed; and the sweep."""

    def custom_run(arm: str, lr: float, seed: int) -> CustomRun:
        return CustomRun(resolve_arm(RECIPE, data, {}, changes, lr, seed), initial_weights=starts[arm][seed])

    def trials(keys: Sequence[tuple[str, float, int]]) -> list[Trial]:
        results = map_in_processes(
            partial(train_run, data=data), [custom_run(*key) for key in keys], processes
        )
        return [Trial(*key, r.score, r.loss, r.seconds) for key, r in zip(keys, results, strict=True)]

    seeds = range(len(starts[INTERPOLATED]))
    measure = partial(initial_accuracy, data=data)
    before = {
        arm: map_in_processes(measure, [custom_run(arm, lrs[0], seed) for seed in seeds], 1) for arm in ARMS
    }
    sweep = trials([(arm, lr, 0) for arm in ARMS for lr in lrs])
    by_arm = {arm: [trial for trial in sweep if trial.arm == arm] for arm in ARMS}
    best = {arm: best_lr(own) for arm, own in by_arm.items()}
    others = trials([(arm, best[arm], seed) for arm in ARMS for seed in seeds[1:]])
    tuned = [trial for trial in (*sweep, *others) if trial.lr == best[trial.arm]]
    tuned.sort(key=lambda trial: trial.seed)
    after = {arm: [trial.score for trial in tuned if trial.arm == arm] for arm in ARMS}
    return before, after, best, {arm: scores_by_lr(own) for arm, own in by_arm.items()}


# ---- figure ---------------------------------------------------------------------------------


@styled
def draw(
    base_scores: Sequence[float], before: _Scores, after: _Scores, tuning_epochs: int, images: int
) -> Figure:
    """Every seed before and after fine-tuning, and the mean at the low resolution."""
    figure = new_figure(7.6, 2.6)
    axes = figure.subplots(1, 2, sharey=True)
    titles = ("before fine-tuning", f"after {tuning_epochs} epoch{'s' * (tuning_epochs > 1)} of fine-tuning")
    for axis, scores, title in zip(axes, (before, after), titles, strict=True):
        for n, values in enumerate(scores.values()):
            _draw_scores(axis, n, values, images)
        axis.axvline(fmean(base_scores), color=FAINT, linestyle="--", linewidth=1, label="low resolution")
        axis.set(xlabel="held-out accuracy", yticks=range(len(ARMS)), yticklabels=ARMS)
        axis.set_xlim(0, 1.02)
        axis.set_title(title, loc="left")
    axes[0].set_ylim(len(ARMS) - 0.5, -0.5)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", fontsize=7.5)
    return figure


def _draw_scores(axis: Axes, row: int, values: Sequence[float], images: int) -> None:
    axis.plot(values, [row] * len(values), "o", color=LINES[row], alpha=0.35, markersize=5)
    axis.plot([fmean(values)], [row], "|", color=LINES[row], markersize=14, markeredgewidth=2)
    if (bounds := fraction_interval(values, images)) is not None:
        axis.plot(bounds, [row, row], color=LINES[row], linewidth=2)
