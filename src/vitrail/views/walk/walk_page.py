"""The page of `vitrail walk --html`: the answer, the four equations, and every stage of any block and head.

All stages are in the page as HTML; a small script (page.js) shows those of the chosen block and head and
draws the attention of the chosen token. Without a script the page shows what was chosen on the command line.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.images.colormap import around_zero, heat
from vitrail.views.html_page import data_uri, markup, render_template
from vitrail.views.walk.mathml import as_mathml, text_with_mathml
from vitrail.views.walk.overview import NUMBERING, paper_equations
from vitrail.views.walk.stage import format_number, summarize, token_name

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from vitrail.images.preprocess import Preprocess
    from vitrail.views.walk.encoder_stages import Recording
    from vitrail.views.walk.stage import Stage

_SCRIPT = Path(__file__).parent / "page.js"
_MAX_WEIGHTS = 6_000_000  # attention weights in a page, two bytes each; a B/16 has 5.6 million
_OF_HEAD = ("q", "k", "v", "bias", "scores", "weights", "row", "head")  # stages of one head
_SHOWN_SIDE = 192  # CSS pixels of the longer side of a small image
_SHOWN_STRIP = 14  # and the least of the shorter one
_OF_TOKEN = ("norm1.before", "norm1.standard", "norm1.after", "attention.row")
_TITLES = {
    1: "From pixels to tokens",
    2: "Attention",
    3: "MLP",
    4: "From the last block to one vector",
    None: "The head",
}


def fits_one_page(config: Any) -> bool:
    """Whether a page can hold the attention weights of all blocks and heads."""
    return bool(config.depth * config.heads * config.tokens**2 <= _MAX_WEIGHTS)


def walk_page(
    recording: Recording, facts: dict[str, Any], answer: Sequence[tuple[str, float]], *, command: str = ""
) -> str:
    """The page of a walk as HTML.

    Args:
        recording: with the activations of all blocks, or of the chosen one if they do not fit one page.
        facts: the names of model and image, weights, block, head, token and token_name; in "files", the
            paths of image and model, if any.
        answer: the most likely classes and their probabilities.
    """
    config = recording.model.config
    block, head, token = (facts[name] for name in ("block", "head", "token"))
    every = fits_one_page(config)
    shown = recording.stages(block, head, token)
    equations = paper_equations(config)
    return render_template(
        "walk.html",
        _SCRIPT.read_text(encoding="utf-8") if every else "",
        facts={"files": [], **facts},
        answer=answer,
        numbering=markup(text_with_mathml(NUMBERING)),
        equations=[(number, markup(as_mathml(text))) for number, text in equations.items()],
        titles=_TITLES,
        groups=_groups(recording, shown, block, head, token, every),
        every=every,
        choices={"block": range(config.depth), "head": range(config.heads)},
        tokens=[token_name(config, index) for index in range(config.tokens)],
        data=markup(json.dumps(_data(recording, facts) if every else {}).replace("<", "\\u003c")),
        image=data_uri(png(pixels_image(shown[0].tensor, recording.preprocess))),
        command=command,
    )


# ---- stages ---------------------------------------------------------------------------------


def _groups(
    recording: Recording, shown: list[Stage], block: int, head: int, token: int, every: bool
) -> list[tuple[int | None, list[dict[str, Any]]]]:
    """The stages by the number of their equation, each with what the template needs."""
    config = recording.model.config
    blocks, heads = (range(config.depth), range(config.heads)) if every else ([block], [head])
    images = len(blocks) * (10 + len(_OF_HEAD) * len(heads))
    max_side = 256 if images <= 100 else 128 if images <= 400 else 64
    groups: dict[int | None, list[dict[str, Any]]] = {number: [] for number in _TITLES}
    for stage in shown:
        if not stage.name.startswith("blocks."):
            groups[stage.number].append(_entry(stage, recording, 256))
    for index in blocks:
        for stage, of_head in _block_stages(recording, index, heads, token):
            entry = _entry(stage, recording, max_side)
            entry |= {
                "block": index,
                "head": of_head,
                "hidden": index != block or of_head not in (None, head),
            }
            groups[stage.number].append(entry)
    return list(groups.items())


def _block_stages(
    recording: Recording, block: int, heads: Iterable[int], token: int
) -> Iterable[tuple[Stage, int | None]]:
    """The stages of one block in their order; those of a head once for each head."""
    walks = {head: recording.stages(block, head, token) for head in heads}
    for together in zip(*walks.values(), strict=True):
        stage = together[0]
        if not stage.name.startswith(f"blocks.{block}."):
            continue
        if stage.name.startswith(tuple(f"blocks.{block}.attention.{part}" for part in _OF_HEAD)) and (
            stage.name.rpartition(".")[2] in _OF_HEAD
        ):
            yield from zip(together, walks, strict=True)
        else:
            yield stage, None


def _entry(stage: Stage, recording: Recording, max_side: int) -> dict[str, Any]:
    """What the template shows of one stage."""
    entry: dict[str, Any] = {
        "name": stage.name,
        "math": markup(as_mathml(stage.equation)),
        "meaning": markup(text_with_mathml(stage.meaning)),
        "shape": " × ".join(map(str, stage.shape)),
        "block": None,
        "head": None,
        "hidden": False,
        "of_token": next((part for part in _OF_TOKEN if stage.name.endswith(part)), ""),
        "image": None,
    }
    if stage.tensor.numel() <= 2:  # the values themselves say more than their mean
        entry["numbers"] = ", ".join(format_number(value) for value in stage.tensor.tolist())
        return entry
    entry["numbers"] = ", ".join(
        f"{name} {format_number(value)}" for name, value in summarize(stage.tensor).items()
    )
    if entry["of_token"] in ("", "attention.row"):
        entry["image"] = stage_image(stage, recording, max_side)
    return entry


# ---- data for the script --------------------------------------------------------------------


def _data(recording: Recording, facts: dict[str, Any]) -> dict[str, Any]:
    """The attention weights of all blocks and heads, and the statistics of every token around norm1."""
    import torch

    config, activations = recording.model.config, recording.activations
    rows = torch.stack([activations[f"blocks.{n}.attention.weights"] for n in range(config.depth)])
    most = rows.amax(dim=-1, keepdim=True).clamp_min(1e-12)  # (L, k, T, 1)
    codes = (rows / most * 65535).round().int().cpu().numpy().astype("<u2")
    statistics = []
    for index in range(config.depth):
        before = activations["embed" if index == 0 else f"blocks.{index - 1}.out"]
        after = activations.get(f"blocks.{index}.norm1", before)
        columns = [before.mean(-1), before.var(-1, correction=0), after.mean(-1), after.var(-1, correction=0)]
        statistics.append([[_short(value) for value in row] for row in torch.stack(columns, dim=-1).tolist()])
    return {
        **{name: facts[name] for name in ("block", "head", "token")},
        **{"prefix": config.prefix, "grid": config.grid, "heads": config.heads, "tokens": config.tokens},
        "is_plain": config.block == "pre-norm" and config.norm == "layer" and config.position_at == "start",
        "most": [_short(value) for value in most.flatten().tolist()],
        "weights": base64.b64encode(codes.tobytes()).decode(),
        "statistics": statistics,
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


# ---- tensors as images ----------------------------------------------------------------------


def stage_image(stage: Stage, recording: Recording, max_side: int) -> dict[str, Any]:
    """A stage as a data URI, its size in CSS pixels, and the values at the ends of the colors of a heat map.

    Args:
        max_side: larger tensors are averaged down to this many values along a side.
    """
    image, ends = _draw(stage, recording, max_side)
    step = max(1, math.ceil(_SHOWN_SIDE / max(image.size)))
    width, height = (max(_SHOWN_STRIP, side * step) for side in image.size)
    scale = ends and [format_number(value) for value in ends]
    kind = "signed" if ends and ends[0] < 0 else "positive"
    return {"uri": data_uri(png(image)), "width": width, "height": height, "scale": scale, "kind": kind}


def _draw(stage: Stage, recording: Recording, max_side: int) -> tuple[Image, tuple[float, float] | None]:
    """Pixels and patches as they look, attention weights of a token on the grid, the rest as a heat map."""
    config, tensor = recording.model.config, stage.tensor
    C = config.channels
    if stage.name == "pixels":
        return pixels_image(tensor, recording.preprocess), None
    (h, w), (height, width) = config.grid, config.patch_pixels
    if stage.name == "tokens.cut" and tensor.shape[1] == C * height * width:
        gap = max(1, min(height, width) // 8)
        sheet = tensor.new_full(
            (C, h * (height + gap) - gap, w * (width + gap) - gap), math.inf
        )  # white gaps
        for index, patch in enumerate(tensor):
            top, left = index // w * (height + gap), index % w * (width + gap)
            sheet[:, top : top + height, left : left + width] = patch.reshape(C, height, width)
        return pixels_image(sheet, recording.preprocess), None
    if stage.name.endswith("attention.row"):
        return _heat_map(tensor[config.prefix :].reshape(h, w), max_side)
    if tensor.ndim == 3:  # feature maps of a stem: their mean over the channels
        return _heat_map(tensor.mean(0), max_side)
    return _heat_map(tensor if tensor.ndim == 2 else tensor[None], max_side)


def pixels_image(values: Tensor, preprocess: Preprocess | None) -> Image:
    """(C, H, W) as the RGB or grayscale image that it was before mean and std; infinity is white."""
    from PIL import Image

    mean, std = (0.5, 0.5) if preprocess is None else (preprocess.mean, preprocess.std)
    shift, factor = (values.new_tensor(one).reshape(-1, 1, 1) for one in (mean, std))
    pixels = ((values * factor + shift).clamp(0, 1) * 255).round().byte()
    if len(pixels) == 3:
        return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    return Image.fromarray(pixels[0].numpy())


def _heat_map(matrix: Tensor, max_side: int) -> tuple[Image, tuple[float, float]]:
    """A matrix in colors, and the values at their ends: around 0 if it has negative values."""
    import torch
    from PIL import Image
    from torch.nn.functional import adaptive_avg_pool2d

    matrix = torch.nan_to_num(matrix.float())
    rows, columns = (min(side, max_side) for side in matrix.shape)
    matrix = adaptive_avg_pool2d(matrix[None, None], (rows, columns))[0, 0]
    low, high = float(matrix.min()), float(matrix.max())
    if low < 0:
        low, high = -max(-low, high), max(-low, high)
    pixels = ((matrix - low) / max(high - low, 1e-12) * 255).round().byte()
    image = Image.fromarray(pixels.numpy())
    colors = around_zero if low < 0 else heat
    image.putpalette([part for value in range(256) for part in colors(value / 255)])  # one byte per pixel
    return image, (low, high)


def png(image: Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
