"""Attention rollout through all layers, and gradient rollout for one class.

Rollout (Abnar and Zuidema 2020; ViT paper, Fig. 6) treats attention as a flow of information. In every block
a token keeps itself (the residual connection) and mixes in the tokens it attends to, so the matrices of the
blocks are multiplied:

    R = A_L ... A_1,    A_l = fused heads + I, with each row normalized to sum to 1.

It does not depend on a class. Gradient rollout (after Chefer, Gur and Wolf 2021) keeps the attention that
raises the logit of a class:

    R <- R + A_l R,    A_l = mean over heads of max(0, dlogit/dS),    A = softmax(S),    R_0 = I.

In the paper it is max(0, A dlogit/dA). A row of A sums to 1, so a constant in its gradient means nothing, but
if it is negative enough the whole map is zero, which happens with mean pooling. dlogit/dS = A (dlogit/dA -
sum of A dlogit/dA over the row) has no such constant.

The map is the row of R that the model pools: the class token, the mean over the patches, or the weights of
the attention pool times R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import InputError, printable, suggest
from vitrail.model import ViT, edit, record
from vitrail.model.config import ViTConfig
from vitrail.model.device import eval_mode
from vitrail.views.attention_maps import (
    POOL_WEIGHTS,
    color_limit,
    describe_query,
    list_tokens,
    over_all_tokens,
    query_row,
)
from vitrail.views.canvas import Figure, add_colorbar, new_figure, overlay_map, show_image, styled
from vitrail.views.figure import FigureSpec, InspectionRequest, Rows
from vitrail.views.figure_images import (
    Target,
    check_finite,
    check_images,
    check_pixels,
    check_weights_fit,
    choose_target,
    device_of,
    tell_apart,
)

Method = Literal["rollout", "gradient", "both"]
BLOCK_WEIGHTS = "blocks.*.attention.weights"


@dataclass(frozen=True, eq=False)
class Rollout:
    """Rollout maps. Each sums to 1, or is zero if the patches have no relevance."""

    methods: tuple[str, ...]
    maps: NDArray[np.float32]
    """(methods, B, h, w)."""
    prefix: NDArray[np.float32]
    """(methods, B, n): the fraction of the total relevance that each prefix token has."""
    names: tuple[str, ...]
    """The names of the n prefix tokens."""
    targets: NDArray[np.int64] | None
    """(B,): the class of the gradients."""
    to: str
    """The tokens that relevance is computed for, in words."""


def compute(model: ViT, images: Tensor, *, method: Method = "rollout", target: Target = None) -> Rollout:
    """Compute the relevance of each patch for the tokens that the model pools.

    Args:
        images: (B, C, H, W), normalized.
        target: the class for the gradients.
    """
    check_images(model, images)
    if method not in get_args(Method):
        raise InputError(f"unknown method {printable(method)!r}. {suggest(str(method), get_args(Method))}")
    config, images = model.config, images.to(device_of(model))
    pooled, description = pooled_tokens(config)
    row = None if config.pool == "attention" else pooled.to(images.device)
    methods = ("rollout", "gradient") if method == "both" else (method,)
    check_weights_fit(model, len(images), config.depth if "gradient" in methods else 1)
    results, targets = [], None
    if "rollout" in methods:
        results.append(_rollout(model, images, row))
    if "gradient" in methods:
        gradient_relevance, classes = _gradient_rollout(model, images, row, target)
        results.append(gradient_relevance)
        targets = classes.cpu().numpy()
    relevance = torch.stack(results).detach().cpu().numpy()  # (methods, B, T)
    check_finite("Attention weights", relevance)
    patches = relevance[..., config.prefix :]
    return Rollout(
        methods=methods,
        maps=normalize_relevance(patches, patches).reshape(*relevance.shape[:2], *config.grid),
        prefix=normalize_relevance(relevance[..., : config.prefix], relevance),
        names=tuple(config.prefix_names),
        targets=targets,
        to=description,
    )


def normalize_relevance(part: NDArray[np.float32], whole: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divide `part` by the sum of `whole`; zeros where that sum is zero."""
    total = whole.sum(axis=-1, keepdims=True)
    return np.divide(part, total, out=np.zeros_like(part), where=total > 0)


