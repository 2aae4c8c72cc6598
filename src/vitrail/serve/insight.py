"""The data of the page's figures: one image explained, and the figures of the weights.

Everything here is JSON. Arrays are base64 of their bytes in row-major order, most of them quantized to 8
bits, which is enough for a screen. What a model does not have is {"reason": "..."} instead. Call these in the
thread that owns the model: they use hooks.
"""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.base.errors import VitrailError
from vitrail.images.normalize import normalize_batch
from vitrail.model import edit, record
from vitrail.model.device import eval_mode
from vitrail.predict.prediction import Prediction
from vitrail.serve.responses import NO_WEIGHTS, prediction_json
from vitrail.views import filters as filter_figure
from vitrail.views import positions as position_figure
from vitrail.views.attention_maps import POOL_WEIGHTS, over_all_tokens
from vitrail.views.figure_images import check_finite, check_index
from vitrail.views.rollout import (
    BLOCK_WEIGHTS,
    mixing_matrix,
    normalize_relevance,
    pooled_tokens,
    residual_weight,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from vitrail.images.preprocess import Preprocess
    from vitrail.model import ViT
    from vitrail.predict.predictor import Predictor

    Pixels = NDArray[np.uint8]

MAX_BYTES = 8 * 2**20  # of one array in a response; with more, the page would be slow


# ---- one image ------------------------------------------------------------------------------------


def explain(predictor: Predictor, pixels: Pixels, layer: int = -1, top: int = 5) -> dict[str, Any]:
    """The prediction for pixels (H, W, C), with attention, rollout and the logit lens.

    Args:
        layer: the layer whose attention to return, from 0; negative numbers count from the end.
        top: the number of classes to list.
    """
    bundle, config = predictor.require_bundle(), predictor.config
    layer = check_index("layer", layer, config.depth)
    preprocess = predictor.preprocess
    if preprocess.keeps_shape and bundle.preprocess is not None:  # its grid is that of the model's own size
        preprocess = bundle.preprocess
        pixels = preprocess.pixels(pixels)
    (prediction,) = predictor.predict_batch([("image", pixels)])
    if predictor.needs_words:
        prediction = Prediction(prediction.name, embedding=prediction.embedding, error=prediction.error)
    weights, maps, logits = trace(bundle.model, preprocess, pixels, layer)
    return {
        "prediction": prediction_json(prediction, None, top),
        "image": _as_image(pixels),
        "grid": list(config.grid),
        "patch": list(config.patch_pixels),
        "prefix": config.prefix_names,
        "layers": config.depth,
        "heads": config.heads,
        "layer": layer,
        "attention": _as_attention(weights),
        "rollout": _pack(maps),
        "lens": _as_lens(predictor, logits),
    }


def trace(
    model: ViT, preprocess: Preprocess, pixels: Pixels, layer: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """One forward pass: attention of a layer (k, T, T), rollout (L, h, w) and logits (L, K) after each layer.

    "After layer i" treats that layer as the last one: its tokens go through the model's own norm, pool and
    head (vitrail.views.lens), and rollout covers the layers so far (vitrail.views.rollout).
    """
    config, channels_first = model.config, torch.from_numpy(pixels).permute(2, 0, 1)
    images = normalize_batch(channels_first[None], preprocess, next(model.parameters()))
    row = None if config.pool == "attention" else pooled_tokens(config)[0].to(images.device)
    relevance: list[Tensor] = []  # of each token for the pooled vector, each (T,)
    flow = torch.eye(config.tokens, device=images.device)[None]  # rollout so far, (1, T, T)

    def add_block(weights: Tensor) -> Tensor:
        nonlocal flow
        flow = mixing_matrix(weights.float().mean(dim=1), residual_weight(config)) @ flow
        if row is not None:
            relevance.append(row @ flow[0])
        return weights

    def add_pool(weights: Tensor) -> Tensor:
        pool_row = over_all_tokens(weights.float().mean(dim=1)[0, 0], config)
        relevance.append(pool_row @ flow[0])
        return weights

    edits = {BLOCK_WEIGHTS: add_block} | ({POOL_WEIGHTS: add_pool} if row is None else {})
    name = f"blocks.{layer}.attention.weights"
    with eval_mode(model), edit(model, edits), record(model, name) as tape:
        layers = model.encode(images, layers=range(config.depth)).layers
        logits = torch.cat([model.head(layers[i].pooled).float() for i in range(config.depth)])
    rows = relevance[: config.depth]  # an attention pool runs once more at the end
    parts = tape[name][0].float(), torch.stack(rows)[:, config.prefix :], logits
    attention, maps, outputs = (part.cpu().numpy() for part in parts)
    check_finite("Attention weights", attention)
    check_finite("Attention weights", maps)
    return attention, normalize_relevance(maps, maps).reshape(-1, *config.grid), outputs


# ---- as JSON -------------------------------------------------------------------


def _as_image(pixels: Pixels) -> dict[str, Any]:
    """The model's input as a PNG; the mean over channels if these are not colors."""
    from PIL import Image

    C = pixels.shape[2]
    shown = pixels if C in (3, 4) else pixels.mean(axis=2).round().astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(shown).save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    return {"width": pixels.shape[1], "height": pixels.shape[0], "png": text}


def _as_attention(weights: NDArray[np.float32]) -> dict[str, Any]:
    """Weights (k, T, T) quantized so that 255 is the maximum of a row, which is in `row_max`.

    If all heads together are too large, their mean is sent instead, with a note.
    """
    k, T, _ = weights.shape
    if T * T > MAX_BYTES:
        return {"reason": f"The attention between {T:,} tokens is too large to show here."}
    note = None
    if k * T * T > MAX_BYTES:
        note = f"This is the mean over {k} heads: for {T:,} tokens, all heads are too large to show here."
        weights = weights.mean(axis=0, keepdims=True)
    row_max = weights.max(axis=2)  # (k, T)
    quantized = np.rint(255 * weights / np.maximum(row_max, np.finfo(np.float32).tiny)[..., None])
    return {
        **_pack(quantized.astype(np.uint8)),
        "row_max": [list(map(float, row)) for row in row_max],
        "note": note,
    }


def _as_lens(predictor: Predictor, logits: NDArray[np.float32]) -> list[dict[str, Any]] | dict[str, str]:
    """The prediction after each layer, scored as the final one, so that the last row equals it."""
    if predictor.needs_words:
        return {"reason": "The classes of this model are words, so there is no prediction after each layer."}
    if not predictor.scale.labels:
        return {"reason": "This model has no head, so there is no prediction after each layer."}
    if not np.isfinite(logits).all():
        return {"reason": "The logits after some layer are NaN or infinite."}
    scores = predictor.scale.compute(logits)
    return [
        {"label": predictor.scale.labels[best], "score": float(row[best])}
        for row, best in zip(scores, logits.argmax(axis=1), strict=True)
    ]


def _pack(array: NDArray[Any]) -> dict[str, Any]:
    """An array as its shape, its dtype and base64 of its little-endian bytes."""
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"shape": list(array.shape), "dtype": array.dtype.name, "data": data}


def _quantize(values: NDArray[Any], low: float, high: float) -> dict[str, Any]:
    """Values quantized to 8 bits between two bounds."""
    fraction = (values - low) / ((high - low) or 1.0)
    return {**_pack(np.rint(255 * fraction.clip(0, 1)).astype(np.uint8)), "min": low, "max": high}


# ---- the figures of the weights ---------------------------------------------------------------------


def filters(predictor: Predictor) -> dict[str, Any]:
    """The principal components of the patch embedding, 8-bit (n, P, P, 3) or (n, P, P, 1)."""
    if predictor.bundle is None:
        return {"reason": NO_WEIGHTS}
    try:
        figure = filter_figure.compute(predictor.bundle.model)
    except VitrailError as error:
        return {"reason": str(error)}
    if figure.components.shape[1] == 3:  # colors around mid gray, each tile with its own scale
        tiles = _quantize(filter_figure.as_colors(figure), 0.0, 1.0)
    else:
        shown = figure.components.mean(axis=1)[..., None]
        limit = float(np.abs(shown).max())
        tiles = _quantize(shown, -limit, limit)
    variance = [float(fraction) for fraction in figure.explained_variance]
    patch = list(figure.components.shape[2:])
    return {"patch": patch, "tiles": tiles, "variance": variance, "caption": filter_figure.caption(figure)}


def positions(predictor: Predictor) -> dict[str, Any]:
    """The similarity of the positions of every two patches, 8-bit (N, h, w)."""
    if predictor.bundle is None:
        return {"reason": NO_WEIGHTS}
    config = predictor.config
    if config.patches**2 > MAX_BYTES:
        return {"reason": f"The positions of {config.patches:,} patches are too large to show here."}
    try:
        figure = position_figure.compute(predictor.bundle.model)
    except VitrailError as error:
        return {"reason": str(error)}
    limit = float(np.abs(figure.similarity).max()) if figure.is_bias else 1.0
    shape = config.patches, *config.grid
    sentences = position_figure.describe_distance(figure), position_figure.describe_lines(figure)
    return {
        "kind": figure.position,
        "measure": f"{figure.measure} ({figure.where})" if figure.where else figure.measure,
        "grid": list(config.grid),
        "similarity": _quantize(figure.similarity.reshape(shape), -limit, limit),
        "caption": " ".join(sentences),
    }
