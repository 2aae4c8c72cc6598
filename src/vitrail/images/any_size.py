"""Images in their own shape: resized to whole patches, as many as allowed, with their aspect ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, cast

from vitrail.base.fields import integer, per_axis, side_lengths
from vitrail.images.preprocess import Preprocess

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

_SMALLEST, _LARGEST, _PRECISION = 1e-6, 100.0, 1e-5  # factors of an image's sides


@lru_cache(maxsize=4096)
def native_size(height: int, width: int, patch: tuple[int, int], patches: int) -> tuple[int, int]:
    """The largest size of whole patches with about this aspect ratio and at most so many patches.

    The rule of SigLIP 2 NaFlex: both sides are scaled by the same factor, rounded up to whole patches.
    Rounding changes the aspect ratio by less than one patch.
    """

    def rounded(factor: float) -> tuple[int, int]:
        high, wide = (
            max(ceil(side * factor / step), 1) for side, step in zip((height, width), patch, strict=True)
        )
        return high, wide

    low, high = _SMALLEST, _LARGEST
    while high - low >= _PRECISION:
        middle = (low + high) / 2
        rows, columns = rounded(middle)
        low, high = (middle, high) if rows * columns <= patches else (low, middle)
    rows, columns = rounded(low)
    rows, columns = min(rows, patches), min(columns, patches)  # of a strip thinner than a patch
    return rows * patch[0], columns * patch[1]


@dataclass(frozen=True, kw_only=True)
class NativePreprocess(Preprocess):
    """A preprocessing that neither crops an image nor changes its shape."""

    patch: int | tuple[int, int] = side_lengths("The patch side in pixels, or (height, width)", 16)
    patches: int = integer("The most patches of an image", default=256)
    keeps_shape: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("patch", per_axis("patch", self.patch, ("height", "width")))

    def pixels(self, image: Image.Image | NDArray[np.uint8]) -> NDArray[np.uint8]:
        """uint8 pixels (H, W, C), where H and W depend on the image."""
        from PIL import Image

        from vitrail.images.pixels import resize_array

        source = self._convert(image)
        height, width = source.size[::-1] if isinstance(source, Image.Image) else source.shape[:2]
        h, w = self.resized_size(height, width)
        return resize_array(source, h, w, self.interpolation, self.backend).copy()

    def crop_size(self, height: int, width: int) -> tuple[int, int]:
        return self._after_resize(height, width)

    def _after_resize(self, height: int, width: int) -> tuple[int, int]:
        return native_size(height, width, cast("tuple[int, int]", self.patch), self.patches)

    def describe(self) -> list[str]:
        first, _, *others = super().describe()
        crops = 1 if self.crops else 0
        resized = f"resized in its own shape to at most {self.patches:,} patches by {self.interpolation}"
        return [first, resized, *others[crops:]]


def build_preprocess(values: Mapping[str, Any]) -> Preprocess:
    """A preprocessing from its fields, of either kind."""
    return NativePreprocess(**values) if "patches" in values else Preprocess(**values)


def native_preprocess(spec: Preprocess, patch: tuple[int, int], patches: int) -> NativePreprocess:
    """The same pixel values and filter, with images in their own shape."""
    values = {one.name: getattr(spec, one.name) for one in fields(Preprocess)}
    shape = {"resize": "squash", "resize_to": None, "crop_rounding": "even"}
    if spec.resize == "none":  # it had no filter of its own
        shape["interpolation"] = "bicubic"
    return NativePreprocess(**{**values, **shape}, patch=patch, patches=patches)
