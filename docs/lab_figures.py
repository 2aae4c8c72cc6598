"""Draw figures of docs/notes.md again from the saved results of the labs, without training:

    python -m docs.lab_figures                         # those that need no data
    python -m docs.lab_figures speech --data fsdd.zip

For use when a label or the style has changed. The other labs either run in seconds, or their figures show a
trained model (positions, characters): run those again (`vitrail_course.labs.collect`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from docs.notes import IMAGES
from vitrail.experiment.study import Arm, Difference, Study
from vitrail.experiment.trial import Trial, one_thread
from vitrail.views.canvas import save_figure
from vitrail_course.labs import (
    attention_distance,
    blocks,
    gelu_relu,
    norms,
    pool,
    practice,
    recurrent,
    resolution,
    speech,
    translation,
)
from vitrail_course.labs.datasets import load_dataset, plain_settings
from vitrail_course.labs.lab import load_results
from vitrail_course.labs.lr_sweep import SweepResult
from vitrail_course.labs.spoken_digits import build_dataset, read_recordings, split_by_index

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


def _attention_distance(numbers: Numbers) -> Figure:
    by_seed = numbers["fraction of the uniform distance, by seed, layer and head"]
    return attention_distance.draw(
        [np.array(heads) for heads in by_seed], [np.array(heads) for heads in numbers["before training"]]
    )


def _blocks(numbers: Numbers) -> Figure:
    depths = [int(name.split()[0]) for name in numbers["accuracy"] if name.endswith(f"x {blocks.WIDTH}")]
    result = _study(numbers["accuracy"], numbers["held out"])
    return blocks.draw(depths, blocks.WIDER_SHAPES, result, numbers["seconds per step"])


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


def _speech(numbers: Numbers, data: str) -> Figure:
    arms = _study(numbers["tokens"], numbers["held out"]).arms
    best = max(speech.SPECTROGRAM_TOKENS, key=lambda name: arms[name].mean)
    recordings = build_dataset("spoken digits", *split_by_index(read_recordings(data)))
    return speech.draw(
        speech.SpeechResults(
            arms, recordings, numbers["nearest neighbor"], 0, numbers["unseen speakers"], best
        )
    )


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
    "attention-distance": _attention_distance,
    "blocks": _blocks,
    "gelu-relu": lambda numbers: gelu_relu.draw(
        _study(numbers["accuracy"], numbers["held out"]), numbers["error of the fitted function"]
    ),
    "norms": _norms,
    "pool": lambda numbers: pool.draw(_study(numbers["arms"], numbers["held out"])),
    "practice": _practice,
    "recurrent": recurrent.draw,
    "resolution": _resolution,
    "translation": _translation,
}


def redraw(name: str, out: Path, data: str | None = None) -> None:
    """Draw the figure of a lab from its saved results; OUT/NAME.png is written."""
    [numbers] = [result["numbers"] for result in load_results() if result["name"] == name]
    figure = FIGURES[name](numbers) if data is None else _speech(numbers, data)
    _, svg = save_figure(figure, out / name)
    svg.unlink()  # the docs show the PNG


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw figures of the labs from their saved results.")
    parser.add_argument("names", nargs="*", choices=[*FIGURES, "speech"], default=list(FIGURES))
    parser.add_argument("--data", help="the recordings of the lab speech")
    options = parser.parse_args()
    for name in options.names:
        redraw(name, IMAGES, options.data)


if __name__ == "__main__":
    main()
