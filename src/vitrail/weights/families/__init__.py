"""All families but our own files, in the order in which a file is matched against them."""

from __future__ import annotations

from vitrail.weights.families import (
    aimv2,
    clip,
    dinov3,
    eva02,
    google,
    hf,
    hf_clip,
    hf_dinov2,
    lucidrains,
    mobileclip,
    perception_encoder,
    timm,
    torch_encoder,
    torchvision,
)
from vitrail.weights.families.family import Family
from vitrail.weights.families.infer import STATE_DICT

# Other libraries' files.
LIBRARIES: tuple[Family, ...] = (
    *google.FAMILIES,
    hf.DEIT,
    *hf_dinov2.FAMILIES,
    *dinov3.FAMILIES,
    *eva02.FAMILIES,
    *perception_encoder.FAMILIES,
    *aimv2.FAMILIES,
    *mobileclip.FAMILIES,
    hf.VIT,
    hf.MAE,
    *hf_clip.FAMILIES,
    *clip.FAMILIES,
    *timm.FAMILIES,
    *torchvision.FAMILIES,
    *lucidrains.FAMILIES,
    *torch_encoder.FAMILIES,  # last: its names are PyTorch's own, and may be part of anything
)

FAMILIES: tuple[Family, ...] = (STATE_DICT, *LIBRARIES)
