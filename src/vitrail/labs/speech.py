"""Lab `speech`: sounds are cut into tokens as pictures are, and the transformer stays as it is.

A recording becomes a picture of frequency and time (sounds.py). Its patches, columns and rows are as many
and as large, so that the models differ in nothing but how the picture is cut.
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

from vitrail.data.sources import Dataset
from vitrail.inspect.canvas import FAINT, HEAT, INK, LINES, canvas, in_our_style
from vitrail.labs.given import opened
from vitrail.labs.job import Job, do
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.labs.sounds import (
    BANDS,
    FRAMES,
    SAMPLES,
    Recording,
    as_data,
    by_number,
    by_speaker,
    read_recordings,
)
from vitrail.labs.study import Arm, Difference, Study, draw_arm, settled, study
from vitrail.labs.trial import each, processes_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

NAME = "speech"
NOTE = '003 "Different input domains" and "Tokens"'
CLAIM = (
    "Just patch it, encode it and throw it in a transformer: pixels, patches, rows and columns of an image "
    "can be its tokens, and pieces of a sound as well."
)
TAKES = "a folder or .zip of spoken digits, DIGIT_SPEAKER_NUMBER.wav"

PATCHES, COLUMNS, ROWS, PIXELS, PIECES = "patches", "columns", "rows", "pixels", "pieces"
Kinds = dict[str, tuple[int, int]]  # (height, width) of a token, in pixels
OF_SPEECH: Kinds = {PATCHES: (8, 8), COLUMNS: (BANDS, 2), ROWS: (1, FRAMES)}
OF_SAMPLES: Kinds = {PIECES: (1, SAMPLES // 32)}
OF_PICTURES: Kinds = {PATCHES: (2, 2), COLUMNS: (8, 1), ROWS: (1, 8), PIXELS: (1, 1)}
WORKS, CHANCE = 0.9, 0.1  # of the held-out ones right


@dataclass(frozen=True, eq=False)
class Found:
    """What the runs gave."""

    arms: dict[str, Arm]
    data: Dataset
    nearest: float
    """What the nearest training picture, by its levels, gets right: what can be had without learning."""
    epochs: int
    strangers: dict[str, float] = field(default_factory=dict)
    """By speaker: the score of a model that has never heard him or her."""
    strange_kind: str = ""
    """The tokens of that model."""


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    runs = place / "runs"
    if data is None:
        found = of_pictures(runs, size)
        said = in_pictures(found)
    else:
        found = of_sounds(runs, size, read_recordings(data))
        said = in_sounds(found)
    shutil.rmtree(runs)
    stranger = fmean(found.strangers.values()) if found.strangers else None
    scores = {name: arm.mean for name, arm in found.arms.items()}
    patches = found.arms[PATCHES]
    return Result(
        number=patches.mean,
        unit=f"of the held-out {'pictures' if data is None else 'recordings'} right, cut into square patches",
        n=patches.n,
        verdict=judge(scores, stranger, found.epochs),
        sentence=said,
        figure=draw(found),
        interval=patches.interval,
        numbers={
            "kinds": {
                name: {"mean": arm.mean, "interval": arm.interval, "scores": arm.scores, "rate": arm.rate}
                for name, arm in found.arms.items()
            },
            "nearest neighbour": found.nearest,
            "strangers": found.strangers,
        },
    )


def judge(scores: Mapping[str, float], stranger: float | None, epochs: int) -> Verdict:
    """Which kinds of tokens do, and whether a voice must have been heard before."""
    poor = [f"{name} ({score:.1%})" for name, score in scores.items() if score < WORKS]
    if len(poor) == len(scores):
        return Verdict("does not hold", f": at best {max(scores.values()):.0%} are right")
    conditions = [f"tokens are not {' or '.join(poor)}, after {epochs} epochs"] if poor else []
    if stranger is not None and stranger < WORKS:
        conditions.append(f"the speaker has been heard before ({stranger:.0%} of a stranger's digits)")
    return Verdict("holds if", "; ".join(conditions)) if conditions else Verdict("holds")


# ---- runs -----------------------------------------------------------------------------------


def of_pictures(runs: Path, size: Size) -> Found:
    """scikit-learn's digits: here the counts of tokens differ, from 8 rows to 64 pixels."""
    data = opened(None, *((300, 100) if size == "small" else (2_000, 400)))
    epochs = 3 if size == "small" else 20
    compared = compare(data, runs / "pictures", size, OF_PICTURES, epochs)
    return Found(compared.arms, data, nearest(data), epochs)