def pooled_tokens(config: ViTConfig) -> tuple[Tensor, str]:
    """The weight of each token in the pooled representation, (T,), and a description of the pooled tokens."""
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
            return query_row(config, "mean"), describe_query("mean")
        case "class":
            return query_row(config, "class"), describe_query("class")
        case "attention":
            return query_row(config, "pool"), "the learned query of the pool"


# ---- the two methods; row=None stands for the weights of the attention pool ------------------------


def _rollout(model: ViT, images: Tensor, row: Tensor | None) -> Tensor:
    """Rollout: (B, T). Blocks are multiplied as the model runs, so only one block's weights are in memory."""
    flow = torch.eye(model.config.tokens, device=images.device).expand(len(images), -1, -1)

    def multiply(weights: Tensor) -> Tensor:
        nonlocal flow
        flow = mixing_matrix(weights.float().mean(dim=1), residual_weight(model.config)) @ flow  # (B, T, T)
        return weights

    names = [POOL_WEIGHTS] if row is None else []
    with eval_mode(model), edit(model, {BLOCK_WEIGHTS: multiply}), record(model, *names) as tape:
        model(images)
        if row is None:
            pool_weights = tape[POOL_WEIGHTS].float().mean(dim=1)  # (B, 1, N)
            return (over_all_tokens(pool_weights, model.config) @ flow)[:, 0]
        return row @ flow


def mixing_matrix(fused: Tensor, keep: float) -> Tensor:
    """Add `keep` times the identity (the residual connection) and normalize each row to sum to 1."""
    mixed = fused + keep * torch.eye(fused.shape[-1], device=fused.device)
    return mixed / mixed.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(mixed.dtype).tiny)


def residual_weight(config: ViTConfig) -> float:
    """The weight of the identity: 1, or 0 for blocks without residual connections."""
    return 0.0 if config.block == "no-residual" else 1.0


def _gradient_rollout(
    model: ViT, images: Tensor, row: Tensor | None, target: Target
) -> tuple[Tensor, Tensor]:
    """Gradient rollout: relevance (B, T) and classes (B,).

    The identity is subtracted at the end (R - I): it is no relevance of a patch for the class token, and the
    same for all patches under mean pooling.
    """
    config = model.config
    if config.classes == 0:
        raise InputError(
            'Gradient rollout explains a class, but this model has no head; use method="rollout".'
        )
    names = [BLOCK_WEIGHTS, *([POOL_WEIGHTS] if row is None else [])]
    images = images.detach().clone().requires_grad_()  # a graph even if all parameters are frozen
    with eval_mode(model), torch.enable_grad(), record(model, *names) as tape:
        logits = model(images)
        classes = choose_target(logits, target)
        score = logits.gather(1, classes[:, None]).sum()
        weights = list(tape.values())  # in the order of the forward pass
        gradients = torch.autograd.grad(score, weights)  # does not touch the .grad of any parameter
    relevance = [_positive_part(*pair) for pair in zip(weights, gradients, strict=True)]
    flow = torch.eye(config.tokens, device=images.device).expand(len(images), -1, -1)
    for block in relevance[: config.depth]:
        flow = residual_weight(config) * flow + block.detach() @ flow  # (B, T, T)
    if row is None:
        return (over_all_tokens(relevance[-1].detach(), config) @ flow)[:, 0], classes
    return row @ flow - residual_weight(config) * row, classes


def _positive_part(weights: Tensor, gradient: Tensor) -> Tensor:
    """The positive part of the gradient with respect to the scores before softmax, mean over heads."""
    product = weights * gradient
    scores_gradient = product - weights * product.sum(dim=-1, keepdim=True)
    return scores_gradient.clamp_min(0).float().mean(dim=1)


