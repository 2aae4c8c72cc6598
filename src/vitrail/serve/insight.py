"""What the page shows of a model at work: one picture explained, and the figures of its weights.

Everything here is plain data that JSON takes. Arrays travel as base64 of their bytes, row by row, and most
of them as 8-bit levels: a screen shows no more. What a model does not have is {"reason": "..."} instead.
Run these on the thread that owns the model: they hang hooks into it.
"""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import pad

from vitrail.errors import InputError, VitrailError
from vitrail.evaluation.forward import inputs_of
from vitrail.inspect import filters as filter_figure
from vitrail.inspect import positions as position_figure
from vitrail.inspect.attention import POOL, prefix_names
from vitrail.inspect.pictures import check_finite, check_number
from vitrail.inspect.rollout import BLOCKS, fuse, kept, mixing, pooled, shares
from vitrail.model import edit, record
from vitrail.model.modes import evaluating
from vitrail.serve.answers import prediction

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from vitrail.model import ViT
    from vitrail.predict.predictor import Predictor
    from vitrail.preprocess import Preprocess

    Levels = NDArray[np.uint8]

MOST_BYTES = 8 * 2**20  # of one array in an answer: with more the page would be slow
NO_WEIGHTS = "An ONNX file gives answers only; to look inside, serve the model's .safetensors file."


def reason_against(predictor: Predictor) -> str | None:
    """Why this model's answers cannot be explained; None where they can."""
    return NO_WEIGHTS if predictor.bundle is None else None


# ---- one picture ------------------------------------------------------------------------------------


def explain(predictor: Predictor, levels: Levels, layer: int = -1, top: int = 5) -> dict[str, Any]:
    """The answer for levels (H, W, C), and what the model did on its way there.

    Args:
        layer: whose attention is wanted, from 0; a negative one counts from the end.
        top: how many classes with their scores.
    """
    bundle, config = predictor.bundle, predictor.config
    if bundle is None:
        raise InputError("Explaining needs the model's weights.", "an ONNX file", "Serve its .safetensors.")
    layer = check_number("layer", layer, config.depth)
    (found,) = predictor.answer([("picture", levels)])
    weights, flows, logits = follow(bundle.model, predictor.preprocess, levels, layer)
    return {
        "prediction": prediction(found, None, top),
        "picture": as_picture(levels),
        "grid": list(config.grid),
        "patch": list(config.patch_pixels),
        "prefix": list(prefix_names(config)),
        "layers": config.depth,
        "heads": config.heads,
        "layer": layer,
        "attention": as_attention(weights),
        "rollout": packed(flows),
        "lens": as_lens(predictor, logits),
    }


