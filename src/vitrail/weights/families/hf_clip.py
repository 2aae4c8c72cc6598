"""The vision towers of transformers' CLIP, SigLIP and SigLIP 2, alone or in a file with the text tower.

In SigLIP 2 NaFlex (Tschannen et al. 2025) images keep their aspect ratio: the patch projection is a matrix on
flat patches, and the 16 x 16 positions are resized for each image. The SigLIP 2 models of a fixed size have
SigLIP's own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError
from vitrail.base.fields import short_repr
from vitrail.model.config import ViTConfig
from vitrail.weights.families.family import (
    Detection,
    Family,
    KeyMap,
    Profile,
    Writer,
    layer,
    lead,
    patch_rows,
    row,
    tokens,
)
from vitrail.weights.families.hf import (
    EXPRESSES,
    build_peer,
    check_model_type,
    folder_settings,
    label_keys,
    no_layer_scale,
    read_fields,
    shared_keys,
    strip_wrapper,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.images.preprocess import Preprocess

E, L, OURS = "{w}{p}embeddings.", "{w}{p}encoder.layers.{i}.", "blocks.{i}."
ROWS = (
    *layer(E + "patch_embedding", "tokens.proj"),
    row(E + "class_embedding", "prefix", tokens(1), parts="prefix"),
    row(E + "position_embedding.weight", "position.table"),
    *layer("{w}{p}pre_layrnorm", "norm_pre"),  # their spelling
    *layer(L + "layer_norm1", OURS + "norm1"),
    *layer([f"{L}self_attn.{name}_proj" for name in "qkv"], OURS + "attention.qkv"),
    *layer(L + "self_attn.out_proj", OURS + "attention.out"),
    *layer(L + "layer_norm2", OURS + "norm2"),
    *layer(L + "mlp.fc1", OURS + "mlp.fc1"),
    *layer(L + "mlp.fc2", OURS + "mlp.fc2"),
)
LAST = layer("{w}{p}post_layernorm", "norm")
PROJECTION = (row("{w}visual_projection.weight", "head.weight"),)
CLASSIFIER = layer("{w}classifier", "head")
POOL = (  # SigLIP's attention pool
    row("{w}{p}head.probe", "pool.probe", lead(1)),
    row("{w}{p}head.attention.in_proj_weight", "pool.attention.qkv.weight"),
    row("{w}{p}head.attention.in_proj_bias", "pool.attention.qkv.bias"),
    *layer("{w}{p}head.attention.out_proj", "pool.attention.out"),
    *layer("{w}{p}head.layernorm", "pool.norm"),
    *layer("{w}{p}head.mlp.fc1", "pool.mlp.fc1"),
    *layer("{w}{p}head.mlp.fc2", "pool.mlp.fc2"),
)
TEXT = ("{w}text_model.*", "{w}text_projection.weight", "{w}logit_scale", "{w}logit_bias")
DEFAULTS: dict[str, dict[str, Any]] = {
    "clip": {"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"},
    "siglip": {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
    "siglip2": {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
}


def read_tower_settings(settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """From the config.json of the vision tower, or of both towers, where it is under vision_config."""
    alone = f"{kind}_vision_model"
    if not check_model_type(settings, (kind, alone)):
        return {}
    if settings["model_type"] == kind:
        # Files from before 2023 can have both; transformers then uses the second.
        parts = [settings.get(name) or {} for name in ("vision_config", "vision_config_dict")]
        for part in parts:
            if not isinstance(part, dict):
                raise ConfigError(
                    f"vision_config in config.json must be an object, not {short_repr(part)}; correct it."
                )
        settings = {**parts[0], **parts[1]}
    return read_fields(settings, DEFAULTS[kind])


def _tower_config(config: ViTConfig, kind: str, model: str) -> dict[str, Any]:
    """config.json of a vision tower alone."""
    return {
        "architectures": [model],
        "model_type": f"{kind}_vision_model",
        **shared_keys(config),
        "intermediate_size": config.F,
    }


def _clip_config(config: ViTConfig) -> dict[str, Any]:
    model = "CLIPVisionModelWithProjection" if config.classes else "CLIPVisionModel"
    more = {"projection_dim": config.classes} if config.classes else {}
    return _tower_config(config, "clip", model) | more


def _siglip_config(config: ViTConfig) -> dict[str, Any]:
    return _tower_config(config, "siglip", "SiglipVisionModel")


def _classifier_config(config: ViTConfig, kind: str, model: str) -> dict[str, Any]:
    """config.json of a classifier on the mean of the patches, without SigLIP's attention pool."""
    tower = {**_tower_config(config, kind, model), "vision_use_head": False}
    return {"architectures": [model], "model_type": kind, "vision_config": tower}


