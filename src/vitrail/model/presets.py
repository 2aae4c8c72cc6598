"""The published model sizes and their names: "B/16", "L/14@336", "S/16@256x128".

    name  = size "/" patch [ "@" pixels ]
    size  = mu Ti S M B L So400m H g g-opt G G-opt e     (case-sensitive)
    patch, pixels = one side, or height "x" width

Without "@" the image size is 224 x 224, and 32 x 32 for the test size `mu`.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrail.base.errors import ConfigError, printable, suggest
from vitrail.model.config import ViTConfig

if TYPE_CHECKING:
    import torch

    from vitrail.model.vit import ViT


class Size(NamedTuple):
    """One row of the table of sizes."""

    width: int
    depth: int
    mlp_width: int
    heads: int
    source: str
    pixels: int = 224


SIZES = {
    "mu": Size(32, 1, 128, 2, "big_vision's test size, at 32 pixels", pixels=32),
    "Ti": Size(192, 12, 768, 3, "Touvron et al. 2020 (DeiT), Table 1"),
    "S": Size(384, 12, 1536, 6, "Touvron et al. 2020 (DeiT), Table 1"),
    "M": Size(512, 12, 2048, 8, "big_vision, models/vit.py"),
    "B": Size(768, 12, 3072, 12, "Dosovitskiy et al. 2020, Table 1"),
    "L": Size(1024, 24, 4096, 16, "Dosovitskiy et al. 2020, Table 1"),
    "So400m": Size(1152, 27, 4304, 16, "Alabdulmohsin et al. 2023 (shape-optimized)"),
    "H": Size(1280, 32, 5120, 16, "Dosovitskiy et al. 2020, Table 1"),
    "g": Size(1408, 40, 6144, 16, "Zhai et al. 2022 (Scaling vision transformers), Table 2"),
    "g-opt": Size(1536, 40, 6144, 16, "big_vision, models/vit.py"),
    "G": Size(1664, 48, 8192, 16, "Zhai et al. 2022 (Scaling vision transformers), Table 2"),
    "G-opt": Size(1536, 48, 8192, 16, "big_vision, models/vit.py"),
    "e": Size(1792, 56, 15360, 16, "Chen et al. 2022 (PaLI)"),
}

_SIDES = r"(\d{1,6})(?:x(\d{1,6}))?"
_NAME = re.compile(rf"([A-Za-z][\w-]*)/{_SIDES}(?:@{_SIDES})?", re.ASCII)


def preset(name: str, **fields: Any) -> ViTConfig:
    """The config of a model name: `preset("B/16@384", classes=10)`; keywords override its fields."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        shown = name if not isinstance(name, str) else printable(name, 60)
        raise ConfigError(
            f'{shown!r} is not a model name; a name is size/patch or size/patch@pixels, such as "B/16", '
            f'"L/14@336" or "S/16@256x128", and the sizes are {", ".join(SIZES)}.'
        )
    size_name, *sides = match.groups()
    if size_name not in SIZES:
        raise ConfigError(f"unknown size {size_name!r} in {name!r}. {suggest(size_name, SIZES)}")
    size = SIZES[size_name]
    high, wide, H, W = (None if side is None else int(side) for side in sides)
    config = {
        "width": size.width,
        "depth": size.depth,
        "mlp_width": None if size.mlp_width == 4 * size.width else size.mlp_width,
        "heads": size.heads,
        "patch": (high, high if wide is None else wide),
        "size": size.pixels if H is None else (H, H if W is None else W),
    }
    return ViTConfig(**{**config, **fields})


def create(
    name: str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **fields: Any,
) -> ViT:
    """Build a ViT by name, with random weights: `create("B/16@384", classes=10)`.

    Args:
        name: a size of `SIZES` with patch size and, after "@", image size.
        device: the device of its parameters; "meta" allocates no memory.
        dtype: the dtype of its parameters; float32 by default.
        fields: fields of ViTConfig, which override those of the name.
    """
    import torch

    from vitrail.model.vit import ViT

    config = preset(name, **fields)
    with nullcontext() if device is None else torch.device(device):
        model = ViT(config)
        return model if dtype is None else model.to(dtype=dtype)
