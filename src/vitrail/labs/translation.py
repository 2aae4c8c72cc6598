"""Lab `translation`: what convolutions know beforehand, and when that helps.

A CNN, a ViT and a hybrid (a ViT behind two convolutions) of about as many parameters. First, what becomes of
their features when the picture moves; then, how well each learns from few pictures and in few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.sources import Dataset, Split
from vitrail.errors import InputError
from vitrail.inspect.canvas import LINES, canvas, in_our_style
from vitrail.labs.given import TINY, described, opened, part_of
from vitrail.labs.lab import Result, Size, Verdict
from vitrail.labs.lesson import Learned, Lesson, at_best_rates
from vitrail.labs.shift import MOVED_ARMS, P, builders_for, changes, random, reach
from vitrail.labs.study import Difference
from vitrail.labs.trial import Pool, processes_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "translation"
NOTE = '002 "Convolutional Neural Networks", "Notes", "Combining vision transformers and convolution?"'
CLAIM = (
    "CNNs are equivariant to translation and local. That helps with small data sets, but a transformer "
    "learns the structure from enough data. Hybrids are better when trained less; the advantage vanishes as "
    "training goes on."
)
TAKES = "labelled pictures in arrays"

ARMS = ("ViT", "CNN", "hybrid")
SHARES = (0.01, 0.1, 1.0)  # of the pictures to learn from
STEPS = {"few": 40, "more": 130, "many": 400}  # with up to some thousand pictures
POOLS = "a CNN has no pools, or shifts are by whole strides"
SAME, MOVED = 1e-3, 0.05  # of the distance between two pictures: less is the same, more is not


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    full = size == "full"
    pictures = opened(data) if full else opened(data, 64, 64)
    held_out = inputs_of(pictures.held_out)
    builders = builders_for(held_out[0], len(pictures.classes))
    rates, seeds = ([3e-3, 1e-3, 1e-2], 4) if full else ([3e-3], 2)
    longer = max(1, len(pictures.train) // 2_000)  # so that all pictures are seen about as often
    steps = {name: longer * many for name, many in STEPS.items()} if full else {"few": 3, "many": 8}
    shares = SHARES if full else SHARES[1:]

    def taught(names: Sequence[str], share: float, length: str, alone: bool = False) -> dict[str, Learned]:
        """Every arm at its best rate; or, where only the weights are wanted, at the first, once."""
        wanted = max(len(pictures.classes), round(share * len(pictures.train)))
        parts = [inputs_of(part_of(pictures.train, wanted, seed)) for seed in range(seeds)]

        def plan(name: str, rate: float, seed: int) -> Lesson:
            return Lesson(builders[name], *parts[seed], held_out, steps[length], rate, seed)

        return at_best_rates(plan, names, rates[:1] if alone else rates, 1 if alone else seeds, pool)

    with Pool(processes_for(size)) as pool:
        by_share = {share: taught(ARMS, share, "many") for share in shares}
        by_length = {length: taught(ARMS, 1.0, length) for length in steps if length != "many"}
        others = taught(["CNN without pools", "ViT without positions"], 1.0, "many", alone=True)
    by_length["many"] = by_share[1.0]
    states = {name: one.state for name, one in (by_share[1.0] | others).items()}
    moved = changes(builders, states, held_out[0][:32])
    reached = {name: reach(random(builders[name]), held_out[0][:8]) for name in MOVED_ARMS}
    small, short = apart(by_share, "CNN", "ViT"), apart(by_length, "hybrid", "ViT")
    beside = apart(by_length, "hybrid", "CNN")
    answer = small[shares[0]]
    return Result(
        number=100 * answer.mean,
        unit=f"points of accuracy, CNN more than ViT with {shares[0]:.0%} of the pictures",
        n=answer.n,
        verdict=judge(judge_all(moved, small, short, beside)),
        sentence=sentence(pictures, by_share, by_length, moved, reached, steps, held_out[0].shape[-1]),
        figure=draw(moved, by_share, by_length, steps),
        interval=None if answer.interval is None else (100 * answer.interval[0], 100 * answer.interval[1]),
        numbers={
            "parameters": {name: parameters(build) for name, build in builders.items()},
            "change when moved": moved,
            "pixels that one reaches": reached,
            "accuracy by share": {str(share): facts(found) for share, found in by_share.items()},
            "accuracy by steps": {str(steps[length]): facts(found) for length, found in by_length.items()},
            "CNN more than ViT": {str(share): vars(one) for share, one in small.items()},
            "hybrid more than ViT": {str(steps[length]): vars(one) for length, one in short.items()},
            "hybrid more than CNN": {str(steps[length]): vars(one) for length, one in beside.items()},
        },
    )


# ---- what the numbers say -------------------------------------------------------------------


def judge(statements: Mapping[str, tuple[bool, str]]) -> Verdict:
    """All, some or none of the statements; the condition says which, and why."""
    said = "; ".join(f"{name}: {why}" for name, (_, why) in statements.items())
    good = [name for name, (holds, _) in statements.items() if holds]
    if not good:
        return Verdict("does not hold", f": {said}")
    if len(good) < len(statements):
        verb = "is" if len(good) == 1 else "are"
        return Verdict("holds if", f"only {' and '.join(good)} {verb} meant ({said})")
    return Verdict("holds if", POOLS) if POOLS in said else Verdict("holds")


def judge_all(
    moved: Mapping[str, Mapping[str, float]],
    small: Mapping[Any, Difference],
    short: Mapping[Any, Difference],
    beside: Mapping[Any, Difference],
) -> dict[str, tuple[bool, str]]:
    """Each statement: whether it holds, and in which words.

    Args:
        moved: how much features change, by model and shift.
        small: CNN more than ViT, from the smallest share of the pictures to all.
        short: hybrid more than ViT, from the fewest steps to the most.
        beside: hybrid more than CNN, likewise.
    """
    plain, pooled, ours = (moved[f"{name}, trained"] for name in ("CNN without pools", "CNN", "ViT"))
    equivariant = plain["1 pixel"] < SAME and ours["1 pixel"] > MOVED
    words = "holds" if equivariant else "does not hold"
    if equivariant and pooled["1 pixel"] > SAME > pooled["1 patch"]:
        words += f" if {POOLS}"
    better, why = fading(short, "in the fewest steps", "in the most")
    early = next(iter(beside.values()))
    return {
        "equivariance": (equivariant, words),
        "small data": fading(small, "with the fewest pictures", "with all"),
        "hybrids": (better, f"{why}, beside a CNN {100 * early.mean:+.1f} in the fewest"),
    }


def fading(gains: Mapping[Any, Difference], first: str, last: str) -> tuple[bool, str]:
    """Whether a gain is clear at the beginning, and smaller or gone at the end."""
    early, *_, late = gains.values()
    helps = early.clear and early.mean > 0
    fades = not late.clear or late.mean < early.mean
    word = "holds" if helps and fades else "does not hold"
    return helps and fades, f"{word} ({100 * early.mean:+.1f} points {first}, {100 * late.mean:+.1f} {last})"


def apart(found: Mapping[Any, Mapping[str, Learned]], first: str, second: str) -> dict[Any, Difference]:
    """By how much one arm is better than another, under every condition."""
    return {key: Difference.of(arms[first].scores, arms[second].scores) for key, arms in found.items()}


def facts(found: Mapping[str, Learned]) -> dict[str, Any]:
    return {name: {"mean": one.mean, "rate": one.rate, "scores": one.scores} for name, one in found.items()}


# ---- pictures and models --------------------------------------------------------------------


def inputs_of(split: Split) -> tuple[Tensor, Tensor]:
    """Pictures (N, C, H, W) from -1 to 1, and their labels.

    Tiny ones are doubled, so that a stride of 4 leaves more than four tokens; what fills no patch is cut off.
    """
    if split.images is None or split.labels.ndim == 2:
        raise InputError(
            "This lab takes pictures in arrays, one class each: IDX files or a .npz.",
            "pictures in files" if split.images is None else "several classes for a picture",
            "Leave --data out.",
        )
    images = torch.from_numpy(split.images).permute(0, 3, 1, 2).float() / 127.5 - 1
    if max(images.shape[2:]) < TINY:
        images = F.interpolate(images, scale_factor=2)
    H, W = (side - side % P for side in images.shape[2:])
    return images[:, :, :H, :W].contiguous(), torch.from_numpy(split.labels)


def parameters(build: Callable[[], nn.Module]) -> int:
    return sum(parameter.numel() for parameter in build().parameters())


# ---- words and picture ----------------------------------------------------------------------


def sentence(
    data: Dataset,
    by_share: Mapping[float, Mapping[str, Learned]],
    by_length: Mapping[str, Mapping[str, Learned]],
    moved: Mapping[str, Mapping[str, float]],
    reached: Mapping[str, int],
    steps: Mapping[str, int],
    side: int,
) -> str:
    def scores(found: Mapping[str, Learned]) -> str:
        return ", ".join(f"{name} {found[name].mean:.1%}" for name in ARMS)

    def change_of(name: str) -> str:
        return f"{moved[name]['1 pixel']:.2g} and {moved[name]['1 patch']:.2g}"

    shares = "; ".join(f"{share:.0%} of them: {scores(found)}" for share, found in by_share.items())
    few = next(iter(by_length))
    n = len(by_length[few]["ViT"].scores)
    return (
        "Moved by a pixel and by a patch, and back, features differ by "
        f"{change_of('CNN without pools, trained')} of the distance between two pictures in a CNN without "
        f"pools, {change_of('CNN, trained')} with two, {change_of('ViT, trained')} in a ViT and "
        f"{change_of('ViT without positions, trained')} in one without positions. One pixel reaches "
        f"{reached['CNN without pools']}, {reached['CNN']} and {reached['ViT']} of {side} pixels in CNNs "
        f"without and with pools and in a ViT. Accuracy on {described(data)}, no augmentation, each at its "
        f"own best rate, {n} seeds: {shares} after {steps['many']} steps; with all, after {steps[few]}: "
        f"{scores(by_length[few])}."
    )


@in_our_style
def draw(
    moved: Mapping[str, Mapping[str, float]],
    by_share: Mapping[float, Mapping[str, Learned]],
    by_length: Mapping[str, Mapping[str, Learned]],
    steps: Mapping[str, int],
) -> Figure:
    figure = canvas(9.6, 3.2)
    left, centre, right = figure.subplots(1, 3, width_ratios=[1.1, 1, 1])
    for n, shift in enumerate(("1 pixel", "1 patch")):
        places = [row + 0.36 * n for row in range(len(moved))]
        left.barh(places, [one[shift] for one in moved.values()], 0.34, color=LINES[3 + n], label=shift)
    left.set(yticks=[row + 0.18 for row in range(len(moved))], yticklabels=list(moved))
    left.tick_params(axis="y", labelsize=7)
    left.set(xlabel="1: as far as another picture", title="change of features when moved")
    left.invert_yaxis()
    lines = (
        (centre, {100 * share: found for share, found in by_share.items()}, "% of the pictures"),
        (right, {steps[length]: found for length, found in by_length.items()}, "steps, with all pictures"),
    )
    for axis, found, label in lines:
        for name, colour in zip(ARMS, LINES, strict=False):
            (line,) = axis.plot(list(found), [one[name].mean for one in found.values()], "o-", color=colour)
            line.set_label(name if axis is centre else "")  # once in the legend
            for x, one in found.items():
                scores = one[name].scores
                axis.plot([x] * len(scores), scores, "o", color=colour, alpha=0.3, markersize=3)
        axis.set(xscale="log", xlabel=label, title="held-out pictures right")
        axis.set_xticks(list(found), [f"{x:g}" for x in found])
        axis.minorticks_off()
    figure.legend(loc="outside lower center", ncols=5)
    return figure
