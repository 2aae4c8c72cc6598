"""DINOv3 (Siméoni et al. 2025), as first published, in transformers and in timm.

A ViT with registers, LayerScale and a rotary embedding of normalized coordinates instead of a position table,
so the files show no image size: 224 unless given. Keys have no bias. transformers and timm leave its tensor
out; the original keeps one and masks it, and its values are carried along unused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError
from vitrail.base.fields import short_repr
from vitrail.model.config import ViTConfig
from vitrail.weights.families.family import Detection, Family, KeyMap, Profile, Writer
from vitrail.weights.families.hf import (
    ACTIVATIONS,
    OURS,
    folder_settings,
    load_peer,
    read_settings,
    shared_keys,
)
from vitrail.weights.families.key_rows import layer, row, tokens
from vitrail.weights.families.match import FamilyMatch
from vitrail.weights.families.timm import B

if TYPE_CHECKING:
    from torch import Tensor

_THETA = 100.0  # the base of the rotary periods in every published model
_FIELDS = {"eps": 1e-5, "activation": "gelu", "position": "rotary-dinov3", "remainder": "cut"}
_EXPRESSES = {
    **{"eps": ..., "registers": ..., "position": ("rotary-dinov3",), "mlp": ("plain", "gated")},
    **{"activation": tuple(dict.fromkeys(ACTIVATIONS.values())), "remainder": ("refuse", "cut")},
}


def _choose(match: FamilyMatch) -> Mapping[str, Any]:
    """The activation of a gated MLP; and keys without a bias, unless the file has one that is used."""
    shapes = match.shapes
    fields: dict[str, Any] = {"activation": "silu"} if match.gated else {}
    if "blocks.0.attention.qkv.bias" in shapes and not match.has(L + "attention.k_proj.bias"):
        fields["qkv_bias"] = "no-k"
    return fields


# ---- transformers ---------------------------------------------------------------------------

E, L = "{w}embeddings.", "{w}layer.{i}."
_QKV = tuple(f"{L}attention.{name}_proj" for name in "qkv")

HF_ROWS = (
    *layer(E + "patch_embeddings", "tokens.proj"),
    row((E + "cls_token", "", E + "register_tokens"), "prefix", tokens(3), parts="prefix"),
    *layer(L + "norm1", OURS + "norm1"),
    *layer(_QKV, OURS + "attention.qkv", when=("qkv_bias", "all")),
    row([f"{name}.weight" for name in _QKV], OURS + "attention.qkv.weight"),
    row((f"{_QKV[0]}.bias", "", f"{_QKV[2]}.bias"), OURS + "attention.qkv.bias"),
    *layer(L + "attention.o_proj", OURS + "attention.out"),
    row(L + "layer_scale1.lambda1", OURS + "scale1.weight"),
    *layer(L + "norm2", OURS + "norm2"),
    *layer((L + "mlp.gate_proj", L + "mlp.up_proj"), OURS + "mlp.fc1", when=("mlp", "gated")),
    *layer(L + "mlp.up_proj", OURS + "mlp.fc1"),
    *layer(L + "mlp.down_proj", OURS + "mlp.fc2"),
    row(L + "layer_scale2.lambda1", OURS + "scale2.weight"),
    *layer("{w}norm", "norm"),
)


_ZEROS: dict[str, Any] = {
    E + "mask_token": lambda config: (1, 1, config.width),
    E + "register_tokens": lambda config: (1, config.registers, config.width),
}


def _config_json(config: ViTConfig) -> dict[str, Any]:
    """config.json of a DINOv3 without labels."""
    return {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        **shared_keys(config),
        "intermediate_size": config.F,
        "use_gated_mlp": config.mlp == "gated",
        "num_register_tokens": config.registers,
        "rope_theta": _THETA,
        "layerscale_value": config.layer_scale,
        "query_bias": config.qkv_bias != "none",
        "key_bias": config.qkv_bias == "all",
        "value_bias": config.qkv_bias != "none",
    }


def _read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    fields = read_settings(
        settings, {"dinov3_vit": {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "num_attention_heads": 6}}
    )
    theta = settings.get("rope_theta", _THETA)
    if fields and theta != _THETA:
        raise ConfigError(
            f"config.json has rope_theta={short_repr(theta)}, and only DINOv3's own {_THETA:g} is supported."
        )
    return fields


def _unsupported(config: ViTConfig) -> list[str]:
    """What DINOv3 has no names or settings for."""
    reasons = []
    if config.layer_scale is None:
        reasons.append("its blocks always have a layer scale")
    if config.classes:
        reasons.append("it has no head")
    return reasons


HF = Family(
    "hf-dinov3",
    "hf",
    "transformers' DINOv3",
    detect=Detection(
        anchors=(E + "patch_embeddings.weight", E + "cls_token", "{w}layer.0.norm1.weight"),
        model_types=("dinov3_vit",),
    ),
    keys=KeyMap(
        rows=HF_ROWS,
        extras=(E + "mask_token", E + "register_tokens"),  # without registers, an empty tensor
        respell=((r"model\.layer\.", "layer."),),  # as in memory
        zeros=_ZEROS,
    ),
    profile=Profile(
        fields=_FIELDS,
        choose=_choose,
        preprocess="dinov3",
        follows="transformers: eps 1e-5, rotary periods of base 100, the class token after the last norm.",
    ),
    writer=Writer(
        expresses={**_EXPRESSES, "qkv_bias": ("all", "none", "no-k")},
        unsupported=_unsupported,
        settings=partial(folder_settings, config_json=_config_json),
        read_settings=_read_settings,
        peer=partial(load_peer, config_json=_config_json, zeros=_ZEROS),
    ),
)

# ---- as first published, and timm -----------------------------------------------------------

_SHARED = (
    *layer("{w}{p}patch_embed.proj", "tokens.proj"),
    *layer(B + "norm1", OURS + "norm1"),
    *layer(B + "attn.qkv", OURS + "attention.qkv"),
    row((B + "attn.q_bias", "", B + "attn.v_bias"), OURS + "attention.qkv.bias"),  # timm's
    *layer(B + "attn.proj", OURS + "attention.out"),
    *layer(B + "norm2", OURS + "norm2"),
    *layer(B + "mlp.fc1", OURS + "mlp.fc1"),
    *layer(B + "mlp.fc2", OURS + "mlp.fc2"),
    *layer("{w}{p}norm", "norm"),
    *layer("{w}{p}head", "head"),
)


def _choose_original(match: FamilyMatch) -> Mapping[str, Any]:
    """Keys have a bias, unless the file masks it; the number of rotary periods shows the head width."""
    if match.has("{w}{p}cls_norm.weight"):
        raise ConfigError(
            "The file is a DINOv3 with a norm of its own for the class token (cls_norm), which is not read: "
            "here one norm follows all tokens. No published DINOv3 has it; use its own code."
        )
    fields = dict(_choose(match))
    if "qkv_bias" in fields and not match.has(B + "attn.qkv.bias_mask"):
        fields["qkv_bias"] = "all"
    periods = match.entries["{w}{p}rope_embed.periods".format(**match.placeholders)].shape
    width = match.shapes["tokens.proj.weight"][0]
    if len(periods) == 1 and periods[0] and width % (4 * periods[0]) == 0:
        fields["heads"] = width // (4 * periods[0])
    return fields


def _check_extras(extras: Mapping[str, Tensor]) -> list[str]:
    """The rotary periods and the masks of the biases must be what the model computes without them."""
    import torch

    notes = []
    for name, tensor in extras.items():
        tensor = tensor.float().flatten()
        if name.endswith("rope_embed.periods"):
            periods = _THETA ** (torch.arange(len(tensor)) / len(tensor))
            if not torch.allclose(tensor, periods, rtol=1e-2):  # may be stored in bf16
                raise ConfigError(
                    f"{name} is not that of the published models, whose periods grow from 1 to almost "
                    f"{_THETA:g}; another rotary base is not supported."
                )
        if name.endswith("bias_mask") and tensor.isnan().any():
            notes.append(
                f"{name} holds NaN, as before it is initialized. It is not used: keys have no bias, as in "
                "transformers and timm; the original code would give NaN."
            )
        elif name.endswith("bias_mask"):
            expected = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(len(tensor) // 3)
            if not torch.equal(tensor, expected):
                raise ConfigError(
                    f"{name} must mask the bias of the keys alone (1, 0 and 1 for q, k and v), but has other "
                    "values; use the file as it was published."
                )
    return notes


ORIGINAL = Family(
    "dinov3",
    "dinov3",
    "DINOv3 as first published",
    detect=Detection(
        anchors=("{w}{p}patch_embed.proj.weight", "{w}{p}storage_tokens", "{w}{p}rope_embed.periods"),
        without=("{w}projectors.*", "{w}{p}blocks.0.attn.wq.weight"),  # EUPE and Sapiens2
        prefixes=("", "backbone.", "teacher.backbone.", "student.backbone."),
    ),
    keys=KeyMap(
        rows=(
            row(("{w}{p}cls_token", "", "{w}{p}storage_tokens"), "prefix", tokens(3), parts="prefix"),
            row(B + "ls1.gamma", OURS + "scale1.weight"),
            row(B + "ls2.gamma", OURS + "scale2.weight"),
            *layer((B + "mlp.w1", B + "mlp.w2"), OURS + "mlp.fc1"),
            *layer(B + "mlp.w3", OURS + "mlp.fc2"),
            *_SHARED,
        ),
        extras=(
            *("{w}{p}mask_token", "{w}{p}rope_embed.periods", "{w}{p}local_cls_norm.*"),
            *("{w}{p}blocks.*.attn.qkv.bias_mask", "{w}*dino_head*", "{w}*ibot_head*"),
        ),
    ),
    profile=replace(
        HF.profile,
        choose=_choose_original,
        check_extras=_check_extras,
        follows="the original code: eps 1e-5, the class token after the last norm.",
    ),
)


def _read_timm(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The pool in timm's config.json: LingBot-Vision has DINOv3's tensors and pools the class token."""
    pools = {"token": "class", "avg": "mean"}
    pool = settings.get("global_pool")
    return {"pool": pools[pool]} if isinstance(pool, str) and pool in pools else {}


TIMM = Family(
    "timm-dinov3",
    "timm",
    "timm's DINOv3",
    detect=Detection(
        anchors=("{w}{p}patch_embed.proj.weight", "{w}{p}blocks.0.gamma_1", "{w}{p}reg_token"),
        without=("{w}{p}pos_embed", "{w}{p}mask_token"),
        prefixes=("", "visual.trunk.", "trunk."),
    ),
    keys=KeyMap(
        rows=(
            row(("{w}{p}cls_token", "", "{w}{p}reg_token"), "prefix", tokens(3), parts="prefix"),
            row(B + "gamma_1", OURS + "scale1.weight"),
            row(B + "gamma_2", OURS + "scale2.weight"),
            *layer((B + "mlp.fc1_g", B + "mlp.fc1_x"), OURS + "mlp.fc1", when=("mlp", "gated")),
            *_SHARED,
        )
    ),
    profile=replace(
        HF.profile,
        fields={**_FIELDS, "pool": "mean"},
        follows="timm: eps 1e-5, the mean of the patches after the last norm (the original takes the class "
        "token: pool=class).",
    ),
    writer=Writer(read_settings=_read_timm),
)

FAMILIES = (HF, ORIGINAL, TIMM)
