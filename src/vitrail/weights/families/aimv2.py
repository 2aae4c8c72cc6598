"""AIMv2 (Fini et al. 2024), in transformers, as first published and in timm.

RMSNorm everywhere, also after the patch projection; SwiGLU; no class token and no bias inside the blocks.
The models for native resolution have no position table: their sines and cosines are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.model.config import ViTConfig
from vitrail.weights.families.family import Detection, Family, KeyMap, Profile, Writer
from vitrail.weights.families.google import sincos_table
from vitrail.weights.families.hf import (
    OURS,
    folder_settings,
    load_peer,
    no_layer_scale,
    read_settings,
    shared_keys,
    towers,
)
from vitrail.weights.families.key_rows import layer, lead, row
from vitrail.weights.families.match import FamilyMatch
from vitrail.weights.families.timm import ROWS as TIMM_ROWS

if TYPE_CHECKING:
    from torch import Tensor

_FIELDS = {"eps": 1e-5, "activation": "silu", "pool": "mean", "rows": "patches"}


def _choose(match: FamilyMatch) -> Mapping[str, Any]:
    """Learned positions, also where the file holds none."""
    if "position.table" not in match.shapes:
        match.notes.append(
            "The file holds no positions, as those for native resolution; AIMv2's sines and cosines were "
            "computed for this size and stored as learned positions."
        )
    return {"position": "learned"}


def _sincos2d(config: ViTConfig) -> dict[str, Tensor]:
    """[sin x, cos x, sin y, cos y] of column x and row y, with D/4 frequencies 10000^(-4i/D)."""
    import torch

    if config.position != "learned" or config.width % 4:
        return {}
    count = config.width // 4
    frequencies = 10_000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
    return {"position.table": sincos_table(config.grid, frequencies)}


PROFILE = Profile(
    fields=_FIELDS,
    choose=_choose,
    head_width=128,
    resize={"method": "bicubic", "antialias": True},
    preprocess="clip",
    computed=_sincos2d,
    follows="AIMv2's own code: RMSNorm with eps 1e-5; it has no pool, and the mean of the patches is taken.",
)

# ---- transformers ---------------------------------------------------------------------------

E, L = "{w}{p}embeddings.", "{w}{p}encoder.layers.{i}."
_FFN = tuple(f"{L}ffn.{name}_proj" for name in ("gate", "up"))
HF_ROWS = (
    *layer(E + "patch_embed", "tokens.proj"),
    row(E + "rms_norm.weight", "tokens.norm_after.weight"),
    row(E + "position_embedding.weight", "position.table"),
    row(L + "rms_norm1.weight", OURS + "norm1.weight"),
    *layer([f"{L}attention.{name}_proj" for name in "qkv"], OURS + "attention.qkv"),
    *layer(L + "attention.out_proj", OURS + "attention.out"),
    row(L + "rms_norm2.weight", OURS + "norm2.weight"),
    *layer(_FFN, OURS + "mlp.fc1"),
    *layer(L + "ffn.down_proj", OURS + "mlp.fc2"),
    row("{w}{p}rms_norm.weight", "norm.weight"),
)


_DEFAULTS = towers("aimv2", rms_norm_eps=1e-5, hidden_act="silu", num_attention_heads=8, num_hidden_layers=24)


def _config_json(config: ViTConfig) -> dict[str, Any]:
    """config.json of the vision model, without its attention pool."""
    shared = shared_keys(config)
    return {
        "architectures": ["Aimv2VisionModel"],
        "model_type": "aimv2_vision_model",
        **{name: value for name, value in shared.items() if name != "layer_norm_eps"},
        "rms_norm_eps": config.eps,
        "intermediate_size": config.F,
        "qkv_bias": config.qkv_bias == "all",
        "mlp_bias": config.linear_bias,
        "use_head": False,
        "is_native": False,
    }


def _peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    native = not any(name.endswith("position_embedding.weight") for name in state)

    def config_json(config: ViTConfig) -> dict[str, Any]:
        return {**_config_json(config), "is_native": native}

    return load_peer(config, state, config_json, base="vision_model.", anchor="embeddings.patch_embed.weight")


def _unsupported(config: ViTConfig) -> list[str]:
    rectangular = any(high != wide for high, wide in (config.pixels, config.patch_pixels))
    biased = (config.qkv_bias == "all") != config.linear_bias
    reasons = ["its images and patches are square"] * rectangular + ["it has no head"] * (config.classes > 0)
    return [*reasons, *["all of its blocks' layers have a bias, or none"] * biased, *no_layer_scale(config)]


HF = Family(
    "hf-aimv2",
    "hf",
    "the vision tower of transformers' AIMv2",
    detect=Detection(
        anchors=(
            E + "patch_embed.weight",
            E + "rms_norm.weight",
            "{w}{p}encoder.layers.0.ffn.gate_proj.weight",
        ),
        without=("{w}{p}head.k_proj.weight",),
        prefixes=("", "vision_model."),
        model_types=("aimv2", "aimv2_vision_model"),
    ),
    keys=KeyMap(rows=HF_ROWS),
    profile=PROFILE,
    writer=Writer(
        expresses={
            **{"eps": ..., "activation": ("silu", "gelu", "gelu-tanh", "relu"), "mlp": ("gated",)},
            **{"class_token": (False,), "rows": ("all", "patches"), "pool": ("mean",), "norm": ("rms",)},
            **{"embedding_norm": ("after",), "qkv_bias": ("all", "none"), "linear_bias": (True, False)},
        },
        unsupported=_unsupported,
        settings=partial(folder_settings, config_json=_config_json),
        read_settings=partial(read_settings, defaults=_DEFAULTS),
        peer=_peer,
    ),
)

# ---- as first published, and timm -----------------------------------------------------------

B = "{w}{p}trunk.blocks.{i}."
ORIGINAL = Family(
    "aimv2",
    "aimv2",
    "AIMv2 as first published",
    detect=Detection(
        anchors=("{w}{p}preprocessor.patchifier.proj.weight", "{w}{p}trunk.blocks.0.norm_1.weight"),
        without=("{w}{p}head.*",),
        prefixes=("", "image_encoder."),
    ),
    keys=KeyMap(
        rows=(
            *layer("{w}{p}preprocessor.patchifier.proj", "tokens.proj"),
            row("{w}{p}preprocessor.patchifier.norm.weight", "tokens.norm_after.weight"),
            row("{w}{p}preprocessor.pos_embed", "position.table", lead(1)),
            row(B + "norm_1.weight", OURS + "norm1.weight"),
            *layer(B + "attn.qkv", OURS + "attention.qkv"),
            *layer(B + "attn.proj", OURS + "attention.out"),
            row(B + "norm_2.weight", OURS + "norm2.weight"),
            *layer((B + "mlp.fc1", B + "mlp.fc3"), OURS + "mlp.fc1"),
            *layer(B + "mlp.fc2", OURS + "mlp.fc2"),
            row("{w}{p}trunk.post_trunk_norm.weight", "norm.weight"),
        )
    ),
    profile=PROFILE,
)

TIMM = Family(
    "timm-aimv2",
    "timm",
    "timm's AIMv2",
    detect=Detection(
        anchors=(
            *("{w}{p}patch_embed.proj.weight", "{w}{p}patch_embed.norm.weight", "{w}{p}pos_embed"),
            "{w}{p}blocks.0.mlp.fc1_g.weight",
        ),
        without=("{w}{p}cls_token", "{w}{p}patch_embed.norm.bias"),
        prefixes=("", "visual.trunk.", "trunk."),
    ),
    keys=KeyMap(rows=TIMM_ROWS),
    profile=PROFILE,
)

FAMILIES = (HF, ORIGINAL, TIMM)
