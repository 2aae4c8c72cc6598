"""What reached the answer through all layers: attention rollout, and its version for one class.

Rollout (Abnar and Zuidema 2020; paper, Fig. 6) takes attention for a flow: in every block a token keeps
itself (the residual) and mixes in what it looks at, so the blocks' matrices are multiplied,

    R = A_L ... A_1,    A_l = rows of (heads fused + I), each row made to sum to 1.

It knows no class. Gradient rollout (Chefer, Gur and Wolf 2021) weighs each attention weight with how
much the class's logit would grow with it, and keeps what speaks for the class:

    R <- R + A_l R,    A_l = mean over heads of max(0, dlogit/dA * A),    R_0 = I.

Read off is the row of what the model pools: the class token, the mean over the patches, or the attention
pool's own weights times R. Run it: `python -m vitrail.inspect.rollout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.config import ViTConfig
from vitrail.errors import InputError, printable, suggest
from vitrail.inspect.attention import (
    POOL,
    Query,
    colour_limit,
    prefix_names,
    query_row,
    query_words,
)
from vitrail.inspect.canvas import bar, canvas, in_our_style, lay_over, show_picture
from vitrail.inspect.pictures import (
    check_finite,
    check_pictures,
    check_pixels,
    check_weights_fit,
    device_of,
)
from vitrail.model import ViT, edit, record
from vitrail.model.modes import evaluating

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

Method = Literal["rollout", "gradient", "both"]
Heads = Literal["mean", "max", "min"]
BLOCKS = "blocks.*.attention.weights"


@dataclass(frozen=True, eq=False)
class Rollout:
    """Each map sums to 1, or is zero where nothing reached the patches."""

    methods: tuple[str, ...]
    maps: NDArray[np.float32]
    """(methods, B, h, w)."""
    prefix: NDArray[np.float32]
    """(methods, B, n): the share of the whole that went to each token before the patches."""
    names: tuple[str, ...]
    """Of those n tokens."""
    targets: NDArray[np.int64] | None
    """(B,): the class that the gradients are of."""
    to: str
    """Whose row this is, in words."""
    heads: str
    discard: float


def compute(
    model: ViT,
    images: Tensor,
    *,
    method: Method = "rollout",
    heads: Heads = "mean",
    discard: float = 0.0,
    to: Query = "auto",
    target: int | Tensor | None = None,
) -> Rollout:
    """How much of each patch reached what the model reads its answer from.

    Args:
        images: (B, C, H, W), normalised.
        method: "rollout", "gradient", or both side by side.
        heads: how rollout fuses the heads of a block.
        discard: in rollout, the share of the smallest weights that every row goes without, from 0 to
            below 1. Counted and dropped among the patches only: what class token and registers have
            gathered would be lost with their weights.
        to: "auto" for what the model pools; or a query as in attention.py.
        target: the class for the gradients, one or one for each picture; the most likely when not given.
    """
    check_pictures(model, images)
    check_choice("method", method, get_args(Method))
    check_choice("heads", heads, get_args(Heads))
    if not 0 <= discard < 1:
        raise InputError("discard must be a share from 0 to below 1.", printable(discard), "Use 0.9 or less.")
    config, images = model.config, images.to(device_of(model))
    row, words = pooled(config) if to == "auto" else (query_row(config, to), query_words(to))
    row = row.to(images.device)
    by_pool = to == "pool" or (to == "auto" and config.pool == "attention")
    methods = ("rollout", "gradient") if method == "both" else (method,)
    check_weights_fit(model, len(images), config.depth if "gradient" in methods else 1)
    reached, targets = [], None
    if "rollout" in methods:
        reached.append(roll(model, images, None if by_pool else row, heads, discard))
    if "gradient" in methods:
        relevance, classes = roll_gradients(model, images, None if by_pool else row, target)
        reached.append(relevance)
        targets = classes.cpu().numpy()
    found = torch.stack(reached).detach().cpu().numpy()  # (methods, B, T)
    check_finite("Attention weights", found)
    patches = found[..., config.prefix :]
    return Rollout(
        methods=methods,
        maps=shares(patches, patches).reshape(*found.shape[:2], *config.grid),
        prefix=shares(found[..., : config.prefix], found),
        names=prefix_names(config),
        targets=targets,
        to=words,
        heads=heads,
        discard=discard,
    )


def check_choice(name: str, choice: str, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        raise InputError(
            f"{name} must be a word from its list.", printable(choice), suggest(str(choice), choices)
        )


def shares(part: NDArray[np.float32], whole: NDArray[np.float32]) -> NDArray[np.float32]:
    """The part over the sum of the whole; zeros where the whole is nothing."""
    total = whole.sum(axis=-1, keepdims=True)
    return np.divide(part, total, out=np.zeros_like(part), where=total > 0)


# ---- what the model pools --------------------------------------------------------------------------


def pooled(config: ViTConfig) -> tuple[Tensor, str]:
    """How much each token counts where the model reads its answer, (T,); and what that is, in words."""
    match config.pool:
        case "class" if config.head == "distilled":
            both = query_row(config, "class") + query_row(config, "distillation")
            return both / 2, "the class and the distillation token"
        case "class-mean":
            both = query_row(config, "class") + query_row(config, "mean")
            return both / 2, "the class token and the mean of all patches"
        case "mean-all":
            return torch.full((config.tokens,), 1 / config.tokens), "the mean of all tokens"
        case "mean" | "flatten":
            return query_row(config, "mean"), query_words("mean")
        case "class":
            return query_row(config, "class"), query_words("class")
        case "attention":
            return query_row(config, "pool"), "the learned query of the pool"


# ---- the two methods; a row of None is the attention pool's own ------------------------------------


def roll(model: ViT, images: Tensor, row: Tensor | None, heads: Heads, discard: float) -> Tensor:
    """Rollout: (B, T). The product grows while the model runs, so one block's weights are kept at a time."""
    flow: Tensor | None = None

    def multiply(weights: Tensor) -> Tensor:
        nonlocal flow
        step = mixing(
            drop_small(fuse(weights.float(), heads), model.config.prefix, discard), kept(model.config)
        )
        flow = step if flow is None else step @ flow  # (B, T, T)
        return weights

    names = [POOL] if row is None else []
    with evaluating(model), edit(model, {BLOCKS: multiply}), record(model, *names) as tape:
        model(images)
        assert flow is not None  # a model has a block or more
        if row is None:
            seen = fuse(tape[POOL].float(), heads)  # (B, 1, N)
            return (pad(seen, (model.config.prefix, 0)) @ flow)[:, 0]
        return row @ flow


