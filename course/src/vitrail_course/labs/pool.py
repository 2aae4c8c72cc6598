"""Lab `pool`: class token compared with mean pooling, each at its own learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vitrail.experiment.study import (
    Difference,
    Study,
    draw_arm,
    resolve_arm,
    scores_by_lr,
    study,
)
from vitrail.experiment.trial import map_in_processes
from vitrail.images.formats.sources import Dataset
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.custom_run import CustomRun, train_run
from vitrail_course.labs.datasets import describe_dataset, lecture_model_fields, load_dataset
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import Verdict, compare_arms, decide, equal_within, format_points, gain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "pool"
TITLE = "class token or mean pooling"
NOTE = '001 "Pooler", 002 "What happens when removing the cls token"'
CLAIM = (
    "001 classifies by the class token; 002 asks what happens without it. The paper (D.3, Fig. 9): mean "
    "pooling works as well, but needs a different learning rate."
)
ACCEPTS = "MNIST as IDX files, a .npz, or a folder of images"

RECIPE = "mnist-notes"
CLASS, MEAN = "class token", "mean pooling"
_MARGIN = 0.01  # of accuracy, within which two arms count as equal
ARMS: dict[str, dict[str, Any]] = {CLASS: {}, MEAN: {"model": {"class_token": False, "pool": "mean"}}}


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    small = size == "small"
    images = load_dataset(data, *((300, 100) if small else (10_000, 10_000)))
    lrs, seeds = ([3e-3, 1e-2], 2) if small else ([1e-3, 3e-3, 1e-2, 3e-2], 8)
    epochs = 3 if small else 20 if data is None else 10
    model = lecture_model_fields(images) | ({"width": 16, "depth": 1, "heads": 2} if small else {})
    changes: dict[str, Any] = {"model": model, "batch": 30 if small else 64, "epochs": epochs}
    changes |= {"evaluate_every": epochs, "save_every": epochs}
    processes = process_count(size)
    with TemporaryDirectory(prefix="runs-", dir=out) as runs:
        result = study(
            images,
            out=runs,
            arms=ARMS,
            lrs=lrs,
            seeds=seeds,
            recipe=RECIPE,
            processes=processes,
            **changes,
        )
    held_out = len(images.eval_split)
    difference = compare_arms(result.arms[MEAN].scores, result.arms[CLASS].scores, held_out)
    at_class_lr = _scores_at_class_lr(result, images, changes, processes)
    gained = compare_arms(result.arms[MEAN].scores, at_class_lr, held_out)
    return LabResult(
        number=100 * difference.mean,
        unit="percentage points of accuracy, mean pooling minus class token",
        n=difference.n,
        sentence=summarize(result, difference, gained, images, epochs),
        figure=draw(result),
        interval=difference.interval and (100 * difference.interval[0], 100 * difference.interval[1]),
        numbers={
            "arms": {arm.name: arm.numbers() for arm in result.arms.values()},
            "mean pooling at the class token's lr": at_class_lr,
            "images": len(images.train),
            "held out": len(images.eval_split),
            "epochs": epochs,
        },
        warnings=result.notes,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Both must be equally accurate at their own learning rates, and mean pooling must gain from its own."""
    arms, images = numbers["arms"], numbers["held out"]
    at_class_lr = numbers["mean pooling at the class token's lr"]
    own = compare_arms(arms[MEAN]["scores"], arms[CLASS]["scores"], images)
    gained = compare_arms(arms[MEAN]["scores"], at_class_lr, images)
    at_same_lr = compare_arms(at_class_lr, arms[CLASS]["scores"], images)
    gains = gain("mean pooling gains from a learning rate of its own", gained)
    evidence = f"{gains.evidence}; at the class token's, mean pooling minus class token: "
    return decide(
        [
            equal_within("mean pooling is as accurate as the class token", own, _MARGIN),
            replace(gains, evidence=evidence + format_points(at_same_lr)),
        ]
    )


def _scores_at_class_lr(result: Study, data: Dataset, changes: dict[str, Any], processes: int) -> list[float]:
    """Accuracy with mean pooling at the class token's learning rate."""
    class_arm = result.arms[CLASS]
    if result.arms[MEAN].lr == class_arm.lr:
        return result.arms[MEAN].scores
    custom_runs = [
        CustomRun(resolve_arm(RECIPE, data, ARMS[MEAN], changes, class_arm.lr, seed)) for seed in result.seeds
    ]
    return [run.score for run in map_in_processes(partial(train_run, data=data), custom_runs, processes)]


def summarize(result: Study, difference: Difference, gained: Difference, data: Dataset, epochs: int) -> str:
    mean_arm, class_arm = result.arms[MEAN], result.arms[CLASS]
    text = (
        f"On {describe_dataset(data)} ({epochs} epochs, {mean_arm.n} seeds, the model of the lecture "
        f"notes), accuracy is {class_arm.mean:.1%} with the class token at its best learning rate, "
        f"{class_arm.lr:g}, and {mean_arm.mean:.1%} with mean pooling at {mean_arm.lr:g}: "
        f"{format_points(difference)}, without the seed that chose the rates. "
    )
    if mean_arm.lr == class_arm.lr:
        return text + "The best learning rate is the same for both; in the paper it is not."
    return text + (
        f"At its own learning rate instead of the class token's, mean pooling gains {format_points(gained)}."
    )


@styled
def draw(result: Study) -> Figure:
    """Every seed at its arm's best learning rate, and the sweep that chose it."""
    figure = new_figure(7.6, 2.6)
    left, right = figure.subplots(1, 2)
    for n, arm in enumerate(result.arms.values()):
        draw_arm(left, n, arm, LINES[n])
        values = [scores_by_lr(arm.sweep)[lr] for lr in result.lrs]
        right.plot(result.lrs, values, "o-", color=LINES[n], markersize=4)
    left.set(
        yticks=range(len(result.arms)), yticklabels=list(result.arms), ylim=(len(result.arms) - 0.5, -0.5)
    )
    left.set(xlabel="held-out accuracy")
    left.set_title(f"{len(result.seeds)} seeds, mean and 95 % interval", loc="left")
    low, high = left.get_xlim()
    left.set_xlim(max(0.0, low), min(1.0, high))
    right.set(xscale="log", xlabel="learning rate")
    right.set_xticks(result.lrs, [f"{lr:g}" for lr in result.lrs])
    right.minorticks_off()
    right.set_title("learning rate sweep, one seed", loc="left")
    return figure
