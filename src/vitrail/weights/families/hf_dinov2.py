"""transformers' DINOv2, with and without registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.model.config import ViTConfig
from vitrail.weights.families.family import Detection, KeyMap, Profile, Writer
from vitrail.weights.families.hf import (
    ATTENTION,
    EXPRESSES,
    HEAD,
    OURS,
    PROJECTION,
    VIT,
    E,
    L,
    encoder_rows,
    folder_settings,
    load_peer,
    read_settings,
    respellings,
    shared_keys,
)
from vitrail.weights.families.key_rows import layer, row
from vitrail.weights.families.match import FamilyMatch

if TYPE_CHECKING:
    pass

ROWS = encoder_rows(
    (row(L + "layer_scale1.lambda1", OURS + "scale1.weight"),),
    layer(L + "mlp.fc1", OURS + "mlp.fc1", when=("mlp", "plain")),
    layer(L + "mlp.fc2", OURS + "mlp.fc2", when=("mlp", "plain")),
    layer(L + "mlp.weights_in", OURS + "mlp.fc1"),
    layer((L + "mlp.gate_proj", L + "mlp.up_proj"), OURS + "mlp.fc1"),
    layer(L + "mlp.weights_out", OURS + "mlp.fc2"),
    (row(L + "layer_scale2.lambda1", OURS + "scale2.weight"),),
    HEAD,
    norms=("norm1", "norm2"),
)
_ZEROS = {E + "mask_token": lambda config: (1, config.width)}  # no image is masked
DINOV2_EXPRESSES = {**EXPRESSES, "mlp": ("plain", "gated"), "pool": ("class", "class-mean")}


def _config_json(config: ViTConfig) -> dict[str, Any]:
    """config.json of a DINOv2 without labels."""
    kind, model = (
        ("dinov2_with_registers", "Dinov2WithRegisters") if config.registers else ("dinov2", "Dinov2")
    )
    more = {} if config.heads_width == config.width else {"head_dim": config.d}
    return {
        "architectures": [
            f"{model}ForImageClassification" if config.pool == "class-mean" else f"{model}Model"
        ],
        "model_type": kind,
        **shared_keys(config),
        "mlp_ratio": _mlp_ratio(config),
        "use_swiglu_ffn": config.mlp == "gated",
        "qkv_bias": config.qkv_bias == "all",
        "layerscale_value": config.layer_scale,
        **({"num_register_tokens": config.registers} if config.registers else {}),
        **more,
    }


def _mlp_ratio(config: ViTConfig) -> int | None:
    """The integer mlp_ratio that gives DINOv2's MLP this width; None if there is none."""

    def width(ratio: int) -> int:
        plain = config.width * ratio
        return (plain * 2 // 3 + 7) // 8 * 8 if config.mlp == "gated" else plain

    near = round(config.F / config.width * (1.5 if config.mlp == "gated" else 1))
    return next(
        (ratio for ratio in (near, near - 1, near + 1) if ratio > 0 and width(ratio) == config.F), None
    )


def _unsupported(config: ViTConfig) -> list[str]:
    """What transformers' DINOv2 cannot be configured for."""
    reasons = []
    if config.layer_scale is None:
        reasons.append("its blocks always have a layer scale")
    if config.pool == "class" and config.classes:
        reasons.append("its head takes the class token and the mean of the patches, concatenated")
    if config.pixels[0] != config.pixels[1]:
        reasons.append("it takes the positions of a rectangular image for those of a square one")
    if _mlp_ratio(config) is None:
        reasons.append(f"its MLP width follows from an integer mlp_ratio, and {config.F} does not")
    if config.mlp == "gated" and config.activation != "silu":
        reasons.append("its gated MLP always has silu")
    return reasons


def _choose(match: FamilyMatch) -> Mapping[str, Any]:
    return {"activation": "silu"} if match.gated else {}


def _read_settings(settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """As for a ViT; but SwiGLU has silu whatever hidden_act is, and a classifier its own pool."""
    fields = read_settings(settings, {kind: {"layer_norm_eps": 1e-6}})
    if fields and settings.get("use_swiglu_ffn") is True:
        fields["activation"] = "silu"
    names = settings.get("architectures")
    if fields and isinstance(names, list) and any("ForImageClassification" in str(name) for name in names):
        fields["pool"] = "class-mean"
    return fields


DINOV2 = replace(
    VIT,
    name="hf-dinov2",
    title="transformers' DINOv2",
    detect=Detection(
        anchors=(f"{PROJECTION}.weight", E + "cls_token", "{w}{p}encoder.layer.0.norm1.weight"),
        without=(E + "register_tokens",),
        prefixes=("dinov2.", ""),
        model_types=("dinov2",),
    ),
    keys=KeyMap(
        rows=ROWS,
        extras=(E + "mask_token",),
        respell=respellings({**ATTENTION, ".mlp.down_proj.": ".mlp.weights_out."}),
        zeros=_ZEROS,
    ),
    profile=Profile(
        fields={"eps": 1e-6, "activation": "gelu", "remainder": "cut"},
        choose=_choose,
        resize=VIT.profile.resize,
        preprocess="dinov2",
        follows="transformers: positions resized by bicubic, without antialiasing and without the original's "
        "offset.",
    ),
    writer=Writer(
        expresses={**DINOV2_EXPRESSES, "rows": ("all", "class")},
        unsupported=_unsupported,
        settings=partial(folder_settings, config_json=_config_json),
        read_settings=partial(_read_settings, kind="dinov2"),
        peer=partial(load_peer, config_json=_config_json, zeros=_ZEROS),
    ),
)

REGISTERS = replace(
    DINOV2,
    name="hf-dinov2-registers",
    title="transformers' DINOv2 with registers",
    detect=Detection(
        anchors=(*DINOV2.detect.anchors, E + "register_tokens"),
        prefixes=("dinov2_with_registers.", ""),
        model_types=("dinov2_with_registers",),
    ),
    profile=replace(
        DINOV2.profile,
        fields={**DINOV2.profile.fields, "rows": "class"},
        resize={"method": "bicubic", "antialias": True},
        follows="transformers: positions resized by bicubic with antialiasing.",
    ),
    writer=replace(
        DINOV2.writer,
        expresses={**DINOV2_EXPRESSES, "rows": ("class",), "registers": ...},
        unsupported=lambda config: (
            _unsupported(config) + ["it has at least one register"] * (config.registers == 0)
        ),
        read_settings=partial(_read_settings, kind="dinov2_with_registers"),
    ),
)

FAMILIES = (REGISTERS, DINOV2)
