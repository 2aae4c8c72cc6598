"""Lab `pool`: class token compared with mean pooling, each at its own learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vitrail.experiment.study import Study, draw_arm, resolve_arm, scores_by_lr, study
from vitrail.experiment.trial import map_in_processes
from vitrail.images.formats.sources import Dataset
from vitrail.views.canvas import LINES, new_figure, styled
from vitrail_course.labs.custom_run import CustomRun, train_run
from vitrail_course.labs.datasets import describe_dataset, lecture_model_fields, load_dataset
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.verdict import Verdict, compare_arms, equal_within, gain, percent_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "pool"
TITLE = "class token or mean pooling"
NOTE = '002 "Practice": exploratory tasks; 001 "Pooler"'
CLAIM = (
    "What happens when removing the cls token. [The paper, D.3 and Fig. 9: mean pooling works as well, "
    "but needs another learning rate.]"
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
    return LabResult(
        number=100 * difference.mean,
        unit="percentage points of accuracy, mean pooling minus class token",
        n=difference.n,
        setting=f"The model of note 002 on {describe_dataset(images)}, {epochs} epochs, each arm at its "
        "own best "
        "learning rate.",
        figure=draw(result),
        interval=percent_interval(difference),
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
    gains = gain("mean pooling gains from a learning rate of its own", gained)
    evidence = f"{gains.evidence}: {gained.mean * images:.0f} of {images:,} images"
    return Verdict(
        [
            equal_within(
                "mean pooling is as accurate as the class token",
                own,
                _MARGIN,
                "our choice; the paper gives none",
            ),
            replace(gains, evidence=evidence),
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
