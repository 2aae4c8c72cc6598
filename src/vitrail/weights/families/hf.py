"""transformers' ViT, DeiT and the encoder of ViT-MAE. DINOv2 is in hf_dinov2.py.

Files on the hub and from `save_pretrained` have one spelling, `model.state_dict()` of transformers 5 has
another. The tables have the hub's spelling, which every version reads; `respell` maps the other to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError
from vitrail.base.fields import as_integer, short_repr
from vitrail.model.config import ViTConfig
from vitrail.weights.families.family import Detection, Family, KeyMap, Profile, Writer
from vitrail.weights.families.key_rows import Row, Shape, layer, lead, row, tokens

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.images.preprocess import Preprocess

E, L, OURS = "{w}{p}embeddings.", "{w}{p}encoder.layer.{i}.", "blocks.{i}."
QKV = tuple(f"{L}attention.attention.{name}" for name in ("query", "key", "value"))
PREFIX = (E + "cls_token", E + "distillation_token", E + "register_tokens")
PROJECTION = E + "patch_embeddings.projection"


def encoder_rows(*more: tuple[Row, ...], norms: tuple[str, str]) -> tuple[Row, ...]:
    """The rows that all of these models share, and the given ones."""
    return (
        *layer(PROJECTION, "tokens.proj"),
        row(PREFIX, "prefix", tokens(3), parts="prefix"),
        row(E + "position_embeddings", "position.table", lead(1)),
        *layer(L + norms[0], OURS + "norm1"),
        *layer(QKV, OURS + "attention.qkv"),
        *layer(L + "attention.output.dense", OURS + "attention.out"),
        *layer(L + norms[1], OURS + "norm2"),
        *(row for group in more for row in group),
        *layer("{w}{p}layernorm", "norm"),
    )


VIT_ROWS = encoder_rows(
    layer(L + "intermediate.dense", OURS + "mlp.fc1"),
    layer(L + "output.dense", OURS + "mlp.fc2"),
    norms=("layernorm_before", "layernorm_after"),
)
HEAD = layer("{w}classifier", "head")

ATTENTION = {
    ".attention.q_proj.": ".attention.attention.query.",
    ".attention.k_proj.": ".attention.attention.key.",
    ".attention.v_proj.": ".attention.attention.value.",
    ".attention.o_proj.": ".attention.output.dense.",
}
VIT_NAMES = {**ATTENTION, ".mlp.fc1.": ".intermediate.dense.", ".mlp.fc2.": ".output.dense."}


def respellings(names: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """From the names of transformers 5 to the hub's spelling, see `KeyMap.respell`."""
    encoder = r"(^|\.)layers\.(\d+)\.", r"\1encoder.layer.\2."
    return encoder, *((re.escape(new), old) for new, old in names.items())


# ---- config.json ----------------------------------------------------------------------------

ACTIVATIONS = {
    **{"gelu": "gelu", "gelu_pytorch_tanh": "gelu-tanh", "gelu_new": "gelu-tanh", "quick_gelu": "quick-gelu"},
    **{"relu": "relu", "silu": "silu", "swish": "silu"},
}
_NONE: Mapping[str, Any] = {}
# transformers' own defaults for keys that a config.json omits; all model types share these.
_DEFAULTS = {
    **{"num_attention_heads": 12, "num_hidden_layers": 12, "image_size": 224},
    **{"layer_norm_eps": 1e-12, "hidden_act": "gelu"},
}


