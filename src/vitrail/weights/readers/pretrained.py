"""Pretrained models to start from: small ones on the Hugging Face hub that our families read."""

from __future__ import annotations

from typing import NamedTuple

from vitrail.base.errors import option


class Pretrained(NamedTuple):
    """A published model, with what one needs to know before downloading it."""

    name: str
    megabytes: float
    """Of its weights."""
    license: str
    pretraining: str
    advice: str


# Looked up in November 2026; sizes of four bytes per parameter where the page has none.
PRETRAINED = (
    Pretrained(
        "hf:facebook/deit-tiny-patch16-224",
        22.9,
        "apache-2.0",
        "ImageNet-1k, with labels",
        "the quickest; suits a CPU",
    ),
    Pretrained(
        "hf:timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        22.9,
        "apache-2.0",
        "ImageNet-21k, then 1k",
        "suits a CPU",
    ),
    Pretrained(
        "hf:facebook/deit-small-patch16-224",
        88.2,
        "apache-2.0",
        "ImageNet-1k, with labels",
        "CPU with patience, or a GPU",
    ),
    Pretrained(
        "hf:timm/vit_small_patch16_224.augreg_in21k_ft_in1k",
        88.2,
        "apache-2.0",
        "ImageNet-21k, then 1k",
        "CPU with patience, or a GPU",
    ),
    Pretrained(
        "hf:facebook/dinov2-small",
        88.3,
        "apache-2.0",
        "142 million images, no labels",
        "a GPU, at 224 pixels (its own size is 518)",
    ),
    Pretrained(
        "hf:timm/vit_small_patch16_dinov3.lvd1689m",
        86.4,
        "dinov3-license",
        "1.7 billion images, no labels",
        "a GPU; read its license first",
    ),
)

FEW_IMAGES = 20_000  # below this many photographs, pretrained weights are worth a hint


def pretrained_note(images: int) -> str:
    """The hint for a run from scratch on few photographs."""
    first = PRETRAINED[0]
    return (
        f"From scratch with {images:,} images; starting from pretrained weights usually gives better "
        f"accuracy. Add {option('from', first.name)} (downloads {first.megabytes:.0f} MB once; vitrail train "
        "--pretrained lists others)."
    )