def _clip_peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    model = build_peer(_clip_config(config), strip_tower(state))
    if config.classes:
        return lambda images: model(images).image_embeds
    return lambda images: model(images).pooler_output


def _siglip_peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    model = build_peer(_siglip_config(config), strip_tower(state))
    return lambda images: model(images).pooler_output


def _classifier_peer(
    config: ViTConfig, state: dict[str, Tensor], kind: str, model: str
) -> Callable[[Tensor], Tensor]:
    state = strip_tower(state)
    for name in ("weight", "bias"):  # CLIP has this norm, but its classifier does not use it
        zeros = state["vision_model.embeddings.patch_embedding.weight"].new_zeros(config.width)
        state.setdefault(f"vision_model.post_layernorm.{name}", zeros)
    peer = build_peer({**_classifier_config(config, kind, model), **label_keys(config, None)}, state)
    return lambda images: peer(images).logits


def strip_tower(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of the tower alone."""
    return strip_wrapper(state, "embeddings.patch_embedding.weight", "vision_model.")


def _unsupported(config: ViTConfig) -> list[str]:
    rectangular = any(high != wide for high, wide in (config.pixels, config.patch_pixels))
    return ["its images and patches are square"] * rectangular + no_layer_scale(config)


def _clip_unsupported(config: ViTConfig) -> list[str]:
    biased = config.classes > 0 and config.head_bias
    return _unsupported(config) + ["its projection has no bias"] * biased


def _siglip_unsupported(config: ViTConfig) -> list[str]:
    return _unsupported(config) + ["its vision tower has no classes"] * (config.classes > 0)


TOWER_EXPRESSES = {key: value for key, value in EXPRESSES.items() if key not in ("qkv_bias", "head_width")}

CLIP = Family(
    "hf-clip",
    "hf",
    "the vision tower of transformers' CLIP",
    detect=Detection(
        anchors=(
            E + "patch_embedding.weight",
            E + "class_embedding",
            "{w}{p}encoder.layers.0.layer_norm1.weight",
        ),
        without=("*classifier.weight",),
        prefixes=("vision_model.", ""),
        model_types=("clip", "clip_vision_model"),
    ),
    keys=KeyMap(rows=(*ROWS, *LAST, *PROJECTION), extras=(*TEXT, E + "position_ids")),
    profile=Profile(
        fields={"eps": 1e-5, "activation": "quick-gelu", "pool_norm": "after", "remainder": "cut"},
        resize={"method": "bicubic", "antialias": False},
        preprocess="clip",
        follows="transformers: QuickGELU, eps 1e-5, unless config.json has others, as OpenCLIP's does.",
    ),
    writer=Writer(
        expresses={
            **TOWER_EXPRESSES,
            "rows": ("all", "class"),
            "embedding_bias": (False,),
            "norm_pre": (True,),
            "pool_norm": ("after",),
            "head_bias": (True, False),
        },
        unsupported=_clip_unsupported,
        settings=partial(folder_settings, config_json=_clip_config),
        read_settings=partial(read_tower_settings, kind="clip"),
        peer=_clip_peer,
    ),
)

SIGLIP = Family(
    "hf-siglip",
    "hf",
    "the vision tower of transformers' SigLIP, and SigLIP 2 of a fixed size",
    detect=Detection(
        anchors=(
            E + "patch_embedding.weight",
            E + "position_embedding.weight",
            "{w}{p}encoder.layers.0.layer_norm1.weight",
        ),
        without=(E + "class_embedding", "*classifier.weight"),
        prefixes=("vision_model.", ""),
        axes={E + "patch_embedding.weight": 4},
        model_types=("siglip", "siglip_vision_model"),
    ),
    keys=KeyMap(rows=(*ROWS, *LAST, *POOL), extras=(*TEXT, E + "position_ids")),
    profile=Profile(
        fields={"eps": 1e-6, "activation": "gelu-tanh", "remainder": "cut"},
        resize={"method": "bicubic", "antialias": False},
        preprocess="siglip",
        follows="transformers: tanh GELU, eps 1e-6; without an attention pool, the mean of the patches is "
        "pooled.",
    ),
    writer=Writer(
        expresses={
            **TOWER_EXPRESSES,
            "class_token": (False,),
            "rows": ("all", "patches"),
            "pool": ("attention",),
        },
        unsupported=_siglip_unsupported,
        settings=partial(folder_settings, config_json=_siglip_config),
        read_settings=partial(read_tower_settings, kind="siglip"),
        peer=_siglip_peer,
    ),
)

# A classifier takes the mean of the patches. The tower's own last layers are kept as extras.
CLIP_CLASSIFIER = replace(
    CLIP,
    name="hf-clip-classifier",
    title="transformers' classifier on CLIP",
    detect=replace(CLIP.detect, anchors=(*CLIP.detect.anchors, "{w}classifier.weight"), without=()),
    keys=KeyMap(rows=(*ROWS, *CLASSIFIER), extras=(*CLIP.keys.extras, "{w}{p}post_layernorm.*")),
    profile=replace(CLIP.profile, fields={**CLIP.profile.fields, "pool": "mean", "pool_norm": "none"}),
    writer=Writer(
        read_settings=CLIP.writer.read_settings,
        peer=partial(_classifier_peer, kind="clip", model="CLIPForImageClassification"),
    ),
)
_SIGLIP_NAMES: Any = {"kind": "siglip", "model": "SiglipForImageClassification"}
SIGLIP_CLASSIFIER = replace(
    SIGLIP,
    name="hf-siglip-classifier",
    title="transformers' classifier on SigLIP",
    detect=replace(
        SIGLIP.detect,
        anchors=(*SIGLIP.detect.anchors, "{w}classifier.weight"),
        without=(E + "class_embedding",),
    ),
    keys=KeyMap(rows=(*ROWS, *LAST, *CLASSIFIER), extras=(*SIGLIP.keys.extras, "{w}{p}head.*")),
    profile=replace(SIGLIP.profile, fields={**SIGLIP.profile.fields, "pool": "mean"}),
    writer=replace(
        SIGLIP.writer,
        expresses={**TOWER_EXPRESSES, "class_token": (False,), "rows": ("all", "patches"), "pool": ("mean",)},
        unsupported=_unsupported,
        settings=partial(folder_settings, config_json=partial(_classifier_config, **_SIGLIP_NAMES)),
        peer=partial(_classifier_peer, **_SIGLIP_NAMES),
    ),
)


def _naflex_config(config: ViTConfig) -> dict[str, Any]:
    """config.json of the vision tower alone."""
    shared = {name: value for name, value in shared_keys(config).items() if name != "image_size"}
    return {
        "architectures": ["Siglip2VisionModel"],
        "model_type": "siglip2_vision_model",
        **shared,
        "intermediate_size": config.F,
        "num_patches": config.patches,
    }


def _naflex_settings(config: ViTConfig, preprocess: Preprocess, labels: list[str] | None) -> dict[str, Any]:
    """The JSON files, with a processor that keeps the shape of images."""
    files = folder_settings(config, preprocess, labels, config_json=_naflex_config)
    files["preprocessor_config.json"] |= {
        "image_processor_type": "Siglip2ImageProcessor",
        "patch_size": config.patch_pixels[0],
        "max_num_patches": config.patches,
    }
    return files


def flat_patches(images: Tensor, patch: int) -> Tensor:
    """What transformers' processor makes of images: (B, N, P P C), the channels of a pixel adjacent."""
    x = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # (B, C, h, P, w, P)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def _naflex_peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    import torch

    model = build_peer(_naflex_config(config), strip_tower(state))

    def pooled(images: Tensor) -> Tensor:
        patches = flat_patches(images, config.patch_pixels[0])
        shapes = torch.tensor([config.grid] * len(images))
        mask = torch.ones(patches.shape[:2], dtype=torch.int64)
        return model(patches, pixel_attention_mask=mask, spatial_shapes=shapes).pooler_output

    return pooled


NAFLEX = replace(
    SIGLIP,
    name="hf-siglip2-naflex",
    title="the vision tower of transformers' SigLIP 2 NaFlex",
    detect=replace(
        SIGLIP.detect,
        axes={E + "patch_embedding.weight": 2},
        model_types=("siglip2", "siglip2_vision_model"),
    ),
    keys=KeyMap(
        rows=(row(E + "patch_embedding.weight", "tokens.proj.weight", patch_rows), *SIGLIP.keys.rows),
        extras=SIGLIP.keys.extras,
    ),
    profile=replace(
        SIGLIP.profile,
        resize={"method": "bilinear", "antialias": True},
        native=True,
        preprocess="siglip2-naflex",
        follows="transformers: tanh GELU, eps 1e-6; positions are resized bilinearly with antialiasing. "
        "Images keep their aspect ratio, as the model was trained.",
    ),
    writer=replace(
        SIGLIP.writer,
        settings=_naflex_settings,
        read_settings=partial(read_tower_settings, kind="siglip2"),
        peer=_naflex_peer,
    ),
)

FAMILIES = (CLIP_CLASSIFIER, SIGLIP_CLASSIFIER, CLIP, SIGLIP, NAFLEX)
