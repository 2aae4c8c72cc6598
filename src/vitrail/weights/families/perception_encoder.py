"""Perception Encoder (Bolya et al. 2025): core, lang and spatial, as first published and in timm.

CLIP's names, and a rotary embedding of q and k that no tensor shows. Core models have an attention pool over
all tokens and a projection; lang and spatial models end after the last block, without a norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.weights.families import clip
from vitrail.weights.families.family import Detection, Family, KeyMap, Profile
from vitrail.weights.families.key_rows import layer, lead, row
from vitrail.weights.families.match import FamilyMatch
from vitrail.weights.families.timm import ROWS as TIMM_ROWS

_POOL = "{w}{p}attn_pool."
ROWS = (
    *clip.ROWS,
    row(_POOL + "probe", "pool.probe", lead(1)),
    row(_POOL + "attn.in_proj_weight", "pool.attention.qkv.weight"),
    row(_POOL + "attn.in_proj_bias", "pool.attention.qkv.bias"),
    *layer(_POOL + "attn.out_proj", "pool.attention.out"),
    *layer(_POOL + "layernorm", "pool.norm"),
    *layer(_POOL + "mlp.c_fc", "pool.mlp.fc1"),
    *layer(_POOL + "mlp.c_proj", "pool.mlp.fc2"),
)


def _choose(match: FamilyMatch) -> Mapping[str, Any]:
    """The pool of the core models; the mean of the patches for the others, which have no norm at the end."""
    if "pool.probe" not in match.shapes:
        return {"pool": "mean", "pool_norm": "none"}
    return {
        **{"pool": "attention", "pool_tokens": "all", "pool_heads": 8},
        "pool_mlp_width": match.shapes["pool.mlp.fc1.weight"][0],
    }


PROFILE = Profile(
    fields={"eps": 1e-5, "activation": "gelu", "position": "rotary-pe"},
    choose=_choose,
    head_widths={1536: 96},  # of the gigantic models
    resize={"method": "bilinear", "antialias": False},
    preprocess="perception-encoder",
    follows="the original code: eps 1e-5; lang and spatial models have no pool, and the mean of the patches "
    "is taken.",
)

_CORE, _TRUNK = ("{w}{p}conv1.weight", _POOL + "probe"), ("{w}{p}conv1.weight", "{w}{p}ln_pre.weight")
_TEXT = tuple(f"{{w}}{name}" for name in clip.TEXT)
CORE = Family(
    "perception-encoder",
    "perception-encoder",
    "Perception Encoder core, with its text tower",
    detect=Detection(anchors=_CORE, prefixes=("visual.",)),
    keys=KeyMap(rows=ROWS, extras=_TEXT),
    profile=PROFILE,
)
CORE_TOWER = Family(
    "perception-encoder-visual",
    "perception-encoder",
    "Perception Encoder core, the image tower alone",
    detect=Detection(anchors=_CORE, prefixes=("",)),
    keys=KeyMap(rows=ROWS),
    profile=PROFILE,
)
TRUNK = Family(
    "perception-encoder-trunk",
    "perception-encoder",
    "Perception Encoder lang and spatial",
    detect=Detection(
        anchors=(*_TRUNK, "{w}{p}transformer.resblocks.0.attn.in_proj_weight"),
        without=("{w}{p}ln_post.weight",),
        prefixes=("visual.", ""),
    ),
    keys=KeyMap(rows=ROWS),
    profile=PROFILE,
)

_TIMM = ("{w}{p}patch_embed.proj.weight", "{w}{p}norm_pre.weight", "{w}{p}blocks.0.attn.qkv.weight")
_PREFIXES = ("", "visual.trunk.", "trunk.")
TIMM_CORE = Family(
    "timm-perception-encoder",
    "timm",
    "timm's Perception Encoder core",
    detect=Detection(anchors=(*_TIMM, "{w}{p}attn_pool.latent"), prefixes=_PREFIXES),
    keys=KeyMap(rows=TIMM_ROWS, extras=("{w}text.*", "{w}logit_scale")),  # OpenCLIP's text tower
    profile=PROFILE,
)
TIMM_TRUNK = Family(
    "timm-perception-encoder-trunk",
    "timm",
    "timm's Perception Encoder lang and spatial",
    detect=Detection(
        anchors=_TIMM, without=("{w}{p}norm.weight", "{w}{p}fc_norm.weight"), prefixes=_PREFIXES
    ),
    keys=KeyMap(rows=TIMM_ROWS),
    profile=PROFILE,
)

FAMILIES = (CORE, CORE_TOWER, TRUNK, TIMM_CORE, TIMM_TRUNK)
