"""The libraries we compare with, built alike: same sizes, exact GELU, a fresh random model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.base.telemetry import disable_telemetry
from vitrail.model.config import ViTConfig

disable_telemetry()  # before any of them is loaded


def make_torchvision_importable() -> None:
    """Declare the two compiled operators that torchvision's wheel misses beside a CPU torch.

    Its models and transforms then work, and so do timm and transformers, which import it;
    nms and the compiled decoders do not. A torchvision that imports by itself is left alone.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)  # the declarations live as long as this object


_KEPT: list[Any] = []


def ours(config: ViTConfig) -> nn.Module:
    from vitrail.model import ViT

    return ViT(config)


def timm(config: ViTConfig) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=config.pixels,
        patch_size=config.patch_pixels,
        in_chans=config.channels,
        num_classes=config.classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.F / config.width,
        proj_drop_rate=config.dropout,
        pos_drop_rate=config.dropout,
        attn_drop_rate=config.attention_dropout,
    )


class Logits(nn.Module):
    """transformers returns a record; the others return logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).logits


def transformers(config: ViTConfig) -> nn.Module:
    from transformers import ViTConfig as HFConfig
    from transformers import ViTForImageClassification

    settings = HFConfig(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.F,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.attention_dropout,
        layer_norm_eps=config.eps,
        image_size=config.pixels,
        patch_size=config.patch_pixels,
        num_channels=config.channels,
        num_labels=config.classes,
        attn_implementation="sdpa",
    )
    return Logits(ViTForImageClassification(settings))


def torchvision(config: ViTConfig) -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=config.pixels[0],
        patch_size=config.patch_pixels[0],
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.F,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        num_classes=config.classes,
    )


PEERS: dict[str, Callable[[ViTConfig], nn.Module]] = {
    "vitrail": ours,
    "timm": timm,
    "transformers": transformers,
    "torchvision": torchvision,
}
