"""transformers' DINOv2, with and without registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.config import ViTConfig
from vitrail.weights.families.hf import (
    ATTENTION,
    CHOICES,
    HEAD,
    OURS,
    PROJECTION,
    VIT,
    E,
    L,
    build,
    common,
    folder,
    read_settings,
    respell,
    rows,
    unwrapped,
    with_labels,
)
from vitrail.weights.table import Found, both, row

if TYPE_CHECKING:
    from torch import Tensor

ROWS = rows(
    (row(L + "layer_scale1.lambda1", OURS + "scale1.weight"),),
    both(L + "mlp.fc1", OURS + "mlp.fc1", when=("mlp", "plain")),
    both(L + "mlp.fc2", OURS + "mlp.fc2", when=("mlp", "plain")),
    both(L + "mlp.weights_in", OURS + "mlp.fc1"),
    both((L + "mlp.gate_proj", L + "mlp.up_proj"), OURS + "mlp.fc1"),
    both(L + "mlp.weights_out", OURS + "mlp.fc2"),
    (row(L + "layer_scale2.lambda1", OURS + "scale2.weight"),),
    HEAD,
    norms=("norm1", "norm2"),
)
NAMES = {**ATTENTION, ".mlp.down_proj.": ".mlp.weights_out."}
EXPRESSED = {**CHOICES, "mlp": ("plain", "gated"), "pool": ("class", "class-mean")}


def words(config: ViTConfig) -> dict[str, Any]:
    """config.json of a DINOv2, all but the labels."""
    kind, model = (
        ("dinov2_with_registers", "Dinov2WithRegisters") if config.registers else ("dinov2", "Dinov2")
    )
    more = {} if config.heads_width == config.width else {"head_dim": config.d}
    return {
        "architectures": [
            f"{model}ForImageClassification" if config.pool == "class-mean" else f"{model}Model"
        ],
        "model_type": kind,
        **common(config),
        "mlp_ratio": ratio_of(config),
        "use_swiglu_ffn": config.mlp == "gated",
        "qkv_bias": config.qkv_bias == "all",
        "layerscale_value": config.layer_scale,
        **({"num_register_tokens": config.registers} if config.registers else {}),
        **more,
    }


def ratio_of(config: ViTConfig) -> int | None:
    """The mlp_ratio, a whole number, that gives DINOv2's MLP its width; None where there is none."""

    def width(ratio: int) -> int:
        plain = config.width * ratio
        return (plain * 2 // 3 + 7) // 8 * 8 if config.mlp == "gated" else plain

    near = round(config.F / config.width * (1.5 if config.mlp == "gated" else 1))
    return next(
        (ratio for ratio in (near, near - 1, near + 1) if ratio > 0 and width(ratio) == config.F), None
    )


def peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    said = {**words(config), **with_labels(config, None)}
    state = unwrapped(state, "embeddings.cls_token", f"{said['model_type']}.")
    place = next(name for name in state if name.endswith("embeddings.cls_token"))
    blank = state[place].new_zeros(1, config.width)
    state.setdefault(place.replace("cls_token", "mask_token"), blank)  # no picture is masked
    model = build(said, state)
    if config.pool == "class":
        return lambda pictures: model(pictures).pooler_output
    return lambda pictures: model(pictures).logits


def also(config: ViTConfig) -> list[str]:
    """What transformers' DINOv2 has no setting for."""
    reasons = []
    if config.layer_scale is None:
        reasons.append("every block has a layer scale")
    if config.pool == "class" and config.classes:
        reasons.append("classes are read from the class token and the mean of the patches side by side")
    if config.pixels[0] != config.pixels[1]:
        reasons.append("positions of an oblong picture are taken for those of a square one")
    if ratio_of(config) is None:
        reasons.append(f"the MLP's width follows from a whole mlp_ratio, and {config.F} does not")
    if config.mlp == "gated" and config.activation != "silu":
        reasons.append("a gated MLP has silu")
    return reasons


def choose(found: Found) -> Mapping[str, Any]:
    gated = found.has(L + "mlp.weights_in.weight") or found.has(L + "mlp.gate_proj.weight")
    return {"activation": "silu"} if gated else {}


def settings_of(settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """As of a ViT; but a SwiGLU has silu whatever hidden_act says, and a classifier its own pool."""
    fields = read_settings(settings, {kind: 1e-6})
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
    anchors=(f"{PROJECTION}.weight", E + "cls_token", "{w}{p}encoder.layer.0.norm1.weight"),
    prefixes=("dinov2.", ""),
    without=(E + "register_tokens",),
    rows=ROWS,
    extras=(E + "mask_token",),
    blanks={E + "mask_token": lambda config: (1, config.width)},
    respell=partial(respell, names=NAMES),
    model_types=("dinov2",),
    fields={"eps": 1e-6, "activation": "gelu", "remainder": "cut"},
    choose=choose,
    preprocess="dinov2",
    follows="transformers: positions resized by bicubic without antialias and the original's offset.",
    read_settings=partial(settings_of, kind="dinov2"),
    expresses={**EXPRESSED, "rows": ("all", "class")},
    also=also,
    settings=partial(folder, words=words),
    peer=peer,
)

REGISTERS = replace(
    DINOV2,
    name="hf-dinov2-registers",
    title="transformers' DINOv2 with registers",
    anchors=(*DINOV2.anchors, E + "register_tokens"),
    prefixes=("dinov2_with_registers.", ""),
    without=(),
    model_types=("dinov2_with_registers",),
    fields={**DINOV2.fields, "rows": "class"},
    resize={"method": "bicubic", "antialias": True},
    follows="transformers: positions resized by bicubic with antialias.",
    read_settings=partial(settings_of, kind="dinov2_with_registers"),
    expresses={**EXPRESSED, "rows": ("class",), "registers": ...},
    also=lambda config: also(config) + ["there is at least one register"] * (config.registers == 0),
)

FAMILIES = (REGISTERS, DINOV2)
