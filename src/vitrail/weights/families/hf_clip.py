"""The vision towers of transformers' CLIP and SigLIP, alone or in a file with the text's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.config import ViTConfig
from vitrail.errors import ConfigError
from vitrail.fields import show
from vitrail.weights.families.hf import (
    CHOICES,
    build,
    check_kind,
    common,
    folder,
    read_facts,
    unwrapped,
    vit_also,
    with_labels,
)
from vitrail.weights.layout import lead, tokens
from vitrail.weights.table import Family, both, row

if TYPE_CHECKING:
    from torch import Tensor

E, L, OURS = "{w}{p}embeddings.", "{w}{p}encoder.layers.{i}.", "blocks.{i}."
ROWS = (
    *both(E + "patch_embedding", "tokens.proj"),
    row((E + "class_embedding",), "prefix", tokens(1), parts="prefix"),
    row(E + "position_embedding.weight", "position.table"),
    *both("{w}{p}pre_layrnorm", "norm_pre"),  # their spelling
    *both(L + "layer_norm1", OURS + "norm1"),
    *both([f"{L}self_attn.{one}_proj" for one in "qkv"], OURS + "attention.qkv"),
    *both(L + "self_attn.out_proj", OURS + "attention.out"),
    *both(L + "layer_norm2", OURS + "norm2"),
    *both(L + "mlp.fc1", OURS + "mlp.fc1"),
    *both(L + "mlp.fc2", OURS + "mlp.fc2"),
)
LAST = both("{w}{p}post_layernorm", "norm")
PROJECTION = (row("{w}visual_projection.weight", "head.weight"),)
CLASSIFIER = both("{w}classifier", "head")
POOL = (  # SigLIP's, a block with a learned query
    row("{w}{p}head.probe", "pool.probe", lead(1)),
    row("{w}{p}head.attention.in_proj_weight", "pool.attention.qkv.weight"),
    row("{w}{p}head.attention.in_proj_bias", "pool.attention.qkv.bias"),
    *both("{w}{p}head.attention.out_proj", "pool.attention.out"),
    *both("{w}{p}head.layernorm", "pool.norm"),
    *both("{w}{p}head.mlp.fc1", "pool.mlp.fc1"),
    *both("{w}{p}head.mlp.fc2", "pool.mlp.fc2"),
)
TEXT = ("{w}text_model.*", "{w}text_projection.weight", "{w}logit_scale", "{w}logit_bias")
DEFAULTS: dict[str, dict[str, Any]] = {
    "clip": {"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"},
    "siglip": {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
}


def read_settings(settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """From a config.json of the vision tower, or of both: then the tower's settings are a part of it."""
    alone = f"{kind}_vision_model"
    if not check_kind(settings, (kind, alone)):
        return {}
    if settings["model_type"] == kind:
        # Files from before 2023 can have both, and transformers then goes by the second.
        parts = [settings.get(name) or {} for name in ("vision_config", "vision_config_dict")]
        for part in parts:
            if not isinstance(part, dict):
                raise ConfigError("vision_config must be an object.", show(part), "Repair config.json.")
        settings = {**parts[0], **parts[1]}
    return read_facts(settings, DEFAULTS[kind])


def words(config: ViTConfig, kind: str, model: str) -> dict[str, Any]:
    """config.json of a vision tower alone."""
    return {
        "architectures": [model],
        "model_type": f"{kind}_vision_model",
        **common(config),
        "intermediate_size": config.F,
    }


def clip_words(config: ViTConfig) -> dict[str, Any]:
    model = "CLIPVisionModelWithProjection" if config.classes else "CLIPVisionModel"
    more = {"projection_dim": config.classes} if config.classes else {}
    return words(config, "clip", model) | more


def siglip_words(config: ViTConfig) -> dict[str, Any]:
    return words(config, "siglip", "SiglipVisionModel")


def classifier_words(config: ViTConfig, kind: str, model: str) -> dict[str, Any]:
    """config.json of a classifier on the mean of the patches; it has no use for SigLIP's pool."""
    tower = {**words(config, kind, model), "vision_use_head": False}
    return {"architectures": [model], "model_type": kind, "vision_config": tower}


def clip_peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    model = build(clip_words(config), tower(state))
    if config.classes:
        return lambda pictures: model(pictures).image_embeds
    return lambda pictures: model(pictures).pooler_output


def siglip_peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    model = build(siglip_words(config), tower(state))
    return lambda pictures: model(pictures).pooler_output


def classifier_peer(
    config: ViTConfig, state: dict[str, Tensor], kind: str, model: str
) -> Callable[[Tensor], Tensor]:
    state = tower(state)
    for name in ("weight", "bias"):  # CLIP has this norm, and its classifier passes it by
        blank = state["vision_model.embeddings.patch_embedding.weight"].new_zeros(config.width)
        state.setdefault(f"vision_model.post_layernorm.{name}", blank)
    made = build({**classifier_words(config, kind, model), **with_labels(config, None)}, state)
    return lambda pictures: made(pictures).logits


