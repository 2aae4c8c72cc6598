"""Lab `practice`: note 002's exercise, from the weak model it hands out to its solution, a step at a time.

Each step is what the notes change, its learning rate too: here nothing is tuned besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.config import by
from vitrail.data.sources import Dataset
from vitrail.inspect.canvas import FAINT, LINES, canvas, in_our_style
from vitrail.labs.given import described, enlarged, of_the_notes, opened
from vitrail.labs.job import Job, do
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.labs.study import Difference, settled
from vitrail.labs.trial import each, processes_for
from vitrail.model import ViT
from vitrail.model.position import sincos
from vitrail.training.settings import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

NAME = "practice"
NOTE = '002 "Practice: Inspect a Basic ViT model"'
CLAIM = (
    "A weak ViT (width 9, patches of 16) is brought up to 98 % of MNIST by smaller patches, more width, "
    "fewer layers, a smaller rate, larger batches, more epochs, dropout on attention and weight decay."
)
TAKES = "MNIST as IDX files, a .npz, or a folder of pictures"

PLAIN = {"schedule": "constant", "warmup": 0.0, "clip": 0.0}  # what the notes do not mention, they do not do
DROP, DECAY = 0.1, 0.05  # the notes say "not too many", and no number
SAID = 0.98  # right on MNIST, by the notes
MORE = 3  # times the epochs: "more training", of which they say no more either


@dataclass(frozen=True)
class Step:
    """One change on the way."""

    name: str
    model: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    after: str = ""
    """The step it goes on from; the one before where nothing is said."""


WEAK = Step(
    "the start",
    {"size": 32, "patch": 16, "width": 9, "heads": 3, "depth": 3, "attention_dropout": 0.0},
    {**PLAIN, "lr": 5e-3, "batch": 128, "epochs": 5, "weight_decay": 0.0},
)
STEPS = [
    Step("28 px in patches of 4", {"size": 28, "patch": 4}),
    Step("width 64 with 4 heads", {"width": 64, "heads": 4}),
    Step("2 layers", {"depth": 2}),
    Step("rate 0.001", train={"lr": 1e-3}),
    Step("batch 256", train={"batch": 256}),
    Step("10 epochs", train={"epochs": 10}),
    Step("dropout on attention", {"attention_dropout": DROP}),
    Step("weight decay", train={"weight_decay": DECAY}),
    Step("more training", train={"epochs": 10 * MORE}),
]
SOLVED = STEPS[-1].name
ASIDE = [  # the exercise's questions, asked of the solution before it is trained longer
    Step("trainable positions", {"position": "learned"}, after="weight decay"),
    Step("no class token", {"class_token": False, "pool": "mean"}, after="weight decay"),
]

Scores = dict[str, list[float]]


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    small = size == "small"
    pictures = opened(data, *((48, 32) if small else (20_000, 10_000)))
    seeds = 2 if small else 3
    # Digits are few: batches an eighth as large leave as many steps in proportion.
    eighth = 1 if len(pictures.train) >= 10_000 else 8
    ladder = climbed(eighth, 5 if small else 1)
    jobs = [(step.name, seed) for step in ladder for seed in range(seeds)]
    work = partial(trained, pictures=pictures, ladder={step.name: step for step in ladder})
    done = dict(zip(jobs, each(work, jobs, processes_for(size)), strict=True))
    scores = {step.name: [done[step.name, seed] for seed in range(seeds)] for step in ladder}
    gains = {step.name: Difference.of(scores[step.name], scores[step.after]) for step in ladder[1:]}
    whole = Difference.of(scores[SOLVED], scores[WEAK.name])
    matrix = find_E(recipe_for(ladder[-2], pictures, 0))
    return Result(
        number=100 * whole.mean,
        unit="percentage points more right with the solution than at the start",
        n=seeds,
        verdict=judge(whole, gains, fmean(scores[SOLVED]), len(pictures.train)),
        sentence=tell(scores, gains, pictures, matrix),
        figure=draw(scores, gains),
        interval=whole.interval and (100 * whole.interval[0], 100 * whole.interval[1]),
        numbers={
            "scores": scores,
            "gains": {name: (one.mean, one.interval) for name, one in gains.items()},
            "E": matrix,
            "pictures": len(pictures.train),
            "batches and epochs are the notes' divided by": (eighth, 5 if small else 1),
        },
    )


def judge(whole: Difference, gains: Mapping[str, Difference], solved: float, pictures: int) -> Verdict:
    """The way as a whole must gain; then it is said which of its steps do, and where it ends."""
    if not whole.clear or whole.mean < 0:
        return Verdict("does not hold", f": from start to solution it is {100 * whole.mean:+.1f} points")
    way = {step.name: gains[step.name] for step in STEPS}
    up = [name for name, one in way.items() if one.clear and one.mean > 0]
    down = [name for name, one in way.items() if one.clear and one.mean < 0]
    short = "" if solved >= SAID else f" (with {pictures:,} pictures the end is {solved:.1%}, not {SAID:.0%})"
    if len(up) == len(way) and not short:
        return Verdict("holds")
    words = [f"{listed(up)} gain{'s' * (len(up) == 1)}" if up else "no step alone gains clearly"]
    if down:
        words.append(f"{listed(down)} cost{'s' * (len(down) == 1)}")
    rest = "" if len(up) + len(down) == len(way) else ", the others change nothing that is clear"
    return Verdict("holds if", f"taken together: {', '.join(words)}{rest}{short}")


def listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def tell(
    scores: Scores, gains: Mapping[str, Difference], pictures: Dataset, matrix: Mapping[str, Any]
) -> str:
    best = max((step.name for step in STEPS), key=lambda name: gains[name].mean)
    aside = ", ".join(f"{step.name} {100 * gains[step.name].mean:+.1f}" for step in ASIDE)
    return (
        f"On {described(pictures)} ({len(scores[SOLVED])} seeds) the start gets "
        f"{fmean(scores[WEAK.name]):.1%} right and the solution {fmean(scores[SOLVED]):.1%}; the notes "
        f"report 98 % on MNIST. The largest step is {best}, {100 * gains[best].mean:+.1f} points. "
        f"Besides, in points: {aside}. E is {matrix['name']}, stored as {by(matrix['stored'])}; as a matrix "
        f"it is {by(matrix['as a matrix'])}, and x_p E + b differs from the model's tokens by "
        f"{matrix['difference']:.0e} at most."
    )


# ---- runs -----------------------------------------------------------------------------------


def climbed(batches: int, epochs: int) -> list[Step]:
    """Every step with all before it, and with batches and epochs divided by these."""
    found: dict[str, Step] = {}
    before = ""
    for step in (WEAK, *STEPS, *ASIDE):
        on = found.get(step.after or before, Step(""))
        found[step.name] = Step(step.name, {**on.model, **step.model}, {**on.train, **step.train}, on.name)
        before = step.name

    def divided(step: Step) -> Step:
        train = {**step.train, "batch": step.train["batch"] // batches}
        return Step(step.name, step.model, {**train, "epochs": step.train["epochs"] // epochs}, step.after)

    return [divided(step) for step in found.values()]


def recipe_for(step: Step, data: Dataset, seed: int) -> Recipe:
    model = {**of_the_notes(data), **step.model}
    changes = {**step.train, "model": model}
    return settled("mnist-notes", data, {}, changes, changes.pop("lr"), seed)


def trained(key: tuple[str, int], pictures: Dataset, ladder: Mapping[str, Step]) -> float:
    """A step's share of held-out pictures right."""
    step, seed = ladder[key[0]], key[1]
    recipe = recipe_for(step, pictures, seed)
    fixed = None if "position" in step.model else sines(recipe.model.tokens, recipe.model.width)
    return do(Job(recipe, rows=fixed), enlarged(pictures, step.model["size"])).score


