"""The config of a model, inferred from the shapes of its tensors.

Shapes show most of it. The rest (heads, activation, eps, block type) comes, in this order, from the user,
from the file's own settings, and from the family's profile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vitrail.base.errors import ConfigError
from vitrail.base.fields import as_integer, per_axis
from vitrail.model.config import POSITIONS, ViTConfig
from vitrail.weights.families.layout import Shape
from vitrail.weights.families.match import FamilyMatch

# Heads are 64 wide except in So400m, H, g, G and e, which have 16 heads.
_HEAD_WIDTHS = {1152: 72, 1280: 80, 1408: 88, 1664: 104, 1792: 112}
_ROWS = ("all", "class", "patches")  # which tokens have a row in the position table


def infer_config(
    match: FamilyMatch, settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[ViTConfig, list[str]]:
    """The config of the model in a file, and a note for each assumption.

    Args:
        settings: fields from the file's own settings, such as a config.json.
        overrides: fields from the user, which take precedence. A size that does not fit the stored
            positions is not an override: it is what to resize to.
    """
    chosen = match.family.profile.choose(match)
    _check_heads(chosen, overrides)
    # The shapes show channels and patch; flat patches have been read with the user's. Where the user's
    # differ, the model is changed to them later.
    certain = {name: value for name, value in overrides.items() if name not in ("channels", "patch")}
    fields = {**shape_fields(match), **match.family.profile.fields, **chosen, **settings, **certain}
    heads, note = _heads(match, fields)
    fields.update(heads)
    sizes = [one["size"] for one in (settings, overrides, fields) if one.get("size") is not None]
    fields.update(find_grid(match.shapes.get("position.table"), fields, match, sizes))
    return ViTConfig(**fields), [*match.notes, *[note] * bool(note)]


def _check_heads(chosen: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Some files have an axis for the heads. There, their number cannot be overridden."""
    for name in ("heads", "head_width"):
        if overrides.get(name, chosen.get(name)) != chosen.get(name, overrides.get(name)):
            raise ConfigError(
                f"{name}={overrides[name]} contradicts the shapes in the file, which have {chosen[name]}; "
                f"leave out {name}."
            )


def shape_fields(match: FamilyMatch) -> dict[str, Any]:
    """The fields that the shapes show."""
    shapes, prefix = match.shapes, match.prefix
    width, channels, *patch = shapes["tokens.proj.weight"]
    fields: dict[str, Any] = {
        "width": width,
        "depth": match.depth,
        "channels": channels,
        "patch": tuple(patch),
        "embedding_bias": "tokens.proj.bias" in shapes,
        "class_token": prefix.get("class", 0) > 0,
        "distillation_token": prefix.get("distillation", 0) > 0,
        "registers": prefix.get("registers", 0),
        "norm_pre": "norm_pre.weight" in shapes,
        "position": "learned" if "position.table" in shapes else "none",
        "qkv_bias": "all" if "blocks.0.attention.qkv.bias" in shapes else "none",
        "qk_norm": "blocks.0.attention.q_norm.weight" in shapes,
        "attention_norm": "blocks.0.attention.norm.weight" in shapes,
        "mlp_norm": "blocks.0.mlp.norm.weight" in shapes,
        "linear_bias": "blocks.0.attention.out.bias" in shapes,
        "layer_scale": 1e-5 if "blocks.0.scale1.weight" in shapes else None,
        "norm": "layer" if "blocks.0.norm1.bias" in shapes else "rms",
        "embedding_norm": {
            (False, False): "none",
            (True, False): "before",
            (False, True): "after",
            (True, True): "both",
        }["tokens.norm_before.weight" in shapes, "tokens.norm_after.weight" in shapes],
    }
    if "tokens.stem.norm1.running_mean" in shapes:
        channels = shapes["tokens.stem.conv1.weight"][1]
        fields |= {"embedding": "mobile", "patch": tuple(8 * side for side in patch), "channels": channels}
    elif any(name.startswith("tokens.stem.") for name in shapes):
        fields |= {"embedding": "resnet", "patch": tuple(16 * side for side in patch), "channels": 3}
    fc1, fc2 = (shapes.get(f"blocks.0.mlp.{name}.weight", (0, 0)) for name in ("fc1", "fc2"))
    fields |= {"mlp_width": fc2[1] or None, "mlp": "gated" if fc1[0] == 2 * fc2[1] else "plain"}
    return {**fields, **_head_fields(match, fields)}


