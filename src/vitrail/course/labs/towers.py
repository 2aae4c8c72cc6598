"""Lab `towers`: images, texts and sounds in a common embedding space, after CLIP and VATT.

Images are composed of real digits, small or large, at one of four positions, and captions describe them. Some
digits are never shown at some positions. A model that has learned what the words mean, and not only which
caption belongs to which image, retrieves the captions of such images too: zero-shot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from vitrail.course.labs.contrastive import TwoTowers, build_tower
from vitrail.course.labs.datasets import describe_dataset, load_dataset
from vitrail.course.labs.lab import LabResult, LabSize, Verdict, process_count
from vitrail.course.labs.scenes import (
    SCENES,
    UNSEEN,
    DigitSampler,
    Scene,
    check_digits,
    compose_scenes,
    encode_captions,
    random_captions,
    random_shift,
    resize_digits,
    scene_digits,
    small_digit_side,
)
from vitrail.course.labs.spoken_digits import build_dataset, has_recordings, read_recordings, split_by_index
from vitrail.course.labs.training_loop import train_model
from vitrail.data.sources import Dataset
from vitrail.experiment.interval import confidence_interval
from vitrail.experiment.study import Difference
from vitrail.experiment.trial import map_in_processes
from vitrail.inspect.canvas import FAINT, LINES, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "towers"
TITLE = "one space for image and text"
NOTE = '002 "Next week" (CLIP) and 003 "VATT"'
CLAIM = (
    "Contrastive training maps images and texts into a common embedding space, where one retrieves the "
    "other, also for unseen combinations; sounds can be added in the same way."
)
ACCEPTS = "spoken digits as `vitrail lab speech` takes them, to add sounds; or digits as IDX files or a .npz"

_MIN_RETRIEVED = 0.5  # fraction of captions of seen combinations
_MIN_RATIO = 0.9  # of unseen to seen combinations, for the claim to hold without a condition
_DIMENSION = 32  # of the embedding space
_LR, _BATCH = 3e-3, 64
MAX_IMAGES = 6_000, 2_000  # training and held-out images

_CaptionKind = Literal["captions", "random letters"]


@dataclass(frozen=True, eq=False)
class TowerTask:
    """A pair of towers to train."""

    digits: Dataset
    recordings: Dataset | None
    """Spoken digits as spectrograms; None to train on captions."""
    captions: _CaptionKind
    seed: int
    size: LabSize


@dataclass(frozen=True, eq=False)
class RetrievalResult:
    """Fractions of correct retrievals of a pair of towers, on held-out images."""

    seen: float = 0.0
    """Captions of combinations in the training set, among all captions."""
    unseen: float = 0.0
    """Captions of combinations that are not in the training set, among all captions."""
    among_unseen: float = 0.0
    """The same, among the captions of unseen combinations only."""
    parts: tuple[float, ...] = ()
    """For unseen combinations: digit, position and size correct."""
    image_by_sound: float = 0.0
    """Recordings whose nearest image shows the spoken digit."""
    sound_by_image: float = 0.0


_Results = Sequence[RetrievalResult]


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    digits, recordings = _load_digits_and_recordings(data, size)
    seeds = range(2 if size == "small" else 3)
    arms: list[tuple[Dataset | None, _CaptionKind]] = [(None, "captions"), (None, "random letters")]
    arms += [(recordings, "captions")] if recordings is not None else []
    tasks = [TowerTask(digits, *arm, seed, size) for arm in arms for seed in seeds]
    results = map_in_processes(train_towers, tasks, process_count(size))
    n = len(seeds)
    captions, letters, sounds = results[:n], results[n : 2 * n], results[2 * n :]
    scores = {
        "seen": [result.seen for result in captions],
        "unseen": [result.unseen for result in captions],
        "random letters": [result.unseen for result in letters],
    }
    return LabResult(
        number=fmean(scores["unseen"]),
        unit=f"of the images of unseen combinations retrieve their caption among {len(SCENES)}",
        n=n,
        verdict=decide_verdict(scores, [result.image_by_sound for result in sounds]),
        sentence=summarize(digits, captions, letters, sounds),
        figure=draw(digits, captions, letters, sounds),
        interval=confidence_interval(scores["unseen"]),
        numbers={
            "captions": [_caption_scores(result) for result in captions],
            "random letters": [_caption_scores(result) for result in letters],
            "sounds": [[result.image_by_sound, result.sound_by_image] for result in sounds],
            "chance": 1 / len(SCENES),
        },
    )


def _caption_scores(result: RetrievalResult) -> dict[str, float | tuple[float, ...]]:
    return {
        "seen": result.seen,
        "unseen": result.unseen,
        "among unseen": result.among_unseen,
        "parts": result.parts,
    }


def _load_digits_and_recordings(data: str | Path | None, size: LabSize) -> tuple[Dataset, Dataset | None]:
    """Images of digits, and spoken digits if the data holds recordings."""
    limits = (400, 100) if size == "small" else MAX_IMAGES
    if data is not None and has_recordings(Path(data)):
        recordings = build_dataset("spoken digits", *split_by_index(read_recordings(data)))
        check_digits(recordings)
        return load_dataset(None, *limits), recordings
    digits = load_dataset(data, *limits)
    check_digits(digits)
    return digits, None


def decide_verdict(scores: dict[str, list[float]], sound_scores: Sequence[float]) -> Verdict:
    """Images must retrieve their captions, for unseen combinations better than with random letters."""
    seen, unseen = fmean(scores["seen"]), fmean(scores["unseen"])
    if seen < _MIN_RETRIEVED:
        return Verdict("does not hold", f"even of seen combinations, {seen:.0%} retrieve their caption")
    difference = Difference.of(scores["unseen"], scores["random letters"])
    if not difference.significant or difference.mean < 0:
        reason = f"{unseen:.0%} of unseen combinations are retrieved, no more than with random letters"
        return Verdict("does not hold", reason)
    conditions = []
    if unseen < _MIN_RATIO * seen:
        conditions.append(f"mainly for seen combinations ({seen:.0%} retrieved; {unseen:.0%} of unseen ones)")
    if sound_scores and fmean(sound_scores) < _MIN_RETRIEVED:
        conditions.append(f"for images and texts, but not for sounds ({fmean(sound_scores):.0%})")
    return Verdict("partly", "; ".join(conditions)) if conditions else Verdict("holds")


# ---- training -------------------------------------------------------------------------------


def train_towers(task: TowerTask) -> RetrievalResult:
    """Train a pair of towers and evaluate retrieval on held-out images."""
    torch.manual_seed(task.seed)
    rng = torch.Generator().manual_seed(task.seed)
    if task.recordings is None:
        return _train_on_captions(task, rng)
    return _train_on_sounds(task, task.recordings, rng)


def _train_on_captions(task: TowerTask, rng: torch.Generator) -> RetrievalResult:
    small = small_digit_side(task.digits.train)
    texts = [scene.caption for scene in SCENES] if task.captions == "captions" else random_captions()
    captions = encode_captions(texts)
    seen, sampler = torch.nonzero(~UNSEEN)[:, 0], DigitSampler(task.digits.train)
    full_steps = 1_000 if small == 8 else 3_000  # larger images need more steps
    width, depth, steps = (32, 1, 30) if task.size == "small" else (48, 2, full_steps)
    shape = {"width": width, "depth": depth, "heads": 4}
    towers = TwoTowers(
        build_tower(_DIMENSION, **shape, size=3 * small, patch=small // 2, channels=1, position="sincos2d"),
        build_tower(_DIMENSION, **shape, input="text", size=captions.shape[1], patch=1, vocabulary=1 + 26),
    )

    def batch_loss() -> Tensor:
        scenes = seen[torch.randint(len(seen), (_BATCH,), generator=rng)]
        images = compose_scenes(sampler.sample(scene_digits(scenes), rng), scenes, small, rng)
        unique = scenes.unique()  # each caption is encoded once, even if several images have it
        return towers.loss(images, scenes, captions[unique], unique)

    train_model(towers, batch_loss, steps, _LR)
    return _evaluate_captions(towers, task, captions, small)


@torch.no_grad()
def _evaluate_captions(towers: TwoTowers, task: TowerTask, captions: Tensor, small: int) -> RetrievalResult:
    """Retrieval of captions by held-out digits, with every scene equally often."""
    rng = torch.Generator().manual_seed(10_000)  # the same images for every seed
    scenes = torch.arange(len(SCENES)).repeat(2 if task.size == "small" else 25)
    digits = DigitSampler(task.digits.eval_split).sample(scene_digits(scenes), rng)
    images = compose_scenes(digits, scenes, small, rng)
    similarity = towers.embed_first(images) @ towers.embed_second(captions).T  # (B, 80)
    predicted, unseen = similarity.argmax(dim=1), UNSEEN[scenes]
    predicted_unseen = similarity.masked_fill(~UNSEEN, -2.0).argmax(dim=1)
    attributes = torch.tensor([[scene.digit, scene.position, scene.size] for scene in SCENES])
    parts = (attributes[predicted[unseen]] == attributes[scenes[unseen]]).double().mean(dim=0)

    def accuracy(mask: Tensor, prediction: Tensor) -> float:
        return (prediction[mask] == scenes[mask]).double().mean().item()

    return RetrievalResult(
        seen=accuracy(~unseen, predicted),
        unseen=accuracy(unseen, predicted),
        among_unseen=accuracy(unseen, predicted_unseen),
        parts=tuple(parts.tolist()),
    )


def _train_on_sounds(task: TowerTask, recordings: Dataset, rng: torch.Generator) -> RetrievalResult:
    """Train on pairs of a spoken and a written digit, positive if they are the same digit."""
    side = small_digit_side(task.digits.train)
    spoken, written = DigitSampler(recordings.train), DigitSampler(task.digits.train)
    width, depth, steps = (32, 1, 100) if task.size == "small" else (48, 2, 1_000)
    shape = {"width": width, "depth": depth, "heads": 4, "channels": 1, "position": "sincos2d"}
    towers = TwoTowers(
        build_tower(_DIMENSION, **shape, size=tuple(spoken.images.shape[2:]), patch=8),
        build_tower(_DIMENSION, **shape, size=side, patch=side // 4),
    )

    def batch_loss() -> Tensor:
        sound_digits, image_digits = (torch.randint(10, (_BATCH,), generator=rng) for _ in range(2))
        images = resize_digits(written.sample(image_digits, rng), side)
        sounds = random_shift(spoken.sample(sound_digits, rng), rng)
        return towers.loss(sounds, sound_digits, images, image_digits)

    train_model(towers, batch_loss, steps, _LR)
    spoken, written = DigitSampler(recordings.eval_split), DigitSampler(task.digits.eval_split)
    with torch.no_grad():
        sound_embeddings = towers.embed_first(spoken.images)
        image_embeddings = towers.embed_second(resize_digits(written.images, side))
    similarity = sound_embeddings @ image_embeddings.T  # (recordings, images)
    return RetrievalResult(
        image_by_sound=(written.labels[similarity.argmax(dim=1)] == spoken.labels).double().mean().item(),
        sound_by_image=(spoken.labels[similarity.argmax(dim=0)] == written.labels).double().mean().item(),
    )


# ---- summary and figure ---------------------------------------------------------------------


def summarize(digits: Dataset, captions: _Results, letters: _Results, sounds: _Results) -> str:
    def mean(results: _Results, name: str) -> str:
        return f"{fmean(getattr(result, name) for result in results):.1%}"

    digit, position, size = (fmean(result.parts[n] for result in captions) for n in range(3))
    sentence = (
        f"Digits ({describe_dataset(digits)}), small or large, at four positions, with captions such as "
        f"`{SCENES[-1].caption}`, character by character: {mean(captions, 'seen')} of the held-out images "
        f"retrieve their caption among {len(SCENES)}, and {mean(captions, 'unseen')} if the digit was never "
        f"shown at that position (digit {digit:.0%}, position {position:.0%}, size {size:.0%} correct; "
        f"{mean(captions, 'among_unseen')} among the captions of unseen combinations alone). Chance is "
        f"{1 / len(SCENES):.1%}; with random letters as captions, {mean(letters, 'seen')} and "
        f"{mean(letters, 'unseen')} are retrieved. "
    )
    if not sounds:
        return sentence + "Sounds were not tested, which needs --data."
    return sentence + (
        f"A spoken digit retrieves an image of the same digit for {mean(sounds, 'image_by_sound')} of the "
        f"held-out recordings, and an image a recording for {mean(sounds, 'sound_by_image')} (chance 10 %). "
        "The pairs come from the labels; VATT uses videos, in which sounds and images occur together."
    )


@styled
def draw(digits: Dataset, captions: _Results, letters: _Results, sounds: _Results) -> Figure:
    """Example images with their captions; below, the fractions retrieved."""
    figure = new_figure(7.2, 4.2)
    grid = figure.add_gridspec(2, 4, height_ratios=(1, 1.1))
    examples = torch.tensor(
        [SCENES.index(scene) for scene in (Scene(7, 0, 0), Scene(2, 1, 1), Scene(5, 2, 0), Scene(4, 0, 1))]
    )
    rng, small = torch.Generator().manual_seed(0), small_digit_side(digits.train)
    sampled = DigitSampler(digits.train).sample(scene_digits(examples), rng)
    images = compose_scenes(sampled, examples, small, rng)
    for n, (index, image) in enumerate(zip(examples.tolist(), images, strict=True)):
        axis = figure.add_subplot(grid[0, n])
        axis.imshow(image[0].numpy(), cmap="gray", vmin=-1, vmax=1)
        axis.set(xticks=[], yticks=[])
        words = SCENES[index].caption.split(maxsplit=3)
        seen = "unseen" if SCENES[index].is_unseen else "seen"
        axis.set_title(f"{' '.join(words[:3])}\n{words[3]}: {seen}", fontsize=8)
    _draw_scores(figure.add_subplot(grid[1, :]), captions, letters, sounds)
    return figure


def _draw_scores(axis: Axes, captions: _Results, letters: _Results, sounds: _Results) -> None:
    """Mean and every seed of each fraction retrieved."""
    bars = {
        "caption, seen": [result.seen for result in captions],
        "caption, unseen": [result.unseen for result in captions],
        "random letters, seen": [result.seen for result in letters],
        "random letters, unseen": [result.unseen for result in letters],
    }
    if sounds:
        bars["image by sound"] = [result.image_by_sound for result in sounds]
        bars["sound by image"] = [result.sound_by_image for result in sounds]
    for n, values in enumerate(bars.values()):
        axis.barh(n, fmean(values), color=LINES[n // 2], alpha=0.35, height=0.6)
        axis.plot(values, [n] * len(values), "o", color=LINES[n // 2], markersize=4)
        axis.vlines(1 / len(SCENES) if n < 4 else 0.1, n - 0.4, n + 0.4, color=FAINT, linestyle=":")
    axis.set(yticks=range(len(bars)), yticklabels=list(bars), xlim=(0, 1.02))
    axis.set_xlabel("fraction retrieved; dots: seeds, dotted line: chance")
    axis.invert_yaxis()
