"""EVA-02 (Fang et al. 2023), in timm and as first published.

Learned positions and a rotary embedding of q and k, SwiGLU, keys without a bias. The base and large models
have separate q, k and v and a norm inside the MLP; those of EVA-02 CLIP also a norm on the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.base.errors import ConfigError
from vitrail.weights.families.family import Detection, Family, KeyMap, Profile
from vitrail.weights.families.key_rows import layer, lead, row, tokens
from vitrail.weights.families.match import FamilyMatch
from vitrail.weights.families.timm import TIMM, B

OURS = "blocks.{i}."
_QKV = tuple(f"{B}attn.{name}_proj" for name in "qkv")

_SHARED = (
    *layer("{w}{p}patch_embed.proj", "tokens.proj"),
    row(("{w}{p}cls_token", "", ""), "prefix", tokens(3), parts="prefix"),
    row("{w}{p}pos_embed", "position.table", lead(1)),
    *layer(B + "norm1", OURS + "norm1"),
    row(B + "attn.qkv.weight", OURS + "attention.qkv.weight"),
    row([f"{name}.weight" for name in _QKV], OURS + "attention.qkv.weight"),
    row((B + "attn.q_bias", "", B + "attn.v_bias"), OURS + "attention.qkv.bias"),
    *layer(B + "attn.proj", OURS + "attention.out"),
    *layer(B + "norm2", OURS + "norm2"),
    *layer("{w}{p}fc_norm", "norm"),
    *layer("{w}{p}norm", "norm"),
    *layer("{w}{p}head", "head"),
)
TIMM_ROWS = (
    row((f"{_QKV[0]}.bias", "", f"{_QKV[2]}.bias"), OURS + "attention.qkv.bias"),
    *layer(B + "attn.norm", OURS + "attention.norm"),
    *layer((B + "mlp.fc1_g", B + "mlp.fc1_x"), OURS + "mlp.fc1"),
    *layer(B + "mlp.fc1", OURS + "mlp.fc1"),
    *layer(B + "mlp.norm", OURS + "mlp.norm"),
    *layer(B + "mlp.fc2", OURS + "mlp.fc2"),
    *_SHARED,
)
ORIGINAL_ROWS = (
    *layer(B + "attn.inner_attn_ln", OURS + "attention.norm"),
    *layer((B + "mlp.w1", B + "mlp.w2"), OURS + "mlp.fc1"),
    *layer(B + "mlp.w12", OURS + "mlp.fc1"),
    *layer(B + "mlp.ffn_ln", OURS + "mlp.norm"),
    *layer(B + "mlp.w3", OURS + "mlp.fc2"),
    *_SHARED,
)


def _choose(match: FamilyMatch) -> Mapping[str, Any]:
    """The last norm follows the mean of the patches, or precedes the class token."""
    shapes = match.shapes
    if not match.gated:
        raise ConfigError(
            "The file looks like EVA or EVA-02-E, whose tensors have the same names although their blocks "
            "differ; only the EVA-02 models with SwiGLU are read."
        )
    fields: dict[str, Any] = {"qkv_bias": "no-k"} if "blocks.0.attention.qkv.bias" in shapes else {}
    if match.has("{w}{p}fc_norm.weight"):
        fields |= {"pool": "mean", "pool_norm": "after"}
    return fields


def _family(name: str, group: str, title: str, anchors: tuple[str, ...], rows: tuple[Any, ...]) -> Family:
    return Family(
        name,
        group,
        title,
        detect=Detection(
            anchors=("{w}{p}patch_embed.proj.weight", "{w}{p}pos_embed", *anchors),
            without=("{w}{p}*relative_position_bias_table", "{w}{p}norm_pre.weight"),
            prefixes=("", "visual.trunk.", "trunk.", "visual."),
        ),
        keys=KeyMap(
            rows=rows,
            extras=(
                *("{w}{p}mask_token", "{w}{p}lm_head.*", "{w}*rope.freqs_*"),
                *("{w}logit_scale", "{w}text.*", "{w}{p}patch_embed.*_ids"),
            ),
        ),
        profile=Profile(
            fields={"eps": 1e-6, "activation": "silu", "position": "rotary-eva02"},
            choose=_choose,
            resize=TIMM.profile.resize,
            preprocess="clip",
            follows="the original code and timm: eps 1e-6, q and k rotated as on a grid of 16 x 16.",
        ),
    )


TIMM_FUSED = _family(
    *("timm-eva02-small", "timm", "timm's EVA-02, tiny and small"),
    anchors=("{w}{p}blocks.0.attn.q_bias", "{w}{p}blocks.0.mlp.fc1.weight"),
    rows=TIMM_ROWS,
)
TIMM_SPLIT = _family(
    *("timm-eva02", "timm", "timm's EVA-02, base and large, also of EVA-02 CLIP"),
    anchors=("{w}{p}blocks.0.attn.q_proj.weight", "{w}{p}blocks.0.mlp.fc1_g.weight"),
    rows=TIMM_ROWS,
)
ORIGINAL_FUSED = _family(
    *("eva02-small", "eva02", "EVA-02 as first published, tiny and small"),
    anchors=("{w}{p}blocks.0.attn.q_bias", "{w}{p}blocks.0.mlp.w12.weight"),
    rows=ORIGINAL_ROWS,
)
ORIGINAL = _family(
    *("eva02", "eva02", "EVA-02 as first published, base and large"),
    anchors=("{w}{p}blocks.0.attn.q_proj.weight", "{w}{p}blocks.0.mlp.w1.weight"),
    rows=ORIGINAL_ROWS,
)

FAMILIES = (TIMM_SPLIT, TIMM_FUSED, ORIGINAL, ORIGINAL_FUSED)
