"""SigLIP 2 NaFlex (Tschannen et al. 2025), transformers' spelling: images keep their aspect ratio.

The patch projection is a matrix on flat patches, and the 16 x 16 positions are resized for each image. The
SigLIP 2 models of a fixed size have SigLIP's own names and are read by its family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.model.config import ViTConfig
from vitrail.weights.families import hf_clip
from vitrail.weights.families.family import KeyMap
from vitrail.weights.families.hf import build_peer, folder_settings, shared_keys
from vitrail.weights.families.hf_clip import SIGLIP, E
from vitrail.weights.families.key_rows import row
from vitrail.weights.families.layout import patch_rows

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.images.preprocess import Preprocess


def _config_json(config: ViTConfig) -> dict[str, Any]:
    """config.json of the vision tower alone."""
    shared = {name: value for name, value in shared_keys(config).items() if name != "image_size"}
    return {
        "architectures": ["Siglip2VisionModel"],
        "model_type": "siglip2_vision_model",
        **shared,
        "intermediate_size": config.F,
        "num_patches": config.patches,
    }


def _settings(config: ViTConfig, preprocess: Preprocess, labels: list[str] | None) -> dict[str, Any]:
    """The JSON files, with a processor that keeps the shape of images."""
    files = folder_settings(config, preprocess, labels, config_json=_config_json)
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


def _peer(config: ViTConfig, state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    import torch

    model = build_peer(_config_json(config), hf_clip.strip_tower(state))

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
        settings=_settings,
        read_settings=partial(hf_clip.read_tower_settings, kind="siglip2"),
        peer=_peer,
    ),
)

FAMILIES = (NAFLEX,)
