"""Lab `speech`: an unchanged ViT on spectrograms and raw samples, with different kinds of tokens.

A recording becomes a spectrogram (spoken_digits.py). Patches, columns and rows are equally many and equally
large, so that the models differ only in how the spectrogram is divided.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.experiment.interval import fraction_interval
from vitrail.experiment.study import Arm, Study, draw_arm, resolve_arm, study
from vitrail.experiment.trial import map_in_processes
from vitrail.images.formats.sources import Dataset
from vitrail.views.canvas import FAINT, INK, LINES, OVERLAY, new_figure, styled
from vitrail_course.labs.custom_run import CustomRun, train_run
from vitrail_course.labs.datasets import load_dataset
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.spoken_digits import (
    BANDS,
    FRAMES,
    SAMPLES,
    Recording,
    build_dataset,
    read_recordings,
    split_by_index,
    split_by_speaker,
)
from vitrail_course.labs.verdict import Statement, Verdict, arm_reaches, compare_arms, confirming, decide

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

NAME = "speech"
TITLE = "anything can become tokens"
NOTE = '003 "Different input domains" and "Tokens"'
CLAIM = (
    "Patch it, encode it and feed it to a transformer: pixels, patches, rows and columns of an image can be "
    "tokens, and so can segments of a sound."
)
ACCEPTS = "a folder or .zip of spoken digits, DIGIT_SPEAKER_NUMBER.wav"

_PATCHES, _COLUMNS, _ROWS, _PIXELS, _SEGMENTS = "patches", "columns", "rows", "pixels", "segments"
TOKEN_KINDS = (_PATCHES, _COLUMNS, _ROWS, _PIXELS, _SEGMENTS)  # of the claim
_TokenSizes = dict[str, tuple[int, int]]  # (height, width) of a token, in pixels
SPECTROGRAM_TOKENS: _TokenSizes = {_PATCHES: (8, 8), _COLUMNS: (BANDS, 2), _ROWS: (1, FRAMES)}
SAMPLE_TOKENS: _TokenSizes = {_SEGMENTS: (1, SAMPLES // 32)}
PIXELS_OF_IMAGES = "pixels of scikit-learn's digits"
_IMAGE_TOKENS: _TokenSizes = {_PATCHES: (2, 2), _COLUMNS: (8, 1), _ROWS: (1, 8), _PIXELS: (1, 1)}
_MIN_ACCURACY, _CHANCE = 0.5, 0.1  # on held-out data: a model that has learned, and guessing


@dataclass(frozen=True, eq=False)
class SpeechResults:
    """The outcome of all runs."""

    arms: dict[str, Arm]
    data: Dataset
    nearest_neighbor: float
    """Accuracy of the nearest training image by pixel values, a baseline without training."""
    epochs: int
    unseen_speakers: dict[str, float] = field(default_factory=dict)
    """By speaker: accuracy of a model trained without that speaker."""
    unseen_speaker_tokens: str = ""
    """The tokens of that model."""
    pixels: Arm | None = None
    """With recordings: a model with the pixels of scikit-learn's digits as tokens."""
    warnings: tuple[str, ...] = ()


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    runs = out / "runs"
    if data is None:
        results = _run_images(runs, size)
        sentence = _summarize_images(results)
    else:
        results = _run_sounds(runs, size, read_recordings(data))
        sentence = _summarize_sounds(results)
    shutil.rmtree(runs)
    patches = results.arms[_PATCHES]
    counted = confirming(patches.scores)
    return LabResult(
        number=fmean(counted),
        unit=f"accuracy on held-out {'images' if data is None else 'recordings'} with square patches",
        n=len(counted),
        sentence=sentence,
        figure=draw(results),
        interval=fraction_interval(counted, patches.images),
        numbers={
            "tokens": {name: arm.numbers() for name, arm in results.arms.items()},
            PIXELS_OF_IMAGES: results.pixels
            and {**results.pixels.numbers(), "held out": results.pixels.images},
            "nearest neighbor": results.nearest_neighbor,
            "unseen speakers": results.unseen_speakers,
            "held out": len(results.data.eval_split),
            "recordings": len(results.data.train) + len(results.data.eval_split),
            "epochs": results.epochs,
        },
        warnings=results.warnings,
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """A model must learn from each kind of tokens: more than half of the held-out recordings are right.

    With recordings, pixels are those of scikit-learn's digits: a spectrogram has too many.
    """
    return decide([_can_be_tokens(name, numbers) for name in TOKEN_KINDS])


def _can_be_tokens(name: str, numbers: Mapping[str, Any]) -> Statement:
    """The statement that a model learns from such tokens; not clear if none was trained on them."""
    text, arm, held_out = f"{name} can be tokens", numbers["tokens"].get(name), numbers["held out"]
    of_images = numbers.get(PIXELS_OF_IMAGES)
    if name == _PIXELS and arm is None and of_images is not None:
        text, arm, held_out = f"{text}, those of scikit-learn's digits", of_images, of_images["held out"]
    if arm is None:
        return Statement(text, None, "not tested in this run")
    return arm_reaches(text, arm["scores"], held_out, _MIN_ACCURACY)


# ---- runs -----------------------------------------------------------------------------------


def _run_images(runs: Path, size: LabSize) -> SpeechResults:
    """Runs on scikit-learn's digits; here the numbers of tokens differ, from 8 rows to 64 pixels."""
    data, comparison, epochs = compare_image_tokens(runs / "images", size, _IMAGE_TOKENS)
    return SpeechResults(
        comparison.arms,
        data,
        _nearest_neighbor_accuracy(data),
        epochs,
        warnings=tuple(comparison.notes),
    )


def compare_image_tokens(out: Path, size: LabSize, tokens: _TokenSizes) -> tuple[Dataset, Study, int]:
    """Scikit-learn's digits, a study of these tokens of them, and its number of epochs."""
    data = load_dataset(None, *((300, 100) if size == "small" else (2_000, 400)))
    epochs = 3 if size == "small" else 20
    return data, _compare_tokens(data, out, size, tokens, epochs), epochs


def _run_sounds(runs: Path, size: LabSize, recordings: Sequence[Recording]) -> SpeechResults:
    """Runs on recordings, with recordings held out and then with speakers held out."""
    epochs = 3 if size == "small" else 80
    train, val = split_by_index(recordings)
    data = build_dataset("spoken digits", train, val)
    # Recordings of the same word by the same speaker differ by shifts in time and pitch.
    augmentation = {"augment": {"rotate": 0.0, "zoom": 1.0, "translate": 0.1}}
    comparison = _compare_tokens(data, runs / "images", size, SPECTROGRAM_TOKENS, epochs, **augmentation)
    waveforms = build_dataset("spoken digits, samples", train, val, raw=True)
    on_samples = _compare_tokens(waveforms, runs / "samples", size, SAMPLE_TOKENS, epochs, **augmentation)
    arms = comparison.arms | on_samples.arms
    best = max(SPECTROGRAM_TOKENS, key=lambda name: arms[name].mean)
    unseen_speakers = _unseen_speaker_scores(recordings, arms[best], size, epochs, augmentation)
    _, on_pixels, _ = compare_image_tokens(runs / "pixels", size, {_PIXELS: _IMAGE_TOKENS[_PIXELS]})
    warnings = (*comparison.notes, *on_samples.notes, *on_pixels.notes)
    nearest, pixels = _nearest_neighbor_accuracy(data), on_pixels.arms[_PIXELS]
    return SpeechResults(arms, data, nearest, epochs, unseen_speakers, best, pixels, warnings)


def _unseen_speaker_scores(
    recordings: Sequence[Recording], arm: Arm, size: LabSize, epochs: int, augmentation: Mapping[str, Any]
) -> dict[str, float]:
    """Accuracy on each speaker of a model trained on all others; empty if there is only one speaker."""
    speakers = sorted({recording.speaker for recording in recordings})
    speakers = speakers[: 0 if len(speakers) == 1 else 1 if size == "small" else None]
    custom_runs = []
    for speaker in speakers:
        dataset = build_dataset(f"without {speaker}", *split_by_speaker(recordings, speaker))
        changes = _study_settings(size, epochs, **augmentation)
        # At the learning rate that the study chose: held-out speakers select nothing.
        recipe = resolve_arm("small", dataset, arm.changes, changes, arm.lr, 0)
        custom_runs.append((CustomRun(recipe), dataset))
    return dict(zip(speakers, map_in_processes(_run_score, custom_runs, process_count(size)), strict=True))


def _compare_tokens(
    data: Dataset, out: Path, size: LabSize, tokens: _TokenSizes, epochs: int, **changes: Any
) -> Study:
    return study(
        data,
        arms={name: _patch_change(patch) for name, patch in tokens.items()},
        out=out,
        seeds=2 if size == "small" else 5,
        lrs=[3e-3] if size == "small" else [5e-4, 1e-3, 2e-3, 4e-3, 8e-3],
        recipe="small",
        processes=process_count(size),
        **_study_settings(size, epochs, **changes),
    )


def _study_settings(size: LabSize, epochs: int, **changes: Any) -> dict[str, Any]:
    """Changes to the recipe `small`: a smaller model, evaluated only at the end."""
    width, depth = (16, 1) if size == "small" else (64, 3)
    model = {"width": width, "depth": depth, "heads": 4}
    schedule = {"evaluate_every": epochs, "save_every": epochs}
    return {"epochs": epochs, "model": model, "ema": 0.98, **schedule, **changes}


def _patch_change(patch: tuple[int, int]) -> dict[str, Any]:
    return {"model": {"patch": patch}}


def _run_score(run_and_data: tuple[CustomRun, Dataset]) -> float:
    return train_run(*run_and_data).score


def _nearest_neighbor_accuracy(data: Dataset) -> float:
    """The fraction of held-out images whose nearest training image has the same label."""
    train, val = data.train, data.eval_split
    assert train.images is not None
    assert val.images is not None
    train_pixels, val_pixels = (
        torch.from_numpy(images).flatten(1).float() for images in (train.images, val.images)
    )
    predicted = train.labels[torch.cdist(val_pixels, train_pixels).argmin(dim=1).numpy()]
    return float((predicted == val.labels).mean())


# ---- summary --------------------------------------------------------------------------------


def _summarize_images(results: SpeechResults) -> str:
    tokens = ", ".join(f"{token_count(patch, (8, 8))} {name}" for name, patch in _IMAGE_TOKENS.items())
    return (
        "Sounds were not tested, which needs --data. On scikit-learn's digits, 8 x 8 pixels, an unchanged "
        f"ViT has after {results.epochs} epochs an accuracy of {_format_scores(results)}; the nearest "
        f"training image gives {results.nearest_neighbor:.1%}. The tokens are {tokens}: pixels cost the "
        f"most. {format_order(results)}"
    )


def _summarize_sounds(results: SpeechResults) -> str:
    train, val = len(results.data.train), len(results.data.eval_split)
    sentence = (
        f"With {train:,} spoken digits as spectrograms of {BANDS} frequency bands and {FRAMES} frames, and "
        f"{val:,} held-out recordings of the same speakers, an unchanged ViT with 32 tokens has after "
        f"{results.epochs} epochs an accuracy of {_format_scores(results)}; the nearest training image gives "
        f"{results.nearest_neighbor:.1%}. The segments are {SAMPLES // 32} raw samples each, without a "
        f"spectrogram; single samples as tokens, {SAMPLES:,} of them, were not tested. "
    )
    if results.pixels is not None:
        sentence += (
            f"With the pixels of scikit-learn's digits as tokens, 64 of them, accuracy is "
            f"{results.pixels.mean:.1%}. "
        )
    if not results.unseen_speakers:
        return sentence + format_order(results)
    scores = results.unseen_speakers.values()
    return sentence + (
        f"{format_order(results)} For a speaker who is not in the training set, accuracy with "
        f"{results.unseen_speaker_tokens} is {fmean(scores):.1%} (mean of {len(scores)} speakers, from "
        f"{min(scores):.1%} to {max(scores):.1%})."
    )


def _format_scores(results: SpeechResults) -> str:
    return ", ".join(f"{arm.mean:.1%} with {name}" for name, arm in results.arms.items())


def format_order(results: SpeechResults) -> str:
    """The kinds of tokens that are clearly better or worse than square patches, as text."""
    patches = results.arms[_PATCHES]
    clear = []
    for name, arm in results.arms.items():
        difference = compare_arms(arm.scores, patches.scores, patches.images)
        if difference.significant:
            direction = "better" if difference.mean > 0 else "worse"
            clear.append(f"{name} are {direction} than patches by {100 * abs(difference.mean):.1f} points ")
    sentence = "and ".join(clear) if clear else "no other kind is clearly better or worse than patches "
    return f"Over {len(confirming(patches.scores))} seeds, without that of the sweep, {sentence.strip()}."


def token_count(patch: tuple[int, int], sides: tuple[int, int]) -> int:
    return (sides[0] // patch[0]) * (sides[1] // patch[1])


# ---- figure ---------------------------------------------------------------------------------


@styled
def draw(results: SpeechResults) -> Figure:
    """An example with each kind of tokens; below, their accuracies."""
    figure = new_figure(7.2, 4.6)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.2))[:, 0]
    is_speech = _SEGMENTS in results.arms
    tokens = SPECTROGRAM_TOKENS if is_speech else _IMAGE_TOKENS
    assert results.data.train.images is not None
    upper_axes = above.subplots(1, len(tokens), squeeze=False)[0]
    for n, (axis, (name, patch)) in enumerate(zip(upper_axes, tokens.items(), strict=True)):
        _draw_tokens(axis, results.data.train.images[0, :, :, 0], patch, name)
        if is_speech:
            axis.set(xlabel="time", ylabel="frequency" if n == 0 else "")
    lower_axes = below.subplots(1, 2 if results.unseen_speakers else 1, squeeze=False)[0]
    _draw_arms(lower_axes[0], results)
    if results.unseen_speakers:
        _draw_unseen_speakers(lower_axes[1], results)
    return figure