def follow(
    model: ViT, preprocess: Preprocess, levels: Levels, layer: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """One pass: attention of a layer (k, T, T), rollout (L, h, w) and logits (L, K) after every layer.

    What comes "after layer i" is read as if that layer were the last: by the model's own norm, pool and
    head (vitrail.inspect.lens), and by rollout through the layers so far (vitrail.inspect.rollout).
    """
    config, channels_first = model.config, torch.from_numpy(levels).permute(2, 0, 1)
    images = inputs_of(channels_first[None], preprocess, next(model.parameters()))
    row = None if config.pool == "attention" else pooled(config)[0].to(images.device)
    reached: list[Tensor] = []  # how much of each token is in what the answer is read from, each (T,)
    flow = torch.eye(config.tokens, device=images.device)[None]  # what each token is made of, (1, T, T)

    def mix(weights: Tensor) -> Tensor:
        nonlocal flow
        flow = mixing(fuse(weights.float(), "mean"), kept(config)) @ flow
        if row is not None:
            reached.append(row @ flow[0])
        return weights

    def read(weights: Tensor) -> Tensor:
        seen = pad(fuse(weights.float(), "mean")[0, 0], (config.prefix, 0))  # the attention pool's own row
        reached.append(seen @ flow[0])
        return weights

    edits = {BLOCKS: mix} | ({POOL: read} if row is None else {})
    name = f"blocks.{layer}.attention.weights"
    with evaluating(model), edit(model, edits), record(model, name) as tape:
        layers = model.encode(images, layers=range(config.depth)).layers
        logits = torch.cat([model.head(layers[i].pooled).float() for i in range(config.depth)])
    patches = torch.stack(reached[: config.depth])[:, config.prefix :]  # a pool reads once more at the end
    attention, maps, answers = (part.cpu().numpy() for part in (tape[name][0].float(), patches, logits))
    check_finite("Attention weights", attention)
    check_finite("Attention weights", maps)
    return attention, shares(maps, maps).reshape(-1, *config.grid), answers


# ---- its parts as JSON takes them -------------------------------------------------------------------


def as_picture(levels: Levels) -> dict[str, Any]:
    """What the model saw, as a PNG; of channels that are no colours, the mean."""
    from PIL import Image

    C = levels.shape[2]
    shown = levels if C in (3, 4) else levels.mean(axis=2).round().astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(shown).save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    return {"width": levels.shape[1], "height": levels.shape[0], "png": text}


def as_attention(weights: NDArray[np.float32]) -> dict[str, Any]:
    """Weights (k, T, T) as levels; 255 is the largest of a row, and `most` says what that is.

    Where the heads together are too much for a page, it gets their mean, and is told so.
    """
    k, T, _ = weights.shape
    if T * T > MOST_BYTES:
        return {"reason": f"Attention between {T:,} tokens is too much to send to a page."}
    note = None
    if k * T * T > MOST_BYTES:
        note = f"The mean over {k} heads: all of them, for {T:,} tokens, are too much to send to a page."
        weights = weights.mean(axis=0, keepdims=True)
    most = weights.max(axis=2)  # (k, T)
    levels = np.rint(255 * weights / np.maximum(most, np.finfo(np.float32).tiny)[..., None])
    return {**packed(levels.astype(np.uint8)), "most": [list(map(float, row)) for row in most], "note": note}


def as_lens(predictor: Predictor, logits: NDArray[np.float32]) -> list[dict[str, Any]] | dict[str, str]:
    """The answer after each layer, with the scores' own scale, so that the last is the prediction's."""
    if not predictor.scale.labels:
        return {"reason": "This model has no classes, so no layer has an answer."}
    if not np.isfinite(logits).all():
        return {"reason": "After some layer the answer is not a number."}
    scores = predictor.scale.scores(logits)
    return [
        {"label": predictor.scale.labels[best], "score": float(row[best])}
        for row, best in zip(scores, logits.argmax(axis=1), strict=True)
    ]


def packed(array: NDArray[Any]) -> dict[str, Any]:
    """An array as its shape, its dtype and base64 of its bytes, the lowest first."""
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"shape": list(array.shape), "dtype": array.dtype.name, "data": data}


def as_levels(values: NDArray[Any], least: float, most: float) -> dict[str, Any]:
    """Numbers as 8-bit levels between two of them."""
    place = (values - least) / ((most - least) or 1.0)
    return {**packed(np.rint(255 * place.clip(0, 1)).astype(np.uint8)), "least": least, "most": most}


# ---- the figures of the weights ---------------------------------------------------------------------


def filters(predictor: Predictor) -> dict[str, Any]:
    """The patterns that the patch embedding is made of, (n, P, P, 3) or (n, P, P, 1) levels."""
    if predictor.bundle is None:
        return {"reason": NO_WEIGHTS}
    try:
        found = filter_figure.compute(predictor.bundle.model)
    except VitrailError as error:
        return {"reason": str(error)}
    if found.components.shape[1] == 3:  # colours around mid grey, each tile in its own scale
        tiles = as_levels(filter_figure.as_colours(found), 0.0, 1.0)
    else:
        shown = found.components.mean(axis=1)[..., None]
        limit = float(np.abs(shown).max())
        tiles = as_levels(shown, -limit, limit)
    share = [float(one) for one in found.share]
    patch = list(found.components.shape[2:])
    return {"patch": patch, "tiles": tiles, "share": share, "caption": filter_figure.caption(found)}


def positions(predictor: Predictor) -> dict[str, Any]:
    """How alike the positions of every two patches are: (N, h, w) levels between two numbers."""
    if predictor.bundle is None:
        return {"reason": NO_WEIGHTS}
    config = predictor.config
    if config.patches**2 > MOST_BYTES:
        return {"reason": f"Positions of {config.patches:,} patches are too much to send to a page."}
    try:
        found = position_figure.compute(predictor.bundle.model)
    except VitrailError as error:
        return {"reason": str(error)}
    biased = found.measure == position_figure.MEASURES["bias"]
    limit = float(np.abs(found.similarity).max()) if biased else 1.0
    shape = config.patches, *config.grid
    words = position_figure.verdict_on_distance(found), position_figure.verdict_on_lines(found)
    return {
        "kind": found.position,
        "measure": f"{found.measure} ({found.where})" if found.where else found.measure,
        "grid": list(config.grid),
        "similarity": as_levels(found.similarity.reshape(shape), -limit, limit),
        "caption": " ".join(words),
    }
