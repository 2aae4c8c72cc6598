"""The config of a model, inferred from the shapes of its tensors.

Shapes show most of it. The rest (heads, activation, eps, block type) comes, in this order, from the user,
from the file's own settings, and from the family's profile.

A plain state dict of ours, as `torch.save(model.state_dict(), "x.pth")` writes it, has our names and no
description: what nothing shows is asked for, or assumed with a note.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vitrail.base.errors import ConfigError, setting
from vitrail.base.fields import as_integer, per_axis, short_repr
from vitrail.model.config import POSITIONS, STEM_STRIDES, ViTConfig
from vitrail.model.presets import SIZES
from vitrail.weights.families.family import Detection, Family, KeyMap
from vitrail.weights.families.key_rows import Shape
from vitrail.weights.families.match import FamilyMatch

# Heads are 64 wide except in So400m, H, g, G and e, which have 16 heads.
_HEAD_WIDTHS = {1152: 72, 1280: 80, 1408: 88, 1664: 104, 1792: 112}


def infer_config(
    match: FamilyMatch, settings: Mapping[str, Any], overrides: Mapping[str, Any], notes: list[str]
) -> ViTConfig:
    """The config of the model in a file.

    Args:
        settings: fields from the file's own settings, such as a config.json.
        overrides: fields from the user, which take precedence. A size that does not fit the stored
            positions is not an override: it is what to resize to.
        notes: receives a sentence for each assumption.
    """
    choose = match.family.profile.choose
    chosen = choose(match) if choose else {}
    for name in {"heads", "head_width"} & overrides.keys() & chosen.keys():  # the file has an axis for heads
        if overrides[name] != chosen[name]:
            raise ConfigError(
                f"{name}={overrides[name]} contradicts the shapes in the file, which have {chosen[name]}; "
                f"leave out {name}."
            )
    # The shapes show channels and patch; flat patches have been read with the user's. Where the user's
    # differ, the model is changed to them later.
    certain = {name: value for name, value in overrides.items() if name not in ("channels", "patch")}
    fields = {**shape_fields(match), **match.family.profile.fields, **chosen, **settings, **certain}
    notes += match.notes
    fields |= _heads(match, fields, notes)
    sizes = [one["size"] for one in (settings, overrides, fields) if one.get("size") is not None]
    return ViTConfig(**fields | _find_grid(match, fields, sizes))


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
    elif "tokens.stem.root.conv.weight" in shapes:
        fields |= {"embedding": "resnet", "patch": tuple(16 * side for side in patch), "channels": 3}
    hidden = shapes.get("blocks.0.mlp.fc2.weight", (0, 0))[1]
    fields |= {"mlp_width": hidden or None, "mlp": "gated" if match.gated else "plain"}
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


def _heads(match: FamilyMatch, fields: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The number of heads and their width; with a note if they are assumed."""
    width = fields["width"]
    inner = match.shapes.get("blocks.0.attention.qkv.weight", (3 * width,))[0] // 3
    heads, head_width = fields.get("heads"), fields.get("head_width")
    if head_width is not None:
        head_width = as_integer("head_width", head_width, 1)
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
            notes.append(
                f"Assumed {heads} heads of width {d}, the usual width; if that is wrong, give heads."
            )
    return _check_heads(heads, inner, width)