def fuse(weights: Tensor, heads: Heads) -> Tensor:
    """(B, k, T, T) to (B, T, T)."""
    match heads:
        case "mean":
            return weights.mean(dim=1)
        case "max":
            return weights.amax(dim=1)
        case "min":
            return weights.amin(dim=1)


def drop_small(fused: Tensor, prefix: int, discard: float) -> Tensor:
    """Every row without the `discard` share of its smallest weights on patches."""
    patches = fused[..., prefix:]
    order = patches.argsort(dim=-1, stable=True)[..., : int(discard * patches.shape[-1])]
    return torch.cat([fused[..., :prefix], patches.scatter(-1, order, 0.0)], dim=-1)


def mixing(fused: Tensor, keep: float) -> Tensor:
    """What each token is made of after a block: itself and what it looked at, each row summing to 1."""
    mixed = fused + keep * torch.eye(fused.shape[-1], device=fused.device)
    return mixed / mixed.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(mixed.dtype).tiny)


def kept(config: ViTConfig) -> float:
    """How much of itself a token takes along: all of it, but nothing in a block without residual."""
    return 0.0 if config.block == "no-residual" else 1.0


def roll_gradients(
    model: ViT, images: Tensor, row: Tensor | None, target: int | Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradient rollout: (B, T), and the classes (B,).

    What a token brought along itself is taken out at the end (R - I): a class token's own is no patch,
    and over the mean of all patches it would be the same everywhere.
    """
    config = model.config
    names = [BLOCKS, *([POOL] if row is None else [])]
    images = images.detach().clone().requires_grad_()  # a graph, even where all parameters are frozen
    with evaluating(model), torch.enable_grad(), record(model, *names) as tape:
        logits = model(images)
        classes = check_target(config, logits, target)
        score = logits.gather(1, classes[:, None]).sum()
        weights = list(tape.values())  # in the order they arose
        gradients = torch.autograd.grad(score, weights)  # leaves every parameter's .grad alone
    parts = [
        (one * gradient).clamp_min(0).float().mean(dim=1)
        for one, gradient in zip(weights, gradients, strict=True)
    ]
    flow = torch.eye(config.tokens, device=images.device).expand(len(images), -1, -1)
    for part in parts[: config.depth]:
        flow = kept(config) * flow + part.detach() @ flow  # (B, T, T)
    if row is None:
        return (pad(parts[-1].detach(), (config.prefix, 0)) @ flow)[:, 0], classes
    return row @ flow - kept(config) * row, classes


def check_target(config: ViTConfig, logits: Tensor, target: int | Tensor | None) -> Tensor:
    """The class to explain, for each picture: (B,)."""
    if config.classes == 0:
        raise InputError(
            "Gradient rollout explains a class.", "a model without a head", 'Use method="rollout".'
        )
    if target is None:
        return logits.argmax(dim=1)
    classes = torch.as_tensor(target, device=logits.device)
    fits = classes.ndim == 0 or classes.shape == logits.shape[:1]
    if classes.is_floating_point() or not fits or not ((classes >= 0) & (classes < config.classes)).all():
        must = f"target must be a class from 0 to {config.classes - 1}, or one for each picture."
        raise InputError(must, printable(target), "Leave it out for the most likely class.")
    return classes.long().expand(len(logits))


# ---- the figure ------------------------------------------------------------------------------------


@in_our_style
def draw(found: Rollout, pixels: NDArray[np.uint8]) -> Figure:
    """A column for each picture: the picture, below it one map for each method."""
    check_pixels(pixels, found.maps.shape[1])
    count, rows = len(pixels), 1 + len(found.methods)
    tall = 1.3 * pixels.shape[1] / pixels.shape[2] + 0.27
    title = f"What reached {found.to}"
    figure = canvas(max(1.35 * count + 1.2, 0.08 * len(title) + 0.5), tall * rows + 0.5, title)
    axes = figure.subplots(rows, count, squeeze=False)
    limit, label = colour_limit(found.maps, "share of the map")
    for number, picture in enumerate(pixels):
        show_picture(axes[0, number], picture)
        for place, method in enumerate(found.methods):
            axis = axes[1 + place, number]
            image = lay_over(axis, picture, found.maps[place, number], most=limit)
            axis.set_title(method, fontsize=7.5)
            if method == "gradient" and found.targets is not None:
                axis.set_title(f"gradient, class {found.targets[number]}", fontsize=7.5)
    bar(figure, image, axes, label)
    return figure


def caption(found: Rollout) -> str:
    """How to read the maps, how uneven they are, and how far the methods agree."""
    sentences = [
        f"Each map shows how much each patch counts in what reached {found.to} through all layers; a map "
        "sums to 1."
    ]
    patches = found.maps[0, 0].size
    tenth = max(1, patches // 10)
    for place, method in enumerate(found.methods):
        flat = np.sort(found.maps[place].reshape(-1, patches), axis=-1)[:, -tenth:].sum(axis=-1)
        about = "the same for every class" if method == "rollout" else "for the class named"
        went = (
            f"; {100 * found.prefix[place].sum(-1).mean():.1f}% of the whole went to other tokens"
            if found.names
            else ""
        )
        sentences.append(
            f"{method.capitalize()}, {about}: the brightest {tenth} of {patches} patches hold "
            f"{100 * flat.mean():.1f}% (an even map: {100 * tenth / patches:.1f}%){went}."
        )
        empty = int((found.maps[place].sum(axis=(-1, -2)) == 0).sum())
        if empty:
            sentences.append(
                f"In {empty} of {len(flat)} pictures nothing reached the patches: those maps are empty."
            )
    if len(found.methods) == 2:
        sentences.append(agreement(found))
    return " ".join(sentences)


def agreement(found: Rollout) -> str:
    """The correlation of the two maps over patches, where both have one."""
    pairs = found.maps.reshape(2, found.maps.shape[1], -1).transpose(1, 0, 2)
    # Of the 2 x 2 correlations all but the one we want are 1.
    values = [np.corrcoef(*pair).min() for pair in pairs if (pair.std(axis=-1) > 0).all()]
    if not values:
        return "The two cannot be compared: one of them is the same everywhere."
    over = f"{len(values)} picture{'s' * (len(values) > 1)}"
    return f"Over the patches the two correlate at {np.mean(values):.2f} (mean of {over})."


def table(found: Rollout) -> tuple[list[str], list[list[object]]]:
    """A row for each method, picture and token; patches as shares of the map, prefix tokens of the whole."""
    w = found.maps.shape[-1]
    tokens = [*found.names, *(f"patch {n // w},{n % w}" for n in range(found.maps[0, 0].size))]
    flat = np.concatenate([found.prefix, found.maps.reshape(*found.maps.shape[:2], -1)], axis=-1)
    rows: list[list[object]] = [
        [method, picture, token, float(flat[place, picture, n])]
        for place, method in enumerate(found.methods)
        for picture in range(flat.shape[1])
        for n, token in enumerate(tokens)
    ]
    return ["method", "picture", "token", "share"], rows


if __name__ == "__main__":
    from vitrail.inspect.sample import sample_model, sample_pictures, show

    def make() -> tuple[Figure, str]:
        pictures = sample_pictures(8)
        found = compute(sample_model().model, pictures.images, method="both")
        return draw(found, pictures.pixels), caption(found)

    show("rollout", make)
