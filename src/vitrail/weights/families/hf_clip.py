"""The vision towers of transformers' CLIP, SigLIP and SigLIP 2, alone or in a file with the text tower.

In SigLIP 2 NaFlex (Tschannen et al. 2025) images keep their aspect ratio: the patch projection is a matrix on
flat patches, and the 16 x 16 positions are resized for each image. The SigLIP 2 models of a fixed size have
SigLIP's own names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.model.config import ViTConfig
from vitrail.weights.families.family import Detection, Family, KeyMap, Profile, Writer
from vitrail.weights.families.hf import (
    EXPRESSES,
    folder_settings,
    load_peer,
    no_layer_scale,
    read_settings,
    shared_keys,
    towers,
)
from vitrail.weights.families.key_rows import layer, lead, patch_rows, row, tokens

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
_CLIP_DEFAULTS = towers("clip", layer_norm_eps=1e-5, hidden_act="quick_gelu")
_SIGLIP_DEFAULTS = towers("siglip", layer_norm_eps=1e-6, hidden_act="gelu_pytorch_tanh")
_SIGLIP2_DEFAULTS = towers("siglip2", layer_norm_eps=1e-6, hidden_act="gelu_pytorch_tanh")
_tower_peer = partial(load_peer, base="vision_model.", anchor="embeddings.patch_embedding.weight")


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
        read_settings=partial(read_settings, defaults=_CLIP_DEFAULTS),
        peer=partial(_tower_peer, config_json=_clip_config),
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
        read_settings=partial(read_settings, defaults=_SIGLIP_DEFAULTS),
        peer=partial(_tower_peer, config_json=_siglip_config),
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
        peer=partial(
            _tower_peer,
            config_json=partial(_classifier_config, kind="clip", model="CLIPForImageClassification"),
            # CLIP has this norm, but its classifier does not use it.
            zeros={f"{{p}}post_layernorm.{n}": lambda config: (config.width,) for n in ("weight", "bias")},
        ),
    ),
)
_siglip_classifier = partial(_classifier_config, kind="siglip", model="SiglipForImageClassification")
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
        settings=partial(folder_settings, config_json=_siglip_classifier),
        peer=partial(_tower_peer, config_json=_siglip_classifier),
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


def _naflex_inputs(images: Tensor, config: ViTConfig) -> dict[str, Tensor]:
    import torch

    patches = flat_patches(images, config.patch_pixels[0])
    return {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.int64),
        "spatial_shapes": torch.tensor([config.grid] * len(images)),
    }


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
        read_settings=partial(read_settings, defaults=_SIGLIP2_DEFAULTS),
        peer=partial(_tower_peer, config_json=_naflex_config, inputs=_naflex_inputs),
    ),
)

FAMILIES = (CLIP_CLASSIFIER, SIGLIP_CLASSIFIER, CLIP, SIGLIP, NAFLEX)