def _check_heads(heads: Any, inner: int, width: int) -> dict[str, Any]:
    """The fields of a number of heads, in attention of this inner width."""
    if inner % as_integer("heads", heads, 1):
        raise ConfigError(f"heads={heads} does not divide the attention width {inner}; give another number.")
    return {"heads": heads, "head_width": None if inner == width else inner // heads}


def _find_grid(match: FamilyMatch, fields: Mapping[str, Any], sizes: list[Any]) -> dict[str, Any]:
    """The image size, and which tokens have a row, from the number of rows in the position table.

    The first of the `sizes` that fits is the model's own; if none does, its grid is a square.
    """
    if "position.table" not in match.shapes or not POSITIONS[fields["position"]].has_table:
        return {}
    count = match.shapes["position.table"][0]
    patch = per_axis("patch", fields["patch"], ("height", "width"))
    tokens = sum(match.prefix.values())
    counts = {"all": tokens, "class": int(fields["class_token"]), "patches": 0}
    styles = [fields["rows"]] if "rows" in fields else ["all", "class", "patches"]
    for size in sizes:
        h, w = (side // step for side, step in zip(per_axis("size", size, ("H", "W")), patch, strict=True))
        for style in styles:
            if counts[style] + h * w == count:
                return {"size": size, "rows": style}
    style = styles[0]
    side = math.isqrt(max(count - counts[style], 0))
    if side == 0 or counts[style] + side * side != count:
        raise ConfigError(
            f"The image size is unknown: {count} position rows with {tokens} prefix tokens are not a "
            "square grid. Give size=(H, W) as the model was trained, and rows if not every token has one."
        )
    return {"size": (side * patch[0], side * patch[1]), "rows": style}


# ---- a plain state dict of ours -------------------------------------------------------------

STATE_DICT = Family(
    "state-dict",
    "vitrail",
    "the state dict of a vitrail model",
    detect=Detection(anchors=("{w}tokens.proj.weight", "{w}blocks.0.attention.qkv.weight")),
    keys=KeyMap(own=True),
)
_ASSUMED = ("heads", "pool", "activation", "block", "eps")  # what users most often change of the unseen


def infer_own_config(match: FamilyMatch, overrides: Mapping[str, Any], notes: list[str]) -> ViTConfig:
    """The config of a state dict of ours; a note says what is assumed."""
    shapes = match.shapes
    if len(shapes["tokens.proj.weight"]) != 4 or overrides.get("input", "image") != "image":
        raise ConfigError(
            "A plain state dict is read for models of images only; save this one with "
            'vt.Bundle(model=model).save("x.safetensors"), which stores its config.'
        )
    certain = {name: value for name, value in overrides.items() if name not in ("channels", "patch")}
    # The rows of `prefix` are class, distillation and registers, in this order.
    count = shapes.get("prefix", (0,))[0]
    first = int(overrides.get("class_token", count > 0))
    second = int(overrides.get("distillation_token", "head.classes.weight" in shapes))
    registers = max(count - first - second, 0)
    match.prefix.update({"class": first, "distillation": second, "registers": registers})
    fields = {**shape_fields(match), **_own_fields(shapes), **certain}
    if fields["mlp_width"] == 4 * fields["width"]:
        fields["mlp_width"] = None  # the default, as vitrail.create leaves it
    inner, published = shapes["blocks.0.attention.qkv.weight"][0] // 3, None
    if (heads := fields.get("heads") or _shown_heads(shapes, inner)) is None:
        sizes = {size.width: size.heads for size in SIZES.values()}
        heads = published = sizes.get(inner) if inner == fields["width"] else None
    if heads is None:
        raise ConfigError(
            "The tensors do not show the number of heads, and no published model has the width "
            f"{fields['width']}; give it: {setting('heads', ...)}."
        )
    fields |= _check_heads(heads, inner, fields["width"])
    fields |= _position(match, fields, overrides)
    config = ViTConfig(**fields | _pool(shapes, fields, overrides))
    assumed = [name for name in _ASSUMED if name not in overrides and (name != "heads" or published)]
    values = ", ".join(f"{name}={short_repr(getattr(config, name))}" for name in assumed)
    notes.append(
        f"A plain state dict holds no config; assumed: {values}. If the model was built with others, give "
        'them. bundle.save("x.safetensors") stores them in the file.'
    )
    return config


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


def _shown_heads(shapes: Mapping[str, Shape], inner: int) -> int | None:
    """The number of heads, where the attention has tensors with an axis for the heads or their width."""
    if "blocks.0.attention.bias.table" in shapes:
        return shapes["blocks.0.attention.bias.table"][0]
    norm = shapes.get("blocks.0.attention.q_norm.weight")
    return inner // norm[0] if norm else None


def _position(match: FamilyMatch, fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The position scheme, and the size that its tensors are for."""
    shapes, sizes = match.shapes, [overrides["size"]] if "size" in overrides else []
    if "position.table" in shapes:
        return _find_grid(match, fields, sizes)
    down, across = per_axis("patch", fields["patch"], ("height", "width"))
    n = sum(match.prefix.values())
    if "position.down" in shapes:
        h, w = shapes["position.down"][0], shapes["position.across"][0]
        front = shapes.get("position.front", (0,))[0]
        style = "all" if front == n else "class" if front == 1 else "patches"
        return {"position": "learned2d", "size": (h * down, w * across), "rows": style}
    if "blocks.0.attention.bias.table" in shapes:
        table = shapes["blocks.0.attention.bias.table"]
        position = "pairwise" if len(table) == 3 else "relative"
        given = [per_axis("size", size, ("H", "W")) for size in sizes]
        grids = [(height // down, width // across) for height, width in given]
        for h, w in [*grids, *((side, side) for side in range(1, math.isqrt(table[-1]) + 1))]:
            rows = n + h * w if position == "pairwise" else (2 * h - 1) * (2 * w - 1) + (3 if n else 0)
            if rows == table[-1]:
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
