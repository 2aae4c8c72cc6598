"""Lab `towers`: images, texts and sounds in a common embedding space, after CLIP and VATT.

Images are composed of real digits, small or large, at one of four positions, and captions describe them. Some
digits are never shown at some positions. A model that has learned what the words mean, and not only which
caption belongs to which image, retrieves the captions of such images too: zero-shot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from vitrail.experiment.interval import fraction_interval
from vitrail.experiment.study import Difference
from vitrail.experiment.trial import map_in_processes
from vitrail.images.formats.sources import Dataset
from vitrail.model import ViT
from vitrail.views.canvas import FAINT, LINES, new_figure, styled
from vitrail_course.labs.contrastive import Towers, build_tower
from vitrail_course.labs.datasets import describe_dataset, load_dataset
from vitrail_course.labs.lab import LabResult, LabSize, process_count
from vitrail_course.labs.scenes import (
    SCENES,
    UNSEEN,
    DigitSampler,
    Scene,
    check_digits,
    compose_scenes,
    encode_captions,
    random_captions,
    random_shift,
    scene_digits,
    small_digit_side,
)
from vitrail_course.labs.spoken_digits import build_dataset, has_recordings, read_recordings, split_by_index
from vitrail_course.labs.training_loop import train_model
from vitrail_course.labs.verdict import Statement, Verdict, decide, gain, reaches

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "towers"
TITLE = "one space for image and text"
NOTE = '002 "Next week" (CLIP) and 003 "VATT"'
CLAIM = (
    "Contrastive training maps images and texts into a common embedding space, where an image "
    "retrieves its caption, also for unseen combinations (CLIP); sounds can be added in the same way, "
    "so that all three share one space (VATT)."
)
ACCEPTS = "spoken digits as `vitrail lab speech` takes them, to add sounds; or digits as IDX files or a .npz"

_MIN_RETRIEVED = 0.5  # fraction of captions, of seen and of unseen combinations, and of sounds
_DIMENSION = 32  # of the embedding space
_LR, _BATCH = 3e-3, 64
_COPIES = {"small": 2, "full": 25}  # held-out images of each scene
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
    caption_by_sound: float = 0.0
    """Recordings whose nearest caption names the spoken digit; they were never trained together."""
    sound_by_caption: float = 0.0


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
    unseen = [result.unseen for result in captions]
    counts = {"seen": _scene_count(size, ~UNSEEN), "unseen": _scene_count(size, UNSEEN)}
    if recordings is not None:
        counts["recordings"] = len(recordings.eval_split)
    return LabResult(
        number=fmean(unseen),
        unit=f"of the images of unseen combinations retrieve their caption among {len(SCENES)}",
        n=n,
        sentence=summarize(digits, captions, letters, sounds),
        figure=draw(digits, captions, letters, sounds),
        interval=fraction_interval(unseen, counts["unseen"]),
        numbers={
            "captions": [asdict(result) for result in captions],
            "random letters": [asdict(result) for result in letters],
            "sounds": [asdict(result) for result in sounds],
            "held out": counts,
            "chance": 1 / len(SCENES),
        },
    )


def _scene_count(size: LabSize, mask: Tensor) -> int:
    """How many held-out images show these scenes."""
    return int(mask.sum()) * _COPIES[size]


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


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Images must retrieve captions, also unseen ones, and with sounds all three must share a space."""
    captions, letters, sounds = (numbers[key] for key in ("captions", "random letters", "sounds"))
    counts = numbers["held out"]

    def column(results: Sequence[Mapping[str, Any]], name: str) -> list[float]:
        return [result[name] for result in results]

    seen, unseen = column(captions, "seen"), column(captions, "unseen")
    statements = [
        _retrieves("images retrieve their captions", seen, counts["seen"]),
        _retrieves("images of unseen combinations retrieve theirs", unseen, counts["unseen"]),
        gain(
            "images of unseen combinations retrieve more than with random letters as captions",
            Difference.of(unseen, column(letters, "unseen"), counts["unseen"]),
        ),
    ]
    names = {
        "image_by_sound": "sounds retrieve images of their digit",
        "caption_by_sound": "sounds retrieve captions that name it, with which they were never trained",
    }
    if sounds:
        statements += [_retrieves(text, column(sounds, n), counts["recordings"]) for n, text in names.items()]
    return decide(statements)


def _retrieves(text: str, scores: Sequence[float], items: int) -> Statement:
    interval = fraction_interval(scores, items)
    return reaches(text, fmean(scores), interval, _MIN_RETRIEVED, n=len(scores))


# ---- training -------------------------------------------------------------------------------