def read_settings(settings: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What shapes do not show, from a config.json of one of these model types, with their defaults.

    The settings of a model with two towers are refused without those of the image tower, under vision_config.
    """
    kind = settings.get("model_type")
    if kind is None:
        return {}
    if kind not in tuple(defaults):
        raise ConfigError(
            f"config.json has model_type={short_repr(kind)}, but the weights are of "
            f"{' or '.join(defaults)}; pass the weight file instead of its folder to ignore config.json."
        )
    if f"{kind}_vision_model" in defaults:
        # Files from before 2023 can have both; transformers then uses the second.
        parts = [settings.get(name) or {} for name in ("vision_config", "vision_config_dict")]
        for part in parts:
            if not isinstance(part, dict):
                raise ConfigError(
                    f"vision_config in config.json must be an object, not {short_repr(part)}; correct it."
                )
        settings = {**parts[0], **parts[1]}
    return _read_fields(settings, defaults[kind])


def towers(kind: str, **defaults: Any) -> dict[str, dict[str, Any]]:
    """Share the defaults of a vision tower between the tower alone and the model with both towers."""
    return {kind: defaults, f"{kind}_vision_model": defaults}


def _read_fields(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of our config from the keys of transformers' config.json."""
    settings = {**_DEFAULTS, **defaults, **settings}
    activation, size = settings["hidden_act"], settings["image_size"]
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ConfigError(
            f"config.json has hidden_act={short_repr(activation)}, which is not one of "
            f"{', '.join(ACTIVATIONS)}; pass the weight file instead of its folder, and activation=."
        )
    sides = [as_integer("image_size", side, 1) for side in (size if isinstance(size, list) else [size])]
    return {
        "heads": as_integer("num_attention_heads", settings["num_attention_heads"], 1),
        "depth": as_integer("num_hidden_layers", settings["num_hidden_layers"], 1),
        "size": tuple(sides) if isinstance(size, list) else sides[0],
        "eps": settings.get("rms_norm_eps", settings["layer_norm_eps"]),
        "activation": ACTIVATIONS[activation],
    }


def shared_keys(config: ViTConfig) -> dict[str, Any]:
    """The keys of config.json that all these model types share."""
    (H, W), (P, Q) = config.pixels, config.patch_pixels
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}  # the first of two spellings
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": names[config.activation],
        "layer_norm_eps": config.eps,
        "image_size": H if H == W else [H, W],
        "patch_size": P if P == Q else [P, Q],
        "num_channels": config.channels,
    }


def label_keys(config: ViTConfig, labels: list[str] | None) -> dict[str, Any]:
    """The class names in config.json; LABEL_0, LABEL_1, ... is transformers' default."""
    names = labels or [f"LABEL_{number}" for number in range(config.classes)]
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _vit_config(config: ViTConfig) -> dict[str, Any]:
    """config.json of a ViT or DeiT without labels. Without classes, the logits are the class token."""
    kind, model = "vit", "ViTForImageClassification"
    if config.distillation_token:
        teacher = "WithTeacher" if config.head == "distilled" else ""
        kind, model = "deit", f"DeiTForImageClassification{teacher}"
    more = {} if config.heads_width == config.width else {"head_dim": config.d}
    return {
        "architectures": [model],
        "model_type": kind,
        **shared_keys(config),
        "intermediate_size": config.F,
        "qkv_bias": config.qkv_bias == "all",
        **more,
    }


def folder_settings(
    config: ViTConfig,
    preprocess: Preprocess,
    labels: list[str] | None,
    config_json: Callable[[ViTConfig], dict[str, Any]],
) -> dict[str, Any]:
    """The JSON files beside the weights. transformers always rounds the start of a center crop down."""
    from vitrail.images.published_preprocess import to_hf

    preprocess = replace(preprocess, crop_rounding="down" if preprocess.crops else "even")
    return {
        "config.json": {**config_json(config), **label_keys(config, labels)},
        "preprocessor_config.json": to_hf(preprocess),
    }


# ---- their own models -----------------------------------------------------------------------


def load_peer(
    config: ViTConfig,
    state: Mapping[str, Tensor],
    config_json: Callable[[ViTConfig], dict[str, Any]],
    base: str | None = None,
    anchor: str = "embeddings.cls_token",
    zeros: Mapping[str, Callable[[ViTConfig], Shape]] = _NONE,
    inputs: Callable[[Tensor, ViTConfig], dict[str, Tensor]] = lambda images, _: {"pixel_values": images},
) -> Callable[[Tensor], Tensor]:
    """transformers' own model, loaded by its own loader with exactly these tensors: images to its result.

    Args:
        base: transformers' prefix of the tower, by default the model type. What a wrapper has put before it
            is removed.
        anchor: a name without these prefixes that the state has.
        zeros: tensors that its loader requires and no image needs, as in `KeyMap`.
    """
    import torch
    import transformers

    settings = {**config_json(config), **label_keys(config, None)}
    before = next(name for name in state if name.endswith(anchor)).removesuffix(anchor)
    outer = before.removesuffix(f"{settings['model_type']}." if base is None else base)
    state = {name.removeprefix(outer): tensor for name, tensor in state.items()}
    prefix = before.removeprefix(outer)
    for name, shape in zeros.items():
        state.setdefault(name.format(w="", p=prefix), state[prefix + anchor].new_zeros(shape(config)))
    with no_progress_bar():
        model, report = getattr(transformers, settings["architectures"][0]).from_pretrained(
            None,
            config=transformers.AutoConfig.for_model(**settings),
            state_dict=state,
            dtype=torch.float32,
            output_loading_info=True,
        )
    if wrong := {key: sorted(map(str, names)) for key, names in report.items() if names}:
        raise RuntimeError(f"its loader reports {wrong}")
    model.eval()

    def compute(images: Tensor) -> Tensor:
        """Logits; or the embedding, or the pooled vector of a model without classes."""
        out = model(**inputs(images, config))
        results = [out.get(name) for name in ("logits", "image_embeds", "pooler_output")]
        tokens = out.last_hidden_state if results == [None] * 3 else None
        if tokens is not None:
            return tokens[:, 0] if config.class_token else tokens.mean(dim=1)
        return next(result for result in results if result is not None)

    return compute


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Turn off transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _mae_config(config: ViTConfig) -> dict[str, Any]:
    """The encoder without masking. It shuffles the patches; the class token does not depend on the order."""
    mae = {"architectures": ["ViTMAEModel"], "model_type": "vit_mae", "mask_ratio": 0.0}
    return {**_vit_config(config), **mae}


