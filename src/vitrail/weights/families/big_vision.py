"""big_vision's npz files: plain ViTs, with separate or stacked blocks (scan), and SigLIP's image tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vitrail.model.config import ViTConfig
from vitrail.weights.families.family import Detection, Family, KeyMap, Profile, Writer
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
from vitrail.weights.families.key_rows import row
from vitrail.weights.families.layout import lead
from vitrail.weights.families.match import FamilyMatch

if TYPE_CHECKING:
    from torch import Tensor

POSITIONS, PROBE = TOP + "pos_embedding", TOP + "MAPHead_0/probe"


def _choose(match: FamilyMatch) -> Mapping[str, Any]:
    """The number of heads; and learned positions where the file holds none."""
    fields: dict[str, Any] = heads_in(match)
    if not match.has(POSITIONS):
        fields["position"] = "learned"
        match.notes.append(
            "The file holds no positions; big_vision's sines and cosines (sincos2d) were computed for this "
            "size and stored as learned positions."
        )
    return fields


def _sincos2d(config: ViTConfig, device: str = "cpu") -> dict[str, Tensor]:
    """[sin x, cos x, sin y, cos y] of column x and row y, at D/4 frequencies from 1 down to 1/10000.

    MoCo v3's frequencies. Those of `position="sincos2d"` stop short of 1/10000, in another order.
    """
    import torch

    if config.position != "learned" or config.rows != "patches" or config.width % 4:
        return {}
    (h, w), count = config.grid, config.width // 4
    frequencies = 10_000.0 ** -torch.linspace(0, 1, count, device=device)
    y, x = torch.meshgrid(*(torch.arange(side, device=device) for side in (h, w)), indexing="ij")
    angles = [at.flatten()[:, None] * frequencies for at in (x, y)]  # each (N, D/4)
    return {"position.table": torch.cat([part for at in angles for part in (at.sin(), at.cos())], dim=1)}


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
        choose=_choose,
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

FAMILIES = (SIGLIP, BIG_VISION)