def tower(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return unwrapped(state, "embeddings.patch_embedding.weight", "vision_model.")


def also(config: ViTConfig) -> list[str]:
    oblong = any(high != wide for high, wide in (config.pixels, config.patch_pixels))
    return ["pictures and patches are square"] * oblong + vit_also(config)


def clip_also(config: ViTConfig) -> list[str]:
    biased = config.classes > 0 and config.head_bias
    return also(config) + ["the projection has no bias"] * biased


def siglip_also(config: ViTConfig) -> list[str]:
    return also(config) + ["the vision tower has no classes"] * (config.classes > 0)


TOWER = {key: value for key, value in CHOICES.items() if key not in ("qkv_bias", "head_width")}

CLIP = Family(
    name="hf-clip",
    group="hf",
    title="the vision tower of transformers' CLIP",
    anchors=(
        E + "patch_embedding.weight",
        E + "class_embedding",
        "{w}{p}encoder.layers.0.layer_norm1.weight",
    ),
    prefixes=("vision_model.", ""),
    without=("*classifier.weight",),
    rows=(*ROWS, *LAST, *PROJECTION),
    extras=(*TEXT, E + "position_ids"),
    model_types=("clip", "clip_vision_model"),
    fields={"eps": 1e-5, "activation": "quick-gelu", "pool_norm": "after", "remainder": "cut"},
    resize={"method": "bicubic", "antialias": False},
    preprocess="clip",
    follows="transformers: quick GELU, eps 1e-5, unless config.json says otherwise, as OpenCLIP's does.",
    read_settings=partial(read_settings, kind="clip"),
    expresses={
        **TOWER,
        "rows": ("all", "class"),
        "embedding_bias": (False,),
        "norm_pre": (True,),
        "pool_norm": ("after",),
        "head_bias": (True, False),
    },
    also=clip_also,
    settings=partial(folder, words=clip_words),
    peer=clip_peer,
)

SIGLIP = Family(
    name="hf-siglip",
    group="hf",
    title="the vision tower of transformers' SigLIP",
    anchors=(
        E + "patch_embedding.weight",
        E + "position_embedding.weight",
        "{w}{p}encoder.layers.0.layer_norm1.weight",
    ),
    prefixes=("vision_model.", ""),
    without=(E + "class_embedding", "*classifier.weight"),
    rows=(*ROWS, *LAST, *POOL),
    extras=(*TEXT, E + "position_ids"),
    model_types=("siglip", "siglip_vision_model"),
    fields={"eps": 1e-6, "activation": "gelu-tanh", "remainder": "cut"},
    resize={"method": "bicubic", "antialias": False},
    preprocess="siglip",
    follows="transformers: GELU by tanh, eps 1e-6; without its pool, the mean of the patches is pooled.",
    read_settings=partial(read_settings, kind="siglip"),
    expresses={**TOWER, "class_token": (False,), "rows": ("all", "patches"), "pool": ("attention",)},
    also=siglip_also,
    settings=partial(folder, words=siglip_words),
    peer=siglip_peer,
)

# A classifier on top reads the mean of the patches. What the tower ends with otherwise stays beside.
CLIP_CLASSIFIER = replace(
    CLIP,
    name="hf-clip-classifier",
    title="transformers' classifier on CLIP",
    anchors=(*CLIP.anchors, "{w}classifier.weight"),
    without=(),
    rows=(*ROWS, *CLASSIFIER),
    extras=(*CLIP.extras, "{w}{p}post_layernorm.*"),
    fields={**CLIP.fields, "pool": "mean", "pool_norm": "none"},
    expresses=None,
    settings=None,
    peer=partial(classifier_peer, kind="clip", model="CLIPForImageClassification"),
)
SIGLIP_CLASSIFIER = replace(
    SIGLIP,
    name="hf-siglip-classifier",
    title="transformers' classifier on SigLIP",
    anchors=(*SIGLIP.anchors, "{w}classifier.weight"),
    without=(E + "class_embedding",),
    rows=(*ROWS, *LAST, *CLASSIFIER),
    extras=(*SIGLIP.extras, "{w}{p}head.*"),
    fields={**SIGLIP.fields, "pool": "mean"},
    expresses={**TOWER, "class_token": (False,), "rows": ("all", "patches"), "pool": ("mean",)},
    also=also,
    settings=partial(
        folder, words=partial(classifier_words, kind="siglip", model="SiglipForImageClassification")
    ),
    peer=partial(classifier_peer, kind="siglip", model="SiglipForImageClassification"),
)

FAMILIES = (CLIP_CLASSIFIER, SIGLIP_CLASSIFIER, CLIP, SIGLIP)