def train_towers(task: TowerTask) -> RetrievalResult:
    """Train two towers, or three with sounds, and evaluate retrieval on held-out images and recordings.

    Sounds are paired with images only: sounds and texts meet because both are close to the same images.
    """
    torch.manual_seed(task.seed)
    rng = torch.Generator().manual_seed(task.seed)
    small = small_digit_side(task.digits.train)
    texts = [scene.caption for scene in SCENES] if task.captions == "captions" else random_captions()
    captions = encode_captions(texts)
    seen, sampler = torch.nonzero(~UNSEEN)[:, 0], DigitSampler(task.digits.train)
    full_steps = 1_000 if small == 8 else 3_000  # larger images need more steps
    width, depth, steps = (32, 1, 30) if task.size == "small" else (48, 2, full_steps)
    shape = {"width": width, "depth": depth, "heads": 4}
    spoken = None if task.recordings is None else DigitSampler(task.recordings.train)
    towers = Towers(
        image=build_tower(
            _DIMENSION, **shape, size=3 * small, patch=small // 2, channels=1, position="sincos2d"
        ),
        text=build_tower(
            _DIMENSION, **shape, input="text", size=captions.shape[1], patch=1, vocabulary=1 + 26
        ),
        **({} if spoken is None else {"sound": _sound_tower(spoken, shape)}),
    )

    def batch_loss() -> Tensor:
        scenes = seen[torch.randint(len(seen), (_BATCH,), generator=rng)]
        images = compose_scenes(sampler.sample(scene_digits(scenes), rng), scenes, small, rng)
        unique = scenes.unique()  # each caption is encoded once, even if several images have it
        embedded = towers.embed("image", images)
        loss = towers.loss(embedded, scenes, towers.embed("text", captions[unique]), unique)
        if spoken is None:
            return loss
        digits = torch.randint(10, (_BATCH,), generator=rng)
        sounds = towers.embed("sound", random_shift(spoken.sample(digits, rng), rng))
        return loss + towers.loss(sounds, digits, embedded, scene_digits(scenes))

    train_model(towers, batch_loss, steps, _LR)
    result = _evaluate_captions(towers, task, captions, small)
    return result if task.recordings is None else _evaluate_sounds(towers, task, captions, small, result)


@torch.no_grad()
def _evaluate_captions(towers: Towers, task: TowerTask, captions: Tensor, small: int) -> RetrievalResult:
    """Retrieval of captions by held-out digits, with every scene equally often."""
    rng = torch.Generator().manual_seed(10_000)  # the same images for every seed
    scenes = torch.arange(len(SCENES)).repeat(_COPIES[task.size])
    digits = DigitSampler(task.digits.eval_split).sample(scene_digits(scenes), rng)
    images = compose_scenes(digits, scenes, small, rng)
    similarity = towers.embed("image", images) @ towers.embed("text", captions).T  # (B, 80)
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


def _sound_tower(spoken: DigitSampler, shape: dict[str, int]) -> ViT:
    """A tower of spectrograms."""
    size = tuple(spoken.images.shape[2:])
    return build_tower(_DIMENSION, **shape, size=size, patch=8, channels=1, position="sincos2d")


@torch.no_grad()
def _evaluate_sounds(
    towers: Towers, task: TowerTask, captions: Tensor, small: int, result: RetrievalResult
) -> RetrievalResult:
    """Retrieval between held-out recordings, held-out images of all scenes, and captions, by digit."""
    assert task.recordings is not None
    rng, scenes = torch.Generator().manual_seed(20_000), torch.arange(len(SCENES)).repeat(4)
    digits = scene_digits(scenes)
    written = DigitSampler(task.digits.eval_split).sample(digits, rng)
    spoken = DigitSampler(task.recordings.eval_split)
    sounds = towers.embed("sound", spoken.images)
    images = towers.embed("image", compose_scenes(written, scenes, small, rng))
    texts = towers.embed("text", captions)
    caption_digits = scene_digits(torch.arange(len(SCENES)))

    def retrieved(queries: Tensor, query_digits: Tensor, keys: Tensor, key_digits: Tensor) -> float:
        nearest = key_digits[(queries @ keys.T).argmax(dim=1)]
        return (nearest == query_digits).double().mean().item()

    return replace(
        result,
        image_by_sound=retrieved(sounds, spoken.labels, images, digits),
        sound_by_image=retrieved(images, digits, sounds, spoken.labels),
        caption_by_sound=retrieved(sounds, spoken.labels, texts, caption_digits),
        sound_by_caption=retrieved(texts, caption_digits, sounds, spoken.labels),
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
        "With a third tower for sounds, paired with images only, all in one space: a spoken digit retrieves "
        f"an image of the same digit for {mean(sounds, 'image_by_sound')} of the held-out recordings and an "
        f"image a recording for {mean(sounds, 'sound_by_image')}; a spoken digit retrieves a caption that "
        f"names it for {mean(sounds, 'caption_by_sound')} and a caption a recording for "
        f"{mean(sounds, 'sound_by_caption')}, although no sound was ever paired with a text (chance 10 %). "
        f"Images retrieve {mean(sounds, 'seen')} of their captions there. The pairs come from the labels; "
        "VATT uses videos, in which sounds and images occur together."
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
        bars["caption by sound"] = [result.caption_by_sound for result in sounds]
        bars["sound by caption"] = [result.sound_by_caption for result in sounds]
    for n, values in enumerate(bars.values()):
        axis.barh(n, fmean(values), color=LINES[n // 2], alpha=0.35, height=0.6)
        axis.plot(values, [n] * len(values), "o", color=LINES[n // 2], markersize=4)
        axis.vlines(1 / len(SCENES) if n < 4 else 0.1, n - 0.4, n + 0.4, color=FAINT, linestyle=":")
    axis.set(yticks=range(len(bars)), yticklabels=list(bars), xlim=(0, 1.02))
    axis.set_xlabel("fraction retrieved; dots: seeds, dotted line: chance")
    axis.invert_yaxis()