# ---- the figure ------------------------------------------------------------------------------------


@styled
def draw(
    rollout: Rollout,
    pixels: NDArray[np.uint8],
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
) -> Figure:
    """Draw one column per image: the image, and below it one map per method."""
    check_pixels(pixels, rollout.maps.shape[1])
    count, rows = len(pixels), 1 + len(rollout.methods)
    tall = 1.3 * pixels.shape[1] / pixels.shape[2] + 0.36
    title = f"Relevance of each patch for {rollout.to}"
    figure = new_figure(max(1.35 * count + 1.2, 0.08 * len(title) + 0.5), tall * rows + 0.5, title)
    axes = figure.subplots(rows, count, squeeze=False)
    limit, label = color_limit(rollout.maps, "relevance")
    titles = tell_apart(names or [""] * count)
    for number, image in enumerate(pixels):
        show_image(axes[0, number], image)
        axes[0, number].set_title(titles[number], fontsize=7.5, parse_math=False)
        for axis, method, maps in zip(axes[1:, number], rollout.methods, rollout.maps, strict=True):
            drawn = overlay_map(axis, image, maps[number], vmax=limit)
            if method == "gradient" and rollout.targets is not None:
                target = int(rollout.targets[number])
                name = printable(classes[target], 16) if classes else f"class {target}"
                method = f"gradient\n{name}"
            axis.set_title(method, fontsize=7.5, parse_math=False)
    add_colorbar(figure, drawn, axes, label)
    return figure


def caption(rollout: Rollout) -> str:
    """Explain the maps, how concentrated they are, and how well the methods agree."""
    sentences = [
        f"Each map shows the relevance of each patch for {rollout.to}, through all layers; a map sums to 1."
    ]
    patches = rollout.maps[0, 0].size
    tenth = max(1, patches // 10)
    kinds = {
        "rollout": "Rollout (independent of the class)",
        "gradient": "Gradient rollout (for the class shown)",
    }
    for method, maps, fractions in zip(rollout.methods, rollout.maps, rollout.prefix, strict=True):
        top = np.sort(maps.reshape(-1, patches), axis=-1)[:, -tenth:].sum(axis=-1)
        prefix = f"; prefix tokens have {100 * fractions.sum(-1).mean():.1f}% of the total relevance"
        sentences.append(
            f"{kinds[method]}: the top {tenth} of {patches} patches have {100 * top.mean():.1f}% of the "
            f"relevance (uniform: {100 * tenth / patches:.1f}%){prefix if rollout.names else ''}."
        )
        if empty := int((maps.sum(axis=(-1, -2)) == 0).sum()):
            sentences.append(f"For {empty} of {len(top)} images all patches have zero relevance.")
    if len(rollout.methods) == 2:
        pairs = rollout.maps.reshape(2, -1, patches).transpose(1, 0, 2)
        values = [np.corrcoef(*pair)[0, 1] for pair in pairs if (pair.std(axis=-1) > 0).all()]
        images = f"{len(values)} image{'s' * (len(values) > 1)}"
        sentences.append(
            f"The correlation of the two maps over patches is {np.mean(values):.2f} (mean of {images})."
            if values
            else "The two maps cannot be compared, because one of them is constant."
        )
    return " ".join(sentences)


def table(rollout: Rollout) -> Rows:
    """List the fraction of each method, image and token: of the map (patches) or of the total (prefix)."""
    rows = list_tokens(
        rollout.methods, range(rollout.maps.shape[1]), rollout.names, rollout.prefix, rollout.maps
    )
    return ["method", "image", "token", "fraction"], rows


def _make(request: InspectionRequest) -> tuple[object, Figure]:
    method: Method = "both" if request.model.config.classes else "rollout"
    rollout = compute(request.model, request.drawn.images, method=method, target=request.target)
    return rollout, draw(rollout, request.drawn.pixels, request.bundle.labels, request.drawn.names)


FIGURE = FigureSpec("rollout", "Attention rollout", _make, caption, table)