def sines(tokens: int, width: int) -> NDArray[np.float32]:
    """Fixed 1-D positions as the exercise has them, of odd widths too: the last cosine is left out."""
    return sincos(torch.arange(tokens), width)[:, :width].numpy()


def find_E(recipe: Recipe) -> dict[str, Any]:
    """Where E is, its shape, and that x_p E + b is what the model makes of a patch."""
    torch.manual_seed(0)
    model, config = ViT(recipe.model), recipe.model
    kernel, bias = model.get_parameter("tokens.proj.weight"), model.get_parameter("tokens.proj.bias")
    E = kernel.flatten(1).T  # (C P P, D)
    picture = torch.rand(1, *config.input_shape)
    (down, across), (h, w) = config.patch_pixels, config.grid
    parts = picture.unflatten(3, (w, across)).unflatten(2, (h, down))  # (1, C, h, P, w, P)
    x_p = parts.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (1, N, C P P)
    with torch.no_grad():
        difference = (x_p @ E + bias - model.tokens(picture)).abs().max().item()
    return {
        "name": "tokens.proj.weight",
        "stored": tuple(kernel.shape),
        "as a matrix": tuple(E.shape),
        "difference": difference,
    }


# ---- the picture ----------------------------------------------------------------------------


@in_our_style
def draw(scores: Scores, gains: Mapping[str, Difference]) -> Figure:
    """What is right at every step, and what each step gains, with its interval."""
    names, rows = list(scores), range(len(scores))
    figure = canvas(7.6, 0.9 + 0.3 * len(names))
    left, right = figure.subplots(1, 2, sharey=True)
    asides = {step.name for step in ASIDE}
    for row, (name, values) in enumerate(scores.items()):
        colour = LINES[1] if name in asides else LINES[0]
        left.plot(values, [row] * len(values), "o", color=colour, alpha=0.35, markersize=5)
        left.plot([fmean(values)], [row], "|", color=colour, markersize=12, markeredgewidth=2)
        if name in gains:
            one = gains[name]
            right.plot([100 * one.mean], [row], "o", color=colour, markersize=5)
            if one.interval is not None:
                right.plot([100 * end for end in one.interval], [row, row], color=colour, linewidth=2)
    way = [fmean(values) for name, values in scores.items() if name not in asides]
    left.plot(way, rows[: len(way)], color=LINES[0], linewidth=0.8)
    left.set(yticks=rows, yticklabels=names, xlabel="held-out pictures right")
    left.set_title("each step with all before it", loc="left")
    right.axvline(0, color=FAINT, linewidth=0.8)
    right.set(xlabel="percentage points")
    right.set_title("what the step gains, 95 % interval", loc="left")
    left.invert_yaxis()
    return figure