def _draw_tokens(axis: Axes, image: NDArray[np.uint8], patch: tuple[int, int], name: str) -> None:
    """An image with lines between its tokens."""
    H, W = image.shape
    axis.imshow(image, cmap=OVERLAY, vmin=0, vmax=255, aspect="auto" if W > H else "equal")
    for row in range(patch[0], H, patch[0]):
        axis.axhline(row - 0.5, color="white", linewidth=0.5)
    for column in range(patch[1], W, patch[1]):
        axis.axvline(column - 0.5, color="white", linewidth=0.5)
    axis.set(xticks=[], yticks=[], title=f"{token_count(patch, (H, W))} {name}")


def _draw_arms(axis: Axes, results: SpeechResults) -> None:
    for n, (arm, color) in enumerate(zip(results.arms.values(), LINES, strict=False)):
        draw_arm(axis, n, arm, color)
    axis.axvline(results.nearest_neighbor, color=FAINT, linestyle=":", linewidth=1.5)
    axis.set(
        yticks=range(len(results.arms)), yticklabels=list(results.arms), ylim=(len(results.arms) - 0.5, -0.5)
    )
    axis.set_xlabel("held-out accuracy; dotted: nearest neighbor")
    axis.set_title(f"{results.arms[_PATCHES].n} seeds, mean and 95 % confidence interval")


def _draw_unseen_speakers(axis: Axes, results: SpeechResults) -> None:
    axis.barh(
        list(results.unseen_speakers), list(results.unseen_speakers.values()), color=LINES[0], height=0.6
    )
    axis.axvline(_CHANCE, color=INK, linestyle=":", linewidth=1.5)
    axis.set(
        xlim=(0, 1),
        xlabel="accuracy; dotted: chance",
        title=f"unseen speaker, {results.unseen_speaker_tokens}",
    )
    axis.invert_yaxis()
