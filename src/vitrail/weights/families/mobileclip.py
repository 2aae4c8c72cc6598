"""The image tower of MobileCLIP-B (Vasu et al. 2023): as Apple published it, and in timm.

A ViT behind a small convolutional stem. The other MobileCLIP models are convolutional and not read.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.weights.families.family import Detection, Family, KeyMap
from vitrail.weights.families.key_rows import Row, layer, lead, row, tokens, transposed
from vitrail.weights.families.timm import ROWS as TIMM_ROWS
from vitrail.weights.families.timm import TIMM as TIMM_VIT

OURS = "blocks.{i}."


def _stem(theirs: str, conv: str, norm: str) -> tuple[Row, ...]:
    """Two convolutions with batch norms; the third, with a bias, is the patch projection."""
    rows: list[Row] = []
    for number in (0, 1):
        ours = f"tokens.stem.{{}}{number + 1}"
        rows.append(row(f"{theirs}.{number}.{conv}.weight", f"{ours.format('conv')}.weight"))
        rows += [
            row(f"{theirs}.{number}.{norm}.{part}", f"{ours.format('norm')}.{part}")
            for part in ("weight", "bias", "running_mean", "running_var")
        ]
    return (*rows, *layer(f"{theirs}.2.{conv}", "tokens.proj"))


_PROFILE = replace(
    TIMM_VIT.profile,
    fields={"eps": 1e-6, "activation": "gelu", "rows": "patches"},
    preprocess="mobileclip",
    follows="timm: exact GELU, eps 1e-6; the statistics of the batch norms do not change in training.",
)

B = "{w}{p}transformer.{i}."
ORIGINAL = Family(
    "mobileclip",
    "mobileclip",
    "MobileCLIP-B as Apple published it",
    detect=Detection(
        anchors=("{w}{p}patch_emb.0.block.conv.weight", "{w}{p}transformer.0.pre_norm_mha.1.qkv_proj.weight"),
        prefixes=("image_encoder.model.", ""),
    ),
    keys=KeyMap(
        rows=(
            *_stem("{w}{p}patch_emb", "block.conv", "block.norm"),
            row("{w}{p}cls_token", "prefix", tokens(3), parts="prefix"),
            row("{w}{p}pos_embed.pos_embed.pos_embed", "position.table", lead(2)),
            *layer(B + "pre_norm_mha.0", OURS + "norm1"),
            *layer(B + "pre_norm_mha.1.qkv_proj", OURS + "attention.qkv"),
            *layer(B + "pre_norm_mha.1.out_proj", OURS + "attention.out"),
            *layer(B + "pre_norm_ffn.0", OURS + "norm2"),
            *layer(B + "pre_norm_ffn.1", OURS + "mlp.fc1"),
            *layer(B + "pre_norm_ffn.4", OURS + "mlp.fc2"),
            *layer("{w}{p}post_transformer_norm", "norm"),
            row("{w}{p}classifier.proj", "head.weight", transposed),
        ),
        extras=("{w}text_encoder.*", "{w}logit_scale", "{w}{p}*num_batches_tracked"),
    ),
    profile=_PROFILE,
)

TIMM = Family(
    "timm-mobileclip",
    "timm",
    "timm's image tower of MobileCLIP-B",
    detect=Detection(
        anchors=("{w}{p}patch_embed.backbone.0.conv.weight", "{w}{p}blocks.0.attn.qkv.weight"),
        without=("{w}{p}patch_embed.proj.weight",),
        prefixes=("", "visual.trunk.", "trunk."),
    ),
    keys=KeyMap(
        rows=(*_stem("{w}{p}patch_embed.backbone", "conv", "bn"), *TIMM_ROWS),
        extras=("{w}{p}*num_batches_tracked", "{w}text.*", "{w}logit_scale"),
    ),
    profile=_PROFILE,
)

FAMILIES = (ORIGINAL, TIMM)
