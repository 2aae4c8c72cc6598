"""Google's ViTs: npz files of vit_jax (the paper's, AugReg, SAM, the R50 hybrid) and of big_vision.

big_vision's are plain ViTs, with separate or stacked blocks (scan), and SigLIP's image tower.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError, printable
from vitrail.base.fields import short_repr
from vitrail.model.config import ViTConfig
from vitrail.weights.families.family import Detection, Family, KeyMap, Profile, Writer
from vitrail.weights.families.key_rows import (
    Layout,
    Row,
    flax_conv,
    flax_heads,
    flax_heads_bias,
    flax_out,
    lead,
    row,
    same,
    tokens,
    transposed,
)
from vitrail.weights.families.match import FamilyMatch

if TYPE_CHECKING:
    from torch import Tensor

TOP, B, OURS = "{w}{p}", "{w}{p}Transformer/encoderblock_{i}/", "blocks.{i}."
UNITS = (3, 4, 9)  # in the stem's three stages; model/stem.py has the table of names

FIELDS = {
    **{"eps": 1e-6, "activation": "gelu-tanh"},
    **{"embedding_bias": True, "qkv_bias": "all", "head_bias": True},  # a file without one is damaged
}

# The scale of a group norm: (C,), or (1, 1, 1, C) in older files.
flat = Layout("flat", lambda t, s: t.flatten(), lambda t, s: t, lambda shape, s: (math.prod(shape),))


# ---- Flax layers, for big_vision too


def dense(theirs: str, ours: str, **more: Any) -> tuple[Row, Row]:
    kernel = row(f"{theirs}/kernel", f"{ours}.weight", transposed, **more)
    return kernel, row(f"{theirs}/bias", f"{ours}.bias", **more)


def norm(theirs: str, ours: str, layout: Layout = same) -> tuple[Row, Row]:
    return row(f"{theirs}/scale", f"{ours}.weight", layout), row(f"{theirs}/bias", f"{ours}.bias", layout)


def attention(theirs: str, ours: str) -> tuple[Row, ...]:
    qkv = [f"{theirs}/{name}" for name in ("query", "key", "value")]
    return (
        row([f"{name}/kernel" for name in qkv], f"{ours}.qkv.weight", flax_heads),
        row([f"{name}/bias" for name in qkv], f"{ours}.qkv.bias", flax_heads_bias),
        row(f"{theirs}/out/kernel", f"{ours}.out.weight", flax_out),
        row(f"{theirs}/out/bias", f"{ours}.out.bias"),
    )


def mlp(theirs: str, ours: str) -> tuple[Row, ...]:
    return *dense(f"{theirs}/Dense_0", f"{ours}.fc1"), *dense(f"{theirs}/Dense_1", f"{ours}.fc2")


def block(attention_number: int, norm_number: int, mlp_number: int) -> tuple[Row, ...]:
    """The rows of a block. Old Flax numbers the layers of a block in a row, new Flax each type from 0."""
    return (
        *norm(B + "LayerNorm_0", OURS + "norm1"),
        *attention(B + f"MultiHeadDotProductAttention_{attention_number}", OURS + "attention"),
        *norm(B + f"LayerNorm_{norm_number}", OURS + "norm2"),
        *mlp(B + f"MlpBlock_{mlp_number}", OURS + "mlp"),
    )


EMBEDDING = (
    row(TOP + "embedding/kernel", "tokens.proj.weight", flax_conv),
    row(TOP + "embedding/bias", "tokens.proj.bias"),
    row(TOP + "cls", "prefix", tokens(3), parts="prefix"),
)
HEAD = (
    *norm(TOP + "Transformer/encoder_norm", "norm"),
    *dense(TOP + "pre_logits", "head.fc1", requires=TOP + "head/kernel"),
    *dense(TOP + "head", "head.fc2", requires=TOP + "pre_logits/kernel"),
    *dense(TOP + "head", "head"),
)


def heads_in(match: FamilyMatch) -> dict[str, int]:
    """k and d: Flax has an axis for the heads, so q's kernel is (D, k, d)."""
    qkv = {row.ours: row.theirs for row in match.rows}["blocks.0.attention.qkv.weight"]
    location = match.locations[qkv[0]]
    shape = match.entries[location.original].shape[location.index is not None :]
    if len(shape) != 3:
        raise ConfigError(
            f"{printable(location.original)} has the shape {shape}, but Google's files have an axis for the "
            "heads, (D, k, d); give another family, or a complete key table."
        )
    _, k, d = shape
    return {"heads": k, "head_width": d}


