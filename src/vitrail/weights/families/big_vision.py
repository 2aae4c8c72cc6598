"""big_vision's npz files: plain ViTs, with blocks apart or stacked (scan), and SigLIP's image tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vitrail.config import ViTConfig
from vitrail.weights.families.google import (
    EMBEDDING,
    FIELDS,
    HEAD,
    TOP,
    attention,
    block,
    heads_in,
    mlp,
    norm,
)
from vitrail.weights.layout import lead
from vitrail.weights.table import Family, Found, row

if TYPE_CHECKING:
    from torch import Tensor

POSITIONS, PROBE = TOP + "pos_embedding", TOP + "MAPHead_0/probe"


def choose(found: Found) -> Mapping[str, Any]:
    """The heads; and positions, where there are none in the file."""
    fields: dict[str, Any] = heads_in(found)
    if not found.has(POSITIONS):
        fields["position"] = "learned"
        found.notes.append(
            "The file holds no positions: they are big_vision's sines and cosines (sincos2d), computed "
            "for this size and kept as learned rows."
        )
    return fields


def sincos2d(config: ViTConfig, device: str = "cpu") -> dict[str, Tensor]:
    """[sin x, cos x, sin y, cos y] of column x and row y, at D/4 rates from 1 down to 1/10000.

    MoCo v3's rates. Those of `position="sincos2d"` stop short of 1/10000, and lie in another order.
    """
    import torch

    if config.position != "learned" or config.rows != "patches" or config.width % 4:
        return {}
    (h, w), count = config.grid, config.width // 4
    rates = 10_000.0 ** -torch.linspace(0, 1, count, device=device)
    y, x = torch.meshgrid(*(torch.arange(side, device=device) for side in (h, w)), indexing="ij")
    angles = [at.flatten()[:, None] * rates for at in (x, y)]  # each (N, D/4)
    return {"position.table": torch.cat([part for at in angles for part in (at.sin(), at.cos())], dim=1)}


BIG_VISION = Family(
    name="big_vision",
    group="big_vision",
    title="big_vision's ViT",
    anchors=(
        TOP + "embedding/kernel",
        TOP + "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel",
    ),
    without=(TOP + "Transformer/posembed_input/*",),
    prefixes=("params/", "params/img/", "img/", ""),
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
    # The text tower, temperature and bias of an image-text model; what training kept beside "params".
    extras=(
        *("{w}params/txt/*", "{w}params/t", "{w}params/b", "{w}txt/*", "{w}t", "{w}b"),
        *("{w}opt/*", "{w}extra/*"),
    ),
    stacked=r"(.*Transformer/encoderblock)(/.+)",
    fields={**FIELDS, "rows": "patches"},
    choose=choose,
    fixed=sincos2d,
    resize={"method": "bilinear", "antialias": False, "corners": True},
    preprocess="google",
    follows='the original code: GELU in its tanh form, where timm computes the exact one (activation="gelu" '
    "gives its numbers). Pictures are squashed to size, as in vit_jax; big_vision itself evaluates on the "
    "middle of a picture resized by its short side, 256 for 224.",
    suffix=".npz",
)

SIGLIP = replace(
    BIG_VISION,
    name="big_vision-siglip",
    title="SigLIP's image tower, from big_vision",
    anchors=(*BIG_VISION.anchors, POSITIONS, PROBE),
    prefixes=("params/img/", "img/"),
    preprocess="siglip",
    follows="the original code: GELU in its tanh form; timm computes the exact one for most SigLIPs "
    '(activation="gelu" gives its numbers).',
)

FAMILIES = (SIGLIP, BIG_VISION)