# ---- the families ---------------------------------------------------------------------------


def no_layer_scale(config: ViTConfig) -> list[str]:
    return ["it has no layer scale"] * (config.layer_scale is not None)


EXPRESSES = {
    **{"eps": ..., "head_width": ..., "qkv_bias": ("all", "none"), "remainder": ("refuse", "cut")},
    "activation": tuple(dict.fromkeys(ACTIVATIONS.values())),
}

VIT = Family(
    "hf-vit",
    "hf",
    "transformers' ViT",
    detect=Detection(
        anchors=(f"{PROJECTION}.weight", E + "cls_token", "{w}{p}encoder.layer.0.layernorm_before.weight"),
        without=(E + "distillation_token", "*decoder.decoder_*"),
        prefixes=("vit.", ""),
        model_types=("vit", "vit_msn"),
    ),
    keys=KeyMap(
        rows=(*VIT_ROWS, *HEAD),
        extras=("{w}{p}pooler.*", E + "mask_token", "{w}decoder.0.*"),
        respell=respellings(VIT_NAMES),
    ),
    profile=Profile(
        fields={"eps": 1e-12, "activation": "gelu", "remainder": "cut"},
        resize={"method": "bicubic", "antialias": False},
        preprocess="google",
        follows="transformers: exact GELU, eps 1e-12, positions resized by bicubic without antialiasing.",
    ),
    writer=Writer(
        expresses={**EXPRESSES, "rows": ("all", "class")},
        unsupported=no_layer_scale,
        settings=partial(folder_settings, config_json=_vit_config),
        read_settings=partial(read_settings, defaults={"vit": {}, "vit_msn": {"layer_norm_eps": 1e-6}}),
        peer=partial(load_peer, config_json=_vit_config),
    ),
)

DEIT = replace(
    VIT,
    name="hf-deit",
    title="transformers' DeiT with its distillation token",
    detect=Detection(
        anchors=(*VIT.detect.anchors, E + "distillation_token"),
        prefixes=("deit.", ""),
        model_types=("deit",),
    ),
    keys=replace(
        VIT.keys,
        rows=(
            *VIT_ROWS,
            *layer("{w}cls_classifier", "head.classes"),
            *layer("{w}distillation_classifier", "head.distillation"),
            *HEAD,
        ),
    ),
    profile=replace(VIT.profile, preprocess="imagenet"),
    writer=replace(
        VIT.writer,
        expresses={**EXPRESSES, "distillation_token": (True,), "head": ("linear", "distilled")},
        read_settings=partial(read_settings, defaults={"deit": {}}),
    ),
)

MAE = replace(
    VIT,
    name="hf-mae",
    title="transformers' ViT-MAE, its encoder",
    detect=replace(VIT.detect, without=(E + "distillation_token",), model_types=("vit_mae",)),
    keys=replace(VIT.keys, rows=VIT_ROWS, extras=("{w}decoder.*",)),
    profile=replace(VIT.profile, preprocess="imagenet"),
    writer=Writer(
        read_settings=partial(read_settings, defaults={"vit_mae": {}}),
        peer=partial(load_peer, config_json=_mae_config, base="vit."),
    ),
)