# ---- vit_jax


def _stem_rows() -> tuple[Row, ...]:
    """The rows of the hybrid's ResNet-50 stem."""
    ours = "tokens.stem."
    rows = [row(TOP + "conv_root/kernel", ours + "root.conv.weight", flax_conv)]
    rows += norm(TOP + "gn_root", ours + "root.norm", flat)
    for stage, units in enumerate(UNITS):
        for unit in range(units):
            to, at = TOP + f"block{stage + 1}/unit{unit + 1}/", ours + f"stages.{stage}.{unit}."
            names = [(f"conv{n}", f"gn{n}", f"conv{n}", f"norm{n}") for n in (1, 2, 3)]
            names += [("conv_proj", "gn_proj", "proj", "proj_norm")] * (unit == 0)
            for kernel, scale, our_conv, our_norm in names:
                rows.append(row(to + kernel + "/kernel", at + our_conv + ".weight", flax_conv))
                rows += norm(to + scale, at + our_norm, flat)
    return tuple(rows)


def _choose(match: FamilyMatch) -> Mapping[str, Any]:
    """The number of heads, and for a hybrid the input channels, which its patch projection does not show."""
    if not any(name.startswith("tokens.stem.") for name in match.shapes):
        return heads_in(match)
    _check_stem(match)
    return {**heads_in(match), "channels": match.shapes["tokens.stem.root.conv.weight"][1]}


def _check_stem(match: FamilyMatch) -> None:
    pattern = re.escape(TOP.format(**match.placeholders)) + r"block(\d+)/unit(\d+)/"
    units = {(int(unit[1]), int(unit[2])) for name in match.locations if (unit := re.match(pattern, name))}
    stages = sorted({stage for stage, _ in units})
    counts = tuple(sum(at == stage for at, _ in units) for stage in stages)
    if counts != UNITS:
        description = f"stages of {', '.join(map(str, counts))} units" if counts else "a root without stages"
        raise ConfigError(
            f"The stem of this hybrid has {description}, but only the R50 of stride 16 is supported, with "
            "stages of 3, 4 and 9 units; use timm for this file."
        )


def _unsupported(config: ViTConfig) -> list[str]:
    """What vit_jax cannot express."""
    reasons = []
    if config.activation != "gelu-tanh":
        reasons.append(
            f"its only activation is tanh GELU, and activation is {short_repr(config.activation)} here; "
            'it can be written with activation="gelu-tanh"'
        )
    if config.class_token != (config.pool == "class"):
        reasons.append("it has a class token exactly if that is the pool")
    if config.heads_width != config.width:
        reasons.append("its heads together are as wide as a token")
    return reasons


GOOGLE = Family(
    "google",
    "google",
    "Google's vit_jax",
    detect=Detection(
        anchors=(TOP + "embedding/kernel", TOP + "Transformer/posembed_input/pos_embedding"),
        prefixes=("", "opt/target/"),
    ),
    keys=KeyMap(
        rows=(
            *EMBEDDING,
            row(TOP + "Transformer/posembed_input/pos_embedding", "position.table", lead(1)),
            *block(1, 2, 3),
            *block(0, 1, 0),
            *_stem_rows(),
            *HEAD,
        ),
        extras=("{w}opt/state/*",),
    ),
    profile=Profile(
        fields=FIELDS,
        choose=_choose,
        resize={"method": "bilinear", "antialias": False, "corners": True},
        preprocess="google",
        follows="the original code: tanh GELU, where timm and transformers compute the exact one "
        '(activation="gelu" gives their numbers). Only the stem of a hybrid has timm\'s eps, 1e-8 for '
        "kernels and 1e-5 for norms.",
    ),
    writer=Writer(
        expresses={
            "activation": ...,  # see _unsupported
            "head_width": ...,
            "embedding": ("linear", "resnet"),
            "remainder": ("refuse", "cut"),
            "class_token": (True, False),
            "pool": ("class", "mean"),
            "head": ("linear", "tanh"),
            "head_hidden": ...,
        },
        unsupported=_unsupported,
        suffix=".npz",
    ),
)