def of_sounds(runs: Path, size: Size, recordings: Sequence[Recording]) -> Found:
    """Recordings by number held out, then every speaker once."""
    epochs = 3 if size == "small" else 80
    train, val = by_number(recordings)
    data = as_data("spoken digits", train, val)
    # A shift in time, or of the voice's height, is what the same word by the same speaker differs by.
    shift = {"augment": {"turn": 0.0, "zoom": 1.0, "shift": 0.1}}
    compared = compare(data, runs / "pictures", size, OF_SPEECH, epochs, **shift)
    raw = as_data("spoken digits, samples", train, val, raw=True)
    arms = compared.arms | compare(raw, runs / "samples", size, OF_SAMPLES, epochs, **shift).arms
    best = max(OF_SPEECH, key=lambda name: arms[name].mean)
    strangers = unheard(recordings, arms[best], size, epochs, shift)
    return Found(arms, data, nearest(data), epochs, strangers, best)


def unheard(
    recordings: Sequence[Recording], arm: Arm, size: Size, epochs: int, shift: Mapping[str, Any]
) -> dict[str, float]:
    """Each speaker's score by a model that has heard all the others; none where there is only one."""
    speakers = sorted({one.speaker for one in recordings})
    speakers = speakers[: 0 if len(speakers) == 1 else 1 if size == "small" else None]
    jobs = []
    for speaker in speakers:
        others = as_data(f"without {speaker}", *by_speaker(recordings, speaker))
        changes = settings(size, epochs, **shift)
        # At the rate that the study chose: nothing is chosen by what a stranger says.
        chosen = settled("small", others, arm.changes, changes, arm.rate, 0)
        jobs.append((Job(chosen), others))
    return dict(zip(speakers, each(score, jobs, processes_for(size)), strict=True))


def compare(data: Dataset, out: Path, size: Size, kinds: Kinds, epochs: int, **changes: Any) -> Study:
    return study(
        data,
        arms={name: token(patch) for name, patch in kinds.items()},
        out=out,
        seeds=2 if size == "small" else 3,
        rates=[3e-3] if size == "small" else [1e-3, 2e-3, 4e-3],
        processes=processes_for(size),
        **settings(size, epochs, **changes),
    )


def settings(size: Size, epochs: int, **changes: Any) -> dict[str, Any]:
    """The recipe `small`, smaller still, and looked at once."""
    width, depth = (16, 1) if size == "small" else (64, 3)
    model = {"width": width, "depth": depth, "heads": 4}
    once = {"evaluate_every": epochs, "save_every": epochs}
    return {"epochs": epochs, "model": model, "ema": 0.98, **once, **changes}


def token(patch: tuple[int, int]) -> dict[str, Any]:
    return {"model": {"patch": patch}}


def score(one: tuple[Job, Dataset]) -> float:
    return do(*one).score


def nearest(data: Dataset) -> float:
    """The share of the held-out pictures whose nearest training picture has the same label."""
    train, val = data.train, data.held_out
    assert train.images is not None
    assert val.images is not None
    ours, theirs = (torch.from_numpy(images).flatten(1).float() for images in (train.images, val.images))
    guess = train.labels[torch.cdist(theirs, ours).argmin(dim=1).numpy()]
    return float((guess == val.labels).mean())


# ---- words ----------------------------------------------------------------------------------


def in_pictures(found: Found) -> str:
    tokens = ", ".join(f"{count(patch, (8, 8))} {name}" for name, patch in OF_PICTURES.items())
    return (
        f"No sound was tried: that needs --data. On scikit-learn's digits, 8 x 8 pixels, an unchanged ViT "
        f"gets, after {found.epochs} epochs, {kinds_in_words(found)}; the nearest training picture "
        f"{found.nearest:.1%}. The tokens are {tokens}: pixels cost the most. {order_in_words(found)}"
    )


