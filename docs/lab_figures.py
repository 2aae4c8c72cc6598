"""Draw figures of docs/notes.md again from the saved results of the labs, without training:

    python -m docs.lab_figures [NAME ...]

For use when a label or the style has changed. The other labs either run in seconds, or their figures show a
trained model (positions, characters): run those again (`vitrail_course.labs.collect`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from docs.notes import IMAGES
from vitrail.experiment.study import Arm, Difference, Study
from vitrail.experiment.trial import Trial, one_thread
from vitrail.views.canvas import save_figure
from vitrail_course.labs import (
    activation,
    blocks,
    norms,
    pool,
    practice,
    recurrent,
    resolution,
    subwords,
    translation,
)
from vitrail_course.labs.datasets import load_dataset, plain_settings
from vitrail_course.labs.lab import load_results
from vitrail_course.labs.lr_sweep import SweepResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = Mapping[str, Any]


def _study(arms: Mapping[str, Numbers], images: int) -> Study:
    """A study with the saved scores of its arms."""
    made = {
        name: Arm(
            name=name,
            changes={},
            lr=arm["lr"],
            scores=arm["scores"],
            sweep=[Trial(name, float(lr), 0, score, None, 0.0) for lr, score in arm.get("sweep", {}).items()],
            parameters=arm.get("parameters", 0),
            seconds=0.0,
            images=images,
        )
        for name, arm in arms.items()
    }
    first = next(iter(made.values()))
    lrs = sorted({trial.lr for trial in first.sweep})
    return Study(Path(), "", "", {}, list(range(first.n)), lrs, made)


def _blocks(numbers: Numbers) -> Figure:
    result = _study(numbers["accuracy"], numbers["held out"])
    return blocks.draw(numbers["depths"], result, numbers["seconds per step"])


def _norms(numbers: Numbers) -> Figure:
    """The gradients before the first step are computed again, as the lab does."""
    images = load_dataset(None)
    shared = plain_settings(images, 8, width=32, depth=8, heads=2)
    with one_thread():
        gradients = {
            name: [norms.gradient_by_block(images, shared, fields, 24, seed) for seed in range(10)]
            for name, fields in norms.ARMS.items()
        }
    saved = numbers["gradient by seed, first and last block"]
    for name, runs in gradients.items():
        ends = [(run[0], run[-1]) for run in runs]
        assert np.allclose(ends, saved[name], rtol=1e-3, atol=0), f"{name} is not the saved run"
    return norms.draw(gradients, _study(numbers["accuracy"], numbers["held out"]))


def _practice(numbers: Numbers) -> Figure:
    scores = numbers["scores"]
    gains = {
        step.name: Difference.of(scores[step.name], scores[step.base], numbers["held out"])
        for step in practice.cumulative_steps(1, 1)[1:]
    }
    return practice.draw(scores, gains)


def _resolution(numbers: Numbers) -> Figure:
    before, after = numbers["before fine-tuning"], numbers["after fine-tuning"]
    low = numbers["at the low resolution"]
    return resolution.draw(low, before, after, numbers["epochs"][1], numbers["held out"])


def _translation(numbers: Numbers) -> Figure:
    def results(saved: Mapping[str, Mapping[str, Numbers]]) -> dict[float, dict[str, SweepResult]]:
        return {
            float(key): {
                name: SweepResult(arm["lr"], arm["scores"], {}, arm.get("sweep", {}))
                for name, arm in arms.items()
            }
            for key, arms in saved.items()
        }

    by_steps = {str(count): arms for count, arms in results(numbers["accuracy by steps"]).items()}
    steps = {name: int(float(name)) for name in by_steps}
    by_fraction = results(numbers["accuracy by fraction"])
    return translation.draw(numbers["change when shifted"], by_fraction, by_steps, steps)


FIGURES: dict[str, Callable[[Numbers], Figure]] = {
    "activation": lambda numbers: activation.draw(
        torch.linspace(-8, 8, 1_601, dtype=torch.float64), _study(numbers["accuracy"], numbers["held out"])
    ),
    "blocks": _blocks,
    "norms": _norms,
    "pool": lambda numbers: pool.draw(_study(numbers["arms"], numbers["held out"])),
    "practice": _practice,
    "recurrent": recurrent.draw,
    "resolution": _resolution,
    "subwords": subwords.draw,
    "translation": _translation,
}


def redraw(name: str, out: Path) -> None:
    """Draw the figure of a lab from its saved results; OUT/NAME.png is written."""
    [numbers] = [result["numbers"] for result in load_results() if result["name"] == name]
    _, svg = save_figure(FIGURES[name](numbers), out / name)
    svg.unlink()  # the docs show the PNG


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw figures of the labs from their saved results.")
    parser.add_argument("names", nargs="*", choices=list(FIGURES), default=list(FIGURES))
    options = parser.parse_args()
    for name in options.names:
        redraw(name, IMAGES)


if __name__ == "__main__":
    main()