def _head_fields(match: FamilyMatch, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Pool and head, from the tensors that are present."""
    shapes = match.shapes
    pool = "attention" if "pool.probe" in shapes else "class" if fields["class_token"] else "mean"
    head: dict[str, Any] = {"pool": pool, "classes": 0}
    if "head.classes.weight" in shapes:
        head |= {"head": "distilled", "classes": shapes["head.classes.weight"][0]}
    elif "head.fc2.weight" in shapes:
        head |= {"head": "tanh", "classes": shapes["head.fc2.weight"][0]}
        head["head_hidden"] = shapes["head.fc1.weight"][0]
    elif "head.weight" in shapes:
        head |= {"classes": shapes["head.weight"][0], "head_bias": "head.bias" in shapes}
        if shapes["head.weight"][1] == 2 * fields["width"]:
            head["pool"] = "class-mean"
    return head


def _heads(match: FamilyMatch, fields: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The number of heads and their width; with a note if they are assumed."""
    width = fields["width"]
    inner = match.shapes.get("blocks.0.attention.qkv.weight", (3 * width,))[0] // 3
    heads, head_width = (
        None if fields.get(name) is None else as_integer(name, fields[name], 1)
        for name in ("heads", "head_width")
    )
    note = ""
    if heads is None:
        usual = _HEAD_WIDTHS.get(width, 64) if inner == width else 64
        profile = match.family.profile
        d = head_width or profile.head_widths.get(width) or profile.head_width or usual
        if inner % d:
            raise ConfigError(
                f"The shapes of a file do not show the number of heads, and the usual head width {d} does "
                f"not divide the attention width {inner}; give heads."
            )
        heads = inner // d
        if head_width is None:
            note = f"Assumed {heads} heads of width {d}, the usual width; if that is wrong, give heads."
    if inner % heads:
        raise ConfigError(f"heads={heads} does not divide the attention width {inner}; give another number.")
    return {"heads": heads, "head_width": None if inner == width else inner // heads}, note


def find_grid(
    table: Shape | None, fields: Mapping[str, Any], match: FamilyMatch, sizes: list[Any]
) -> dict[str, Any]:
    """The image size, and which tokens have a row, from the number of rows in the position table.

    The first of the `sizes` that fits is the model's own; if none does, its grid is a square.
    """
    patch = per_axis("patch", fields["patch"], ("height", "width"))
    if table is None or not POSITIONS[fields["position"]].has_table:
        return {}
    tokens = sum(match.prefix.values())
    counts = {"all": tokens, "class": int(fields["class_token"]), "patches": 0}
    styles = [fields["rows"]] if "rows" in fields else list(_ROWS)
    for size in sizes:
        h, w = (side // step for side, step in zip(per_axis("size", size, ("H", "W")), patch, strict=True))
        for style in styles:
            if counts[style] + h * w == table[0]:
                return {"size": size, "rows": style}
    style = styles[0]
    side = math.isqrt(max(table[0] - counts[style], 0))
    if side == 0 or counts[style] + side * side != table[0]:
        raise ConfigError(
            f"The image size is unknown: {table[0]} position rows with {tokens} prefix tokens are not a "
            "square grid. Give size=(H, W) as the model was trained, and rows if not every token has one."
        )
    return {"size": (side * patch[0], side * patch[1]), "rows": style}
