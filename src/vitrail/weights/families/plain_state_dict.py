"""The config of a plain state dict of ours, as `torch.save(model.state_dict(), "x.pth")` writes it.

Such a file has our names but no description. Shapes show most fields; the number of heads follows from the
width if it is a published one. What nothing shows is asked for, or assumed with a note.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vitrail.base.errors import ConfigError, setting
from vitrail.base.fields import per_axis, short_repr
from vitrail.model.config import STEM_STRIDES, ViTConfig
from vitrail.model.presets import SIZES
from vitrail.weights.families.family import Detection, Family, KeyMap
from vitrail.weights.families.infer import find_grid, shape_fields
from vitrail.weights.families.layout import Shape
from vitrail.weights.families.match import FamilyMatch

STATE_DICT = Family(
    "state-dict",
    "vitrail",
    "the state dict of a vitrail model",
    detect=Detection(anchors=("{w}tokens.proj.weight", "{w}blocks.0.attention.qkv.weight")),
    keys=KeyMap(own=True),
)
_ASSUMED = ("heads", "pool", "activation", "block", "eps")  # what users most often change of the unseen


def infer_own_config(match: FamilyMatch, overrides: Mapping[str, Any]) -> tuple[ViTConfig, list[str]]:
    """The config of a state dict of ours, and a note on what is assumed."""
    shapes = match.shapes
    if len(shapes["tokens.proj.weight"]) != 4 or overrides.get("input", "image") != "image":
        raise ConfigError(
            "A plain state dict is read for models of images only; save this one with "
            'vt.Bundle(model=model).save("x.safetensors"), which stores its config.'
        )
    certain = {name: value for name, value in overrides.items() if name not in ("channels", "patch")}
    _count_prefix(match, overrides)
    fields = {**shape_fields(match), **_own_fields(shapes), **certain}
    if fields["mlp_width"] == 4 * fields["width"]:
        fields["mlp_width"] = None  # the default, as vitrail.create leaves it
    heads, note = _heads(shapes, fields, overrides)
    fields |= heads
    fields |= _position(match, fields, overrides)
    config = ViTConfig(**fields | _pool(shapes, fields, overrides))
    assumed = [name for name in _ASSUMED if name not in overrides and (name != "heads" or note)]
    values = ", ".join(f"{name}={short_repr(getattr(config, name))}" for name in assumed)
    return config, [
        f"A plain state dict holds no config; assumed: {values}. If the model was built with others, give "
        'them. bundle.save("x.safetensors") stores them in the file.'
    ]


def _count_prefix(match: FamilyMatch, overrides: Mapping[str, Any]) -> None:
    """Which tokens the rows of `prefix` are: class, distillation, registers, in this order."""
    count = match.shapes.get("prefix", (0,))[0]
    tokens = {
        "class": int(overrides.get("class_token", count > 0)),
        "distillation": int(overrides.get("distillation_token", "head.classes.weight" in match.shapes)),
    }
    match.prefix.update(tokens, registers=max(count - sum(tokens.values()), 0))


def _own_fields(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """The fields that only our own names show."""
    width = shapes["tokens.proj.weight"][0]
    fields: dict[str, Any] = {
        "mlp_hidden": 1 + sum(f"blocks.0.mlp.middle.{i}.weight" in shapes for i in range(100)),
        "pool_norm": "before",
    }
    if "tokens.fc.weight" in shapes:
        fields["embedding"] = "mlp"
    if "tokens.stem.conv1.weight" in shapes and "tokens.stem.norm1.running_mean" not in shapes:
        sides = shapes["tokens.proj.weight"][2:]
        fields["patch"] = tuple(STEM_STRIDES["conv"] * side for side in sides)
        fields |= {"embedding": "conv", "channels": shapes["tokens.stem.conv1.weight"][1]}
    if "blocks.0.norm1.weight" not in shapes:
        fields["norm"] = "none"
    elif "norm.weight" not in shapes:
        fields["pool_norm"] = "none"
    elif shapes["norm.weight"] != (width,):
        fields["pool_norm"] = "after"
    return fields


def _heads(
    shapes: Mapping[str, Shape], fields: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """The number of heads and their width, and whether they are assumed from the width."""
    width = fields["width"]
    inner = shapes["blocks.0.attention.qkv.weight"][0] // 3
    published = {size.width: size.heads for size in SIZES.values()}
    assumed = False
    if overrides.get("heads") is not None:
        heads = fields["heads"]
    elif "blocks.0.attention.bias.table" in shapes:
        heads = shapes["blocks.0.attention.bias.table"][0]
    elif "blocks.0.attention.q_norm.weight" in shapes:
        heads = inner // shapes["blocks.0.attention.q_norm.weight"][0]
    elif inner == width and width in published:
        heads, assumed = published[width], True
    else:
        raise ConfigError(
            f"The tensors do not show the number of heads, and no published model has the width {width}; "
            f"give it: {setting('heads', ...)}."
        )
    if not isinstance(heads, int) or heads < 1 or inner % heads:
        raise ConfigError(f"heads={short_repr(heads)} does not divide the attention width {inner}.")
    return {"heads": heads, "head_width": None if inner == width else inner // heads}, assumed


def _position(match: FamilyMatch, fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The position scheme, and the size that its tensors are for."""
    shapes, sizes = match.shapes, [overrides["size"]] if "size" in overrides else []
    if "position.table" in shapes:
        return find_grid(shapes["position.table"], fields, match, sizes)
    down, across = per_axis("patch", fields["patch"], ("height", "width"))
    n = sum(match.prefix.values())
    if "position.down" in shapes:
        h, w = shapes["position.down"][0], shapes["position.across"][0]
        front = shapes.get("position.front", (0,))[0]
        rows = "all" if front == n else "class" if front == 1 else "patches"
        return {"position": "learned2d", "size": (h * down, w * across), "rows": rows}
    if "blocks.0.attention.bias.table" in shapes:
        table = shapes["blocks.0.attention.bias.table"]
        position = "pairwise" if len(table) == 3 else "relative"

        def fits(h: int, w: int) -> bool:
            rows = n + h * w if position == "pairwise" else (2 * h - 1) * (2 * w - 1) + (3 if n else 0)
            return rows == table[-1]

        given = [per_axis("size", size, ("H", "W")) for size in sizes]
        grids = [(height // down, width // across) for height, width in given]
        for h, w in [*grids, *((side, side) for side in range(1, math.isqrt(table[-1]) + 1))]:
            if fits(h, w):
                return {"position": position, "size": (h * down, w * across)}
    missing = [name for name in ("position", "size") if name not in overrides]
    if missing and "blocks.0.attention.bias.table" not in shapes:
        examples = {"position": "sincos2d", "size": 128}
        raise ConfigError(
            "The file holds no learned positions, so they are sincos2d, sincos1d, rotary, rotary-dinov3 or "
            f"none; give {' and '.join(missing)}, such as "
            f"{' and '.join(setting(name, examples[name]) for name in missing)}."
        )
    if missing:
        raise ConfigError("The patch grid is not a square; give size=(H, W) as the model was built.")
    return {}


def _pool(
    shapes: Mapping[str, Shape], fields: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Pool and head, where the shapes of the head show more than its names."""
    if "head.fc2.weight" in shapes and "head" not in overrides:
        raise ConfigError("The head has two layers; give head=mlp, tanh or cosine, what is between.")
    layer = next((n for n in ("head.weight", "head.fc1.weight") if n in shapes), None)
    if layer is None or "pool" in overrides:
        return {}
    size, patch = (per_axis(name, fields[name], ("H", "W")) for name in ("size", "patch"))
    patches = math.prod(side // step for side, step in zip(size, patch, strict=True))
    flat = patches > 2 and shapes[layer][1] == patches * fields["width"]
    return {"pool": "flatten"} if flat else {}