POSITIONS, PROBE = TOP + "pos_embedding", TOP + "MAPHead_0/probe"


def _choose_big_vision(match: FamilyMatch) -> Mapping[str, Any]:
    """The number of heads; and learned positions where the file holds none."""
    fields: dict[str, Any] = heads_in(match)
    if not match.has(POSITIONS):
        fields["position"] = "learned"
        match.notes.append(
            "The file holds no positions; big_vision's sines and cosines (sincos2d) were computed for this "
            "size and stored as learned positions."
        )
    return fields


def _sincos2d(config: ViTConfig) -> dict[str, Tensor]:
    """[sin x, cos x, sin y, cos y] of column x and row y, at D/4 frequencies from 1 down to 1/10000.

    MoCo v3's frequencies. Those of `position="sincos2d"` stop short of 1/10000, in another order.
    """
    import torch

    if config.position != "learned" or config.rows != "patches" or config.width % 4:
        return {}
    frequencies = 10_000.0 ** -torch.linspace(0, 1, config.width // 4)
    return {"position.table": sincos_table(config.grid, frequencies)}


def sincos_table(grid: tuple[int, ...], frequencies: Tensor) -> Tensor:
    """[sin x, cos x, sin y, cos y] of column x and row y, at each frequency: (N, D)."""
    import torch

    y, x = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
    angles = [at.flatten()[:, None] * frequencies for at in (x, y)]  # each (N, D/4)
    return torch.cat([part for at in angles for part in (at.sin(), at.cos())], dim=1).float()


BIG_VISION = Family(
    "big_vision",
    "big_vision",
    "big_vision's ViT",
    detect=Detection(
        anchors=(
            TOP + "embedding/kernel",
            TOP + "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel",
        ),
        without=(TOP + "Transformer/posembed_input/*",),
        prefixes=("params/", "params/img/", "img/", ""),
    ),
    keys=KeyMap(
        rows=(
            *EMBEDDING,
            row(POSITIONS, "position.table", lead(1)),
            *block(0, 1, 0),
            row(PROBE, "pool.probe", lead(1)),
            *attention(TOP + "MAPHead_0/MultiHeadDotProductAttention_0", "pool.attention"),
            *norm(TOP + "MAPHead_0/LayerNorm_0", "pool.norm"),
            *mlp(TOP + "MAPHead_0/MlpBlock_0", "pool.mlp"),
            *HEAD,
        ),
        # The text tower, temperature and bias of an image-text model; training state beside "params".
        extras=(
            *("{w}params/txt/*", "{w}params/t", "{w}params/b", "{w}txt/*", "{w}t", "{w}b"),
            *("{w}opt/*", "{w}extra/*"),
        ),
        stacked=r"(.*Transformer/encoderblock)(/.+)",
    ),
    profile=Profile(
        fields={**FIELDS, "rows": "patches"},
        choose=_choose_big_vision,
        computed=_sincos2d,
        resize={"method": "bilinear", "antialias": False, "corners": True},
        preprocess="google",
        follows='the original code: tanh GELU, where timm computes the exact one (activation="gelu" gives '
        "timm's numbers). Images are resized to a square, as in vit_jax; big_vision itself evaluates on the "
        "center of an image resized by its short side, 256 for 224.",
    ),
    writer=Writer(suffix=".npz"),
)

SIGLIP = replace(
    BIG_VISION,
    name="big_vision-siglip",
    title="SigLIP's image tower, from big_vision",
    detect=Detection(
        anchors=(*BIG_VISION.detect.anchors, POSITIONS, PROBE),
        without=BIG_VISION.detect.without,
        prefixes=("params/img/", "img/"),
    ),
    profile=replace(
        BIG_VISION.profile,
        preprocess="siglip",
        follows="the original code: tanh GELU; timm computes the exact one for most SigLIP models "
        '(activation="gelu" gives its numbers).',
    ),
)

FAMILIES = (GOOGLE, SIGLIP, BIG_VISION)