def in_sounds(found: Found) -> str:
    train, val = len(found.data.train), len(found.data.held_out)
    said = (
        f"{train:,} spoken digits as pictures of {BANDS} frequencies and {FRAMES} times, and {val:,} other "
        f"recordings of the same speakers: an unchanged ViT with 32 tokens gets, after {found.epochs} "
        f"epochs, {kinds_in_words(found)}; the nearest training picture {found.nearest:.1%}. The pieces are "
        f"{SAMPLES // 32} samples each, with no spectrogram; a single sample as a token, {SAMPLES:,} of "
        f"them, was not tried. "
    )
    if not found.strangers:
        return said + order_in_words(found)
    scores = found.strangers.values()
    return said + (
        f"{order_in_words(found)} Of a speaker it has never heard, {found.strange_kind} get "
        f"{fmean(scores):.1%} (mean of {len(scores)} speakers, from {min(scores):.1%} to {max(scores):.1%})."
    )


def kinds_in_words(found: Found) -> str:
    return ", ".join(f"{arm.mean:.1%} with {name}" for name, arm in found.arms.items())


def order_in_words(found: Found) -> str:
    """Which kinds are surely better than square patches, or worse, seed by seed."""
    patches = found.arms[PATCHES]
    sure = []
    for name, arm in found.arms.items():
        apart = Difference.of(arm.scores, patches.scores)
        if apart.clear:
            word = "better" if apart.mean > 0 else "worse"
            sure.append(f"{name} are {word} than patches by {100 * abs(apart.mean):.1f} points ")
    said = "and ".join(sure) if sure else "no other kind is clearly better or worse than patches "
    return f"Over {patches.n} seeds {said.strip()}."


def count(patch: tuple[int, int], sides: tuple[int, int]) -> int:
    return (sides[0] // patch[0]) * (sides[1] // patch[1])


# ---- picture --------------------------------------------------------------------------------


@in_our_style
def draw(found: Found) -> Figure:
    """One example cut in every way; below, what each way gets right."""
    figure = canvas(7.2, 4.6)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.2))[:, 0]
    spoken = PIECES in found.arms
    kinds = OF_SPEECH if spoken else OF_PICTURES
    assert found.data.train.images is not None
    tops = above.subplots(1, len(kinds), squeeze=False)[0]
    for n, (axis, (name, patch)) in enumerate(zip(tops, kinds.items(), strict=True)):
        show_tokens(axis, found.data.train.images[0, :, :, 0], patch, name)
        if spoken:
            axis.set(xlabel="time", ylabel="frequency" if n == 0 else "")
    bottoms = below.subplots(1, 2 if found.strangers else 1, squeeze=False)[0]
    draw_arms(bottoms[0], found)
    if found.strangers:
        draw_strangers(bottoms[1], found)
    return figure


def show_tokens(axis: Axes, picture: NDArray[np.uint8], patch: tuple[int, int], name: str) -> None:
    """A picture with a line between tokens."""
    H, W = picture.shape
    axis.imshow(picture, cmap=HEAT, vmin=0, vmax=255, aspect="auto" if W > H else "equal")
    for row in range(patch[0], H, patch[0]):
        axis.axhline(row - 0.5, color="white", linewidth=0.5)
    for column in range(patch[1], W, patch[1]):
        axis.axvline(column - 0.5, color="white", linewidth=0.5)
    axis.set(xticks=[], yticks=[], title=f"{count(patch, (H, W))} {name}")


def draw_arms(axis: Axes, found: Found) -> None:
    for n, (arm, colour) in enumerate(zip(found.arms.values(), LINES, strict=False)):
        draw_arm(axis, n, arm, colour)
    axis.axvline(found.nearest, color=FAINT, linestyle=":", linewidth=1.5)
    axis.set(yticks=range(len(found.arms)), yticklabels=list(found.arms), ylim=(len(found.arms) - 0.5, -0.5))
    axis.set_xlabel("held-out ones right; dotted: nearest neighbour")
    axis.set_title(f"{found.arms[PATCHES].n} seeds, mean and 95 % interval")


def draw_strangers(axis: Axes, found: Found) -> None:
    axis.barh(list(found.strangers), list(found.strangers.values()), color=LINES[0], height=0.6)
    axis.axvline(CHANCE, color=INK, linestyle=":", linewidth=1.5)
    axis.set(
        xlim=(0, 1), xlabel="right; dotted: chance", title=f"a speaker never heard, {found.strange_kind}"
    )
    axis.invert_yaxis()
