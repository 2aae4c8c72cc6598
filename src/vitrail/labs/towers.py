"""Lab `towers`: pictures, texts and sounds in one common space, after CLIP and VATT.

Pictures are put together from real digits, small or large, at one of four places, and the text says so.
Some digits are never shown at some places. Who has learned what the words mean, and not only which text
goes with which picture, finds the text of such a picture too: zero-shot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from vitrail.data.sources import Dataset
from vitrail.inspect.canvas import FAINT, LINES, canvas, in_our_style
from vitrail.labs.contrast import Towers, build_tower
from vitrail.labs.descent import descend
from vitrail.labs.given import described, opened
from vitrail.labs.interval import interval
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.labs.scenes import (
    KINDS,
    NEW,
    Drawn,
    Kind,
    check_digits,
    codes,
    compose,
    digit_of,
    resized,
    shifted,
    small_side,
    spell,
)
from vitrail.labs.sounds import as_data, by_number, is_spoken, read_recordings
from vitrail.labs.study import Difference
from vitrail.labs.trial import each, processes_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "towers"
NOTE = '002 "Next week" (CLIP) and 003 "VATT"'
CLAIM = (
    "Contrastive training brings images and texts into one common space, where one finds the other, also in "
    "combinations never seen; sounds can be brought in alike."
)
TAKES = "spoken digits as `vitrail lab speech` takes them, for sounds too; or digits as IDX files or a .npz"

FOUND, AS_GOOD = 0.5, 0.9  # of the texts right; of the seen ones' score, as good as seen
SPACE = 32  # numbers in a vector of the common space
RATE, BATCH = 3e-3, 64
MOST = 6_000, 2_000  # pictures of a larger data set to learn from, and to judge by

Words = Literal["texts", "codes"]


@dataclass(frozen=True, eq=False)
class Task:
    """A pair of towers to train."""

    data: Dataset
    """Digits."""
    sounds: Dataset | None
    """Spoken ones as pictures of frequency and time; without them, the second tower reads."""
    words: Words
    seed: int
    size: Size


@dataclass(frozen=True, eq=False)
class Measured:
    """What a pair of towers finds, as shares."""

    seen: float = 0.0
    """Texts of pictures whose combination was in training, among all texts; the pictures are new."""
    new: float = 0.0
    """The same of combinations that were not."""
    among_new: float = 0.0
    """The same, where only texts of new combinations are to choose from."""
    parts: tuple[float, ...] = ()
    """Of new combinations: digit, place and size right."""
    picture_of_sound: float = 0.0
    """Recordings whose nearest picture shows the digit spoken."""
    sound_of_picture: float = 0.0


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    digits, spoken = open_both(data, size)
    seeds = range(2 if size == "small" else 3)
    ways: list[tuple[Dataset | None, Words]] = [(None, "texts"), (None, "codes")]
    ways += [(spoken, "texts")] if spoken is not None else []
    tasks = [Task(digits, sounds, words, seed, size) for sounds, words in ways for seed in seeds]
    done = each(train, tasks, processes_for(size))
    n = len(seeds)
    texts, names, heard = done[:n], done[n : 2 * n], done[2 * n :]
    new, sound = [one.new for one in texts], [one.picture_of_sound for one in heard]
    scores = {"seen": [one.seen for one in texts], "new": new, "codes": [one.new for one in names]}
    return Result(
        number=fmean(new),
        unit=f"of the pictures of combinations never seen find their text among {len(KINDS)}",
        n=n,
        verdict=judge(scores, sound),
        sentence=in_words(digits, texts, names, heard),
        figure=draw(digits, texts, names, heard),
        interval=interval(new),
        numbers={
            "texts": [of_texts(one) for one in texts],
            "codes for texts": [of_texts(one) for one in names],
            "sounds": [[one.picture_of_sound, one.sound_of_picture] for one in heard],
            "chance": 1 / len(KINDS),
        },
    )


def of_texts(one: Measured) -> dict[str, float | tuple[float, ...]]:
    return {"seen": one.seen, "new": one.new, "among new": one.among_new, "parts": one.parts}


def open_both(data: str | Path | None, size: Size) -> tuple[Dataset, Dataset | None]:
    """Digits to look at, and spoken ones where the data is recordings."""
    most = (400, 100) if size == "small" else MOST
    if data is not None and is_spoken(Path(data)):
        spoken = as_data("spoken digits", *by_number(read_recordings(data)))
        check_digits(spoken)
        return opened(None, *most), spoken
    found = opened(data, *most)
    check_digits(found)
    return found, None


def judge(scores: dict[str, list[float]], sound: Sequence[float]) -> Verdict:
    """Whether pictures find their texts at all, and those of combinations that were never seen."""
    seen, new = fmean(scores["seen"]), fmean(scores["new"])
    if seen < FOUND:
        return Verdict(
            "does not hold", f": {seen:.0%} of the pictures find their text, seen combinations too"
        )
    beyond = Difference.of(scores["new"], scores["codes"])
    if not beyond.clear or beyond.mean < 0:
        return Verdict("does not hold", f": in combinations never seen {new:.0%} are found, as with codes")
    conditions = []
    if new < AS_GOOD * seen:
        conditions.append(f"the combination has been seen ({seen:.0%} found; {new:.0%} if not)")
    if sound and fmean(sound) < FOUND:
        conditions.append(f"they are images and texts, not sounds ({fmean(sound):.0%})")
    return Verdict("holds if", "; ".join(conditions)) if conditions else Verdict("holds")


# ---- training -------------------------------------------------------------------------------


def train(task: Task) -> Measured:
    torch.manual_seed(task.seed)
    chance = torch.Generator().manual_seed(task.seed)
    return train_on_texts(task, chance) if task.sounds is None else train_on_sounds(task, task.sounds, chance)


def train_on_texts(task: Task, chance: torch.Generator) -> Measured:
    small = small_side(task.data.train)
    texts = spell([kind.text for kind in KINDS] if task.words == "texts" else codes())
    seen, by_digit = torch.nonzero(~NEW)[:, 0], Drawn(task.data.train)
    long = 1_000 if small == 8 else 3_000  # finer pictures take longer to learn
    width, depth, steps = (32, 1, 30) if task.size == "small" else (48, 2, long)
    shape = {"width": width, "depth": depth, "heads": 4}
    towers = Towers(
        build_tower(SPACE, **shape, size=3 * small, patch=small // 2, channels=1, position="sincos2d"),
        build_tower(SPACE, **shape, input="text", size=texts.shape[1], patch=1, vocabulary=1 + 26),
    )

    def loss() -> Tensor:
        kinds = seen[torch.randint(len(seen), (BATCH,), generator=chance)]
        pictures = compose(by_digit.draw(digit_of(kinds), chance), kinds, small, chance)
        different = kinds.unique()  # a text that comes twice is the same text, and is read once
        return towers.loss(pictures, kinds, texts[different], different)

    descend(towers, loss, steps, RATE)
    return measure_texts(towers, task, texts, small)


@torch.no_grad()
def measure_texts(towers: Towers, task: Task, texts: Tensor, small: int) -> Measured:
    """Held-out digits, every combination as often, each asked for its text among all."""
    chance = torch.Generator().manual_seed(10_000)  # the same pictures for every seed
    kinds = torch.arange(len(KINDS)).repeat(2 if task.size == "small" else 25)
    pictures = compose(Drawn(task.data.held_out).draw(digit_of(kinds), chance), kinds, small, chance)
    alike = towers.place_first(pictures) @ towers.place_second(texts).T  # (B, 80)
    guess, new = alike.argmax(dim=1), NEW[kinds]
    narrow = alike.masked_fill(~NEW, -2.0).argmax(dim=1)
    table = torch.tensor([[kind.digit, kind.place, kind.size] for kind in KINDS])
    parts = (table[guess[new]] == table[kinds[new]]).double().mean(dim=0)

    def right(which: Tensor, answer: Tensor) -> float:
        return (answer[which] == kinds[which]).double().mean().item()

    return Measured(right(~new, guess), right(new, guess), right(new, narrow), tuple(parts.tolist()))


def train_on_sounds(task: Task, sounds: Dataset, chance: torch.Generator) -> Measured:
    """A spoken digit and a written one belong together if they are the same digit."""
    side = small_side(task.data.train)
    heard, seen = Drawn(sounds.train), Drawn(task.data.train)
    width, depth, steps = (32, 1, 100) if task.size == "small" else (48, 2, 1_000)
    shape = {"width": width, "depth": depth, "heads": 4, "channels": 1, "position": "sincos2d"}
    towers = Towers(
        build_tower(SPACE, **shape, size=tuple(heard.images.shape[2:]), patch=8),
        build_tower(SPACE, **shape, size=side, patch=side // 4),
    )

    def loss() -> Tensor:
        ours, theirs = (torch.randint(10, (BATCH,), generator=chance) for _ in range(2))
        pictures = resized(seen.draw(theirs, chance), side)
        return towers.loss(shifted(heard.draw(ours, chance), chance), ours, pictures, theirs)

    descend(towers, loss, steps, RATE)
    spoken, written = Drawn(sounds.held_out), Drawn(task.data.held_out)
    with torch.no_grad():
        a = towers.place_first(spoken.images)
        b = towers.place_second(resized(written.images, side))
    alike = a @ b.T  # (recordings, pictures)
    return Measured(
        picture_of_sound=(written.labels[alike.argmax(dim=1)] == spoken.labels).double().mean().item(),
        sound_of_picture=(spoken.labels[alike.argmax(dim=0)] == written.labels).double().mean().item(),
    )


# ---- words and picture ----------------------------------------------------------------------


def in_words(
    digits: Dataset, texts: Sequence[Measured], names: Sequence[Measured], heard: Sequence[Measured]
) -> str:
    def mean(some: Sequence[Measured], name: str) -> str:
        return f"{fmean(getattr(one, name) for one in some):.1%}"

    digit, place, size = (fmean(one.parts[n] for one in texts) for n in range(3))
    said = (
        f"Digits ({described(digits)}), small or large, at four places, and texts such as "
        f"`{KINDS[-1].text}`, letter by letter: {mean(texts, 'seen')} of new pictures find their text "
        f"among {len(KINDS)}, and {mean(texts, 'new')} where the digit was never seen at that place "
        f"(digit {digit:.0%}, place {place:.0%}, size {size:.0%} right; {mean(texts, 'among_new')} "
        f"among the texts of such combinations alone). Chance is {1 / len(KINDS):.1%}; with random letters "
        f"for texts it is {mean(names, 'seen')} and {mean(names, 'new')}. "
    )
    if not heard:
        return said + "No sound was tried: that needs --data."
    return said + (
        f"A spoken digit finds a picture of itself in {mean(heard, 'picture_of_sound')} of the held-out "
        f"recordings, and a picture a recording in {mean(heard, 'sound_of_picture')} (chance 10 %). The "
        f"labels made the pairs; VATT has videos, whose sound and picture come together."
    )


@in_our_style
def draw(
    digits: Dataset, texts: Sequence[Measured], names: Sequence[Measured], heard: Sequence[Measured]
) -> Figure:
    """Pictures with their texts; and what is found, every seed a dot."""
    figure = canvas(7.2, 4.2)
    grid = figure.add_gridspec(2, 4, height_ratios=(1, 1.1))
    shown = torch.tensor(
        [KINDS.index(kind) for kind in (Kind(7, 0, 0), Kind(2, 1, 1), Kind(5, 2, 0), Kind(4, 0, 1))]
    )
    chance, small = torch.Generator().manual_seed(0), small_side(digits.train)
    pictures = compose(Drawn(digits.train).draw(digit_of(shown), chance), shown, small, chance)
    for n, (number, picture) in enumerate(zip(shown.tolist(), pictures, strict=True)):
        axis = figure.add_subplot(grid[0, n])
        axis.imshow(picture[0].numpy(), cmap="gray", vmin=-1, vmax=1)
        axis.set(xticks=[], yticks=[])
        words = KINDS[number].text.split(maxsplit=3)
        seen = "never seen" if KINDS[number].new else "seen"
        axis.set_title(f"{' '.join(words[:3])}\n{words[3]}: {seen}", fontsize=8)
    bars = {
        "text, seen": [one.seen for one in texts],
        "text, never seen": [one.new for one in texts],
        "random letters, seen": [one.seen for one in names],
        "random letters, never seen": [one.new for one in names],
    }
    if heard:
        bars["picture by its sound"] = [one.picture_of_sound for one in heard]
        bars["sound by its picture"] = [one.sound_of_picture for one in heard]
    axis = figure.add_subplot(grid[1, :])
    for n, values in enumerate(bars.values()):
        axis.barh(n, fmean(values), color=LINES[n // 2], alpha=0.35, height=0.6)
        axis.plot(values, [n] * len(values), "o", color=LINES[n // 2], markersize=4)
        axis.vlines(1 / len(KINDS) if n < 4 else 0.1, n - 0.4, n + 0.4, color=FAINT, linestyle=":")
    axis.set(yticks=range(len(bars)), yticklabels=list(bars), xlim=(0, 1.02))
    axis.set_xlabel("found; a dot is a seed, dotted is chance")
    axis.invert_yaxis()
    return figure
