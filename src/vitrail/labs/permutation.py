"""Lab `permutation`: an encoder without positions does not know where its patches were."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.inspect.canvas import LINES, canvas, in_our_style
from vitrail.labs.lab import Result, Size, Verdict, pictures
from vitrail.model import ViT
from vitrail.model.tokens import cut

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "permutation"
NOTE = '000 "Breaking the equations down - 1" and 001 "Positional Embedding"'
CLAIM = (
    "Position embeddings preserve where a patch was. Without them the tokens of shuffled patches are the "
    "same tokens, shuffled, and the answer is the same."
)
TAKES = "pictures"

KINDS = ("none", "learned", "sincos1d", "sincos2d", "rotary", "pairwise", "relative")
EQUAL, MOVED = 1e-10, 1e-3


def run(place: Path, size: Size, data: str | Path | None = None) -> Result:
    count, shuffles, depth = (32, 20, 4) if size == "full" else (4, 2, 2)
    images = pictures(data, count)
    change = {kind: changes(images, kind, depth, shuffles) for kind in KINDS}
    fresh = changes(images, "pairwise", depth, shuffles, shaken=False)
    verdict = judge({kind: value for kind, (_, value) in change.items()}, change["none"][0])
    least = min(value for kind, (_, value) in change.items() if kind != "none")
    sentence = (
        f"Without positions, the class token's output changes by {change['none'][1]:.1e} of its size and "
        f"every patch's output moves with its patch to {change['none'][0]:.1e}. With any of six kinds of "
        f"positions it changes by {least:.2f} or more. A pairwise bias that is still zero changes nothing "
        f"({fresh[1]:.1e})."
    )
    return Result(
        number=change["none"][1],
        unit="of its size, the largest change of the answer when patches are shuffled without positions",
        n=count * shuffles,
        verdict=verdict,
        sentence=sentence,
        figure=draw({kind: value for kind, (_, value) in change.items()}),
        numbers={kind: {"tokens": tokens, "answer": answer} for kind, (tokens, answer) in change.items()},
    )


def judge(answer: dict[str, float], tokens: float) -> Verdict:
    if max(answer["none"], tokens) > EQUAL:
        return Verdict("does not hold", f": without positions the answer changes by {answer['none']:.1e}")
    still = [kind for kind, value in answer.items() if kind != "none" and value < MOVED]
    if still:
        return Verdict("holds if", f"positions are not {', '.join(still)}, which leave the answer as it is")
    return Verdict("holds")


def changes(
    images: Tensor, kind: str, depth: int, shuffles: int, *, shaken: bool = True
) -> tuple[float, float]:
    """How far shuffled patches are from shuffled outputs, and the class token from what it was."""
    model = build(images, kind, depth, shaken)
    chance = torch.Generator().manual_seed(1)
    tokens, answer = 0.0, 0.0
    with torch.no_grad():
        first = model.encode(images)
        for _ in range(shuffles):
            order = torch.randperm(model.config.patches, generator=chance)
            then = model.encode(shuffled(images, order, model.config))
            tokens = max(tokens, apart(then.patches.flatten(1, 2), first.patches.flatten(1, 2)[:, order]))
            answer = max(answer, apart(then.tokens[:, 0], first.tokens[:, 0]))
    return tokens, answer


def build(images: Tensor, kind: str, depth: int, shaken: bool) -> ViT:
    """A small model of pixels, in which positions matter from the first step on."""
    more: dict[str, Any] = {"position": kind}
    if kind == "learned":
        more["position_sigma"] = 1.0
    size = (images.shape[2], images.shape[3])
    patch = tuple(side // 4 for side in size)
    config = ViTConfig(
        width=48,
        depth=depth,
        heads=3,
        patch=patch,
        size=size,
        channels=images.shape[1],
        classes=0,
        remainder="cut",
        **more,
    )
    torch.manual_seed(0)
    model = ViT(config).double().eval()
    if shaken:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def shuffled(images: Tensor, order: Tensor, config: ViTConfig) -> Tensor:
    """The picture with its patches in another order."""
    (h, w), (P, Q) = config.grid, config.patch_pixels
    patches = cut(images, (P, Q))[:, order]  # (B, N, C P Q)
    patches = patches.unflatten(2, (images.shape[1], P, Q)).unflatten(1, (h, w))  # (B, h, w, C, P, Q)
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)  # (B, C, H, W)


def apart(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


@in_our_style
def draw(change: dict[str, float]) -> Figure:
    figure = canvas(6.4, 2.8)
    axis = figure.subplots()
    colours = [LINES[1] if kind == "none" else LINES[0] for kind in change]
    axis.barh(list(change), [max(value, 1e-17) for value in change.values()], color=colours)
    axis.set(xscale="log", xlim=(1e-17, 10), xlabel="largest change of the answer when patches are shuffled")
    axis.invert_yaxis()
    axis.set_title("kinds of positions")
    return figure
