"""The config of a model from the shapes of its tensors, and what must be known besides.

Shapes tell most of it. What they do not tell (heads, activation, eps, where the norms stand) comes,
in this order, from the user, from the file's own settings, from the family's profile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitrail.config import ViTConfig
from vitrail.errors import ConfigError
from vitrail.fields import as_whole, per_axis
from vitrail.weights.layout import Shape
from vitrail.weights.table import Found

# The width of a head is 64 but in So400m, H, g, G and e, which have 16 heads.
HEAD_WIDTHS = {1152: 72, 1280: 80, 1408: 88, 1664: 104, 1792: 112}
STYLES = ("all", "class", "patches")  # which tokens have a row in the position table


@dataclass(frozen=True)
class Deduced:
    """A config, and how we know."""

    config: ViTConfig
    notes: list[str]
    """A sentence for each fact that was taken on trust."""


def deduce(found: Found, settings: Mapping[str, Any], given: Mapping[str, Any]) -> Deduced:
    """The config of the model in a file.

    Args:
        settings: fields from the file's own settings, such as a config.json.
        given: fields from the user, who is right. A size that the stored positions do not fit is not
            among them: it is what to resize to.
    """
    chosen = found.family.choose(found)
    check_heads(chosen, given)
    # Channels and patch are in the shapes: those of flat patches have been read with the user's. Where
    # they differ, they are what to change the model to.
    facts = {name: value for name, value in given.items() if name not in ("channels", "patch")}
    told = {**found.family.fields, **chosen, **settings, **facts}
    shapes, notes = found.shapes, list(found.notes)
    fields = {**shape_fields(found), **told}
    heads, note = heads_of(found, fields)
    fields.update(heads)
    notes += [note] * bool(note)
    sizes = [one["size"] for one in (settings, given, fields) if one.get("size") is not None]
    fields.update(grid_of(shapes.get("position.table"), fields, found, sizes))
    return Deduced(ViTConfig(**fields), notes)


def check_heads(chosen: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Some files keep the heads apart. There their number is no fact that a user could know better."""
    for name in ("heads", "head_width"):
        if given.get(name, chosen.get(name)) != chosen.get(name, given.get(name)):
            raise ConfigError(
                f"{name} must be what the shapes of the file show.",
                f"{name}={given[name]} for a file with {chosen[name]}",
                "Leave it out.",
            )


def shape_fields(found: Found) -> dict[str, Any]:
    """What the shapes tell."""
    shapes, prefix = found.shapes, found.prefix
    width, channels, *patch = shapes["tokens.proj.weight"]
    fields: dict[str, Any] = {
        "width": width,
        "depth": found.depth,
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
        "layer_scale": 1e-5 if "blocks.0.scale1.weight" in shapes else None,
        "norm": "layer" if "blocks.0.norm1.bias" in shapes else "rms",
        "embedding_norm": {
            (False, False): "none",
            (True, False): "before",
            (False, True): "after",
            (True, True): "both",
        }["tokens.norm_before.weight" in shapes, "tokens.norm_after.weight" in shapes],
    }
    if any(name.startswith("tokens.stem.") for name in shapes):
        fields |= {"embedding": "resnet", "patch": tuple(16 * side for side in patch), "channels": 3}
    fc1, fc2 = (shapes.get(f"blocks.0.mlp.{name}.weight", (0, 0)) for name in ("fc1", "fc2"))
    fields |= {"mlp_width": fc2[1] or None, "mlp": "gated" if fc1[0] == 2 * fc2[1] else "plain"}
    return {**fields, **head_fields(found, fields)}


def head_fields(found: Found, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Pool and head: which tensors there are says most."""
    shapes = found.shapes
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


def heads_of(found: Found, fields: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """How many heads, and how wide; with a sentence where it is a default."""
    width = fields["width"]
    inner = found.shapes.get("blocks.0.attention.qkv.weight", (3 * width,))[0] // 3
    known = {
        name: None if fields.get(name) is None else as_whole(name, fields[name], 1)
        for name in ("heads", "head_width")
    }
    d, note = known["head_width"], ""
    if known["heads"] is None:
        usual = HEAD_WIDTHS.get(width, 64) if inner == width else 64
        d = d or found.family.head_width or usual
        if inner % d:
            raise ConfigError(
                "How many heads there are must be told: the shapes of a file do not show it.",
                f"attention of width {inner}, which {d}, the usual width of a head, does not divide",
                "Give heads.",
            )
        if known["head_width"] is None:
            note = f"{inner // d} heads of width {d}, which is usual and not in the file; give heads if not."
    heads = known["heads"] or inner // d
    if inner % heads:
        raise ConfigError(
            "heads must divide the width of attention.", f"heads={heads} and {inner}", "Give another number."
        )
    return {"heads": heads, "head_width": None if inner == width else inner // heads}, note


def grid_of(table: Shape | None, fields: Mapping[str, Any], found: Found, sizes: list[Any]) -> dict[str, Any]:
    """The picture's size, and which tokens have a row, from how many rows the positions have.

    Of the `sizes` the first that fits is the model's own; if none does, its grid is a square.
    """
    patch = per_axis("patch", fields["patch"], ("height", "width"))
    if table is None or fields["position"] != "learned":
        return {}
    counts = {"all": sum(found.prefix.values()), "class": int(fields["class_token"]), "patches": 0}
    styles = [fields["rows"]] if "rows" in fields else list(dict.fromkeys(["all", *STYLES]))
    for size in sizes:
        h, w = (side // step for side, step in zip(per_axis("size", size, ("H", "W")), patch, strict=True))
        for style in styles:
            if counts[style] + h * w == table[0]:
                return {"size": size, "rows": style}
    style = styles[0]
    side = math.isqrt(max(table[0] - counts[style], 0))
    if side == 0 or counts[style] + side * side != table[0]:
        raise ConfigError(
            "The picture's size must be told where positions do not lie on a square.",
            f"{table[0]} position rows and {sum(found.prefix.values())} tokens before the patches",
            "Give size=(H, W) as the model was trained, and rows where not every token has one.",
        )
    return {"size": (side * patch[0], side * patch[1]), "rows": style}
