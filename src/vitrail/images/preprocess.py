"""Preprocessing: how an image becomes the model's input, as plain data that travels with the weights.

The order is fixed. `pixels`: orientation from EXIF, 8 bits in the model's channels, resizing, center crop.
`normalize`: (pixels * scale - mean) / std. On 8-bit images the results of timm, torchvision and
transformers are the same, to the bit where Pillow resizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from vitrail.base.errors import ConfigError, InputError
from vitrail.base.fields import (
    Config,
    choice,
    declare,
    documented,
    is_real,
    number,
    per_axis,
    short_repr,
    side_lengths,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image
    from torch import Tensor

    from vitrail.model.config import ViTConfig

MEMORY = 512 * 2**20  # bytes that an image may take until it is the model's input
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of Pillow, by the number of channels
INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in Pillow's numbering
HALF = (0.5, 0.5, 0.5)


def _per_channel(doc: str, must: str, holds: Callable[[float], bool]) -> Any:
    """A number for each channel."""

    def check(name: str, value: Any, hint: Any) -> tuple[float, ...]:
        values = value if isinstance(value, (tuple, list)) else []
        if not values or not all(is_real(one) and holds(float(one)) for one in values):
            raise ConfigError(
                f"{name} must be a tuple with {must} for each channel of the images, not {short_repr(value)}."
            )
        return tuple(float(one) for one in values)

    return declare(doc, check, HALF)


@documented
@dataclass(frozen=True, kw_only=True)
class Preprocess(Config):
    """The preprocessing of images for a model. The defaults are those of Google's ViT."""

    size: int | tuple[int, int] = side_lengths("The input size of the model in pixels, a side or (H, W)", 224)
    resize: Literal["squash", "shortest", "none"] = choice(
        "squash resizes to the target whatever the aspect ratio, shortest resizes the shorter side and keeps "
        "the ratio, none takes images that have the size already",
        default="squash",
    )
    resize_to: int | tuple[int, int] | None = side_lengths(
        "The size that images are resized to before the center crop; None is `size`", None
    )
    interpolation: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] = choice(
        "The resampling filter, in Pillow's words", default="bilinear"
    )
    backend: Literal["pillow", "torch"] = choice(
        "What resizes: Pillow, or torch on uint8 pixels (the fast processors of transformers)",
        default="pillow",
    )
    crop_rounding: Literal["even", "down"] = choice(
        "How a center crop that would start at half a pixel is rounded: to even (torchvision, timm), or down "
        "(transformers)",
        default="even",
    )
    scale: float = number("The factor of the uint8 pixels", "above 0", lambda s: s > 0, 1 / 255)
    mean: tuple[float, ...] = _per_channel("The mean that is subtracted", "a number", lambda m: True)
    std: tuple[float, ...] = _per_channel(
        "The standard deviation that is divided by", "a number of at least 1e-6", lambda s: s >= 1e-6
    )

    keeps_shape: ClassVar[bool] = False
    """Whether the size of the pixels depends on the image (native.py)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("size", "resize_to"):
            if value := getattr(self, name):
                self._set(name, per_axis(name, value, ("height", "width")))
        if self.resize_to == self._default_resize_to:  # settings that do the same compare equal
            self._set("resize_to", None)
        if not self.crops:
            self._set("crop_rounding", "even")
        (h, w), (min_h, min_w) = self.before_crop, self._default_resize_to
        unsupported = self.backend == "torch" and self.interpolation not in ("bilinear", "bicubic")
        rules = [
            (len(self.mean) != len(self.std), "mean", "std", "as many numbers in std"),
            (self.resize == "none" and self.resize_to, "resize", "resize_to", "resize_to=None"),
            (self.resize == "shortest" and h != w, "resize", "resize_to", "a single number as resize_to"),
            (h < min_h or w < min_w, "size", "resize_to", "a resize_to that is at least as large"),
            (unsupported, "backend", "interpolation", "bilinear or bicubic interpolation"),
        ]
        for broken, name, other, needs in rules:
            if broken:
                raise ConfigError(
                    f"{name}={short_repr(getattr(self, name))} needs {needs}, not "
                    f"{other}={short_repr(getattr(self, other))}; change {name} or {other}."
                )

    # ---- derived from the fields ------------------------------------------------------------

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def crops(self) -> bool:
        """Whether there is a center crop."""
        return self.resize == "shortest" or self.resize_to is not None

    @property
    def target(self) -> tuple[int, int]:
        """The model's input size (H, W)."""
        return cast(tuple[int, int], self.size)

    @property
    def _default_resize_to(self) -> tuple[int, int]:
        """resize_to where it is None. With less, some images would not fill the crop."""
        return (max(self.target),) * 2 if self.resize == "shortest" else self.target

    @property
    def before_crop(self) -> tuple[int, int]:
        """The size (H, W) before the center crop; for "shortest", the shorter side twice."""
        return cast(tuple[int, int], self.resize_to or self._default_resize_to)

    def crop_size(self, height: int, width: int) -> tuple[int, int]:
        """The size (H, W) that a random crop of this size is resized to, for training."""
        return self.target

    def describe(self) -> list[str]:
        """Each step in words."""
        (H, W), (h, w) = self.target, self.before_crop
        method = f"by {self.interpolation} ({self.backend.capitalize()})"
        resizing = {"squash": f"resized to {h}x{w} {method}", "shortest": f"short side to {h} {method}"}
        return [
            f"upright, 8 bits, {MODES.get(self.channels, f'{self.channels} channels')}",
            resizing.get(self.resize, f"not resized: it must be {H}x{W}"),
            *([f"center crop {H}x{W}"] if self.crops else []),
            "pixels / 255" if self.scale == 1 / 255 else f"pixels times {self.scale:g}",
            f"minus {self.mean if len(self.mean) > 1 else self.mean[0]}",
            f"divided by {self.std if len(self.std) > 1 else self.std[0]}",
        ]

    # ---- images -----------------------------------------------------------------------------

    def pixels(self, image: Image.Image | NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The pixels that the model sees, uint8 (H, W, C), of a PIL image, an array (h, w, C) or a tensor
        (C, h, w): uint8, or floats from 0 to 1."""
        from PIL import Image

        from vitrail.images.pixels import resize_array

        source = self._convert(image)
        height, width = source.size[::-1] if isinstance(source, Image.Image) else source.shape[:2]
        (H, W), (h, w) = self.target, self.resized_size(height, width)
        array = resize_array(source, h, w, self.interpolation, self.backend)
        down = self.crop_rounding == "down"
        top, left = (spare // 2 if down else round(spare / 2) for spare in (h - H, w - W))
        return array[top : top + H, left : left + W].copy()

    def normalize(self, pixels: NDArray[np.uint8]) -> Tensor:
        """(pixels * scale - mean) / std, uint8 (H, W, C) to float32 (C, H, W)."""
        import torch

        from vitrail.images.normalize import channel_statistics, normalize

        mean, std = channel_statistics(self)
        x = torch.from_numpy(pixels.astype("float64")).permute(2, 0, 1)
        return normalize(x, mean, std, self.scale).contiguous()

    def __call__(self, image: Image.Image | NDArray[np.uint8]) -> Tensor:
        """The model's input for an image, float32 (C, H, W)."""
        return self.normalize(self.pixels(image))

    def batch(self, images: Iterable[Image.Image | NDArray[np.uint8]]) -> Tensor:
        """The model's input for several images, float32 (B, C, H, W)."""
        import torch

        inputs = [self(image) for image in images]
        if not inputs:
            raise InputError("A batch must hold at least one image; pass a list of images.")
        return torch.stack(inputs)

    def _convert(self, image: Any) -> Image.Image | NDArray[np.uint8]:
        """The image for `resize_array`: RGB images stay in Pillow if it resizes them, which saves a copy."""
        from PIL import Image

        from vitrail.images.pixels import apply_orientation

        stays = self.backend == "pillow" and self.channels == 3 and isinstance(image, Image.Image)
        return apply_orientation(image, 3) if stays and all(image.size) else self.to_array(image)

    def to_array(self, image: Any) -> NDArray[np.uint8]:
        """The pixels of an image, uint8 (h, w, C), before they are resized."""
        from PIL import Image

        from vitrail.images.pixels import array_to_uint8, to_uint8

        pixels = array_to_uint8(to_uint8(image, self.channels) if isinstance(image, Image.Image) else image)
        if pixels.shape[2] != self.channels:
            shapes = f"(h, w, {self.channels}), or ({self.channels}, h, w) as a tensor"
            raise InputError(
                f"An image must have the shape {shapes}; this one has the shape {tuple(image.shape)}."
            )
        return pixels

    def resize_bytes(self, height: int, width: int) -> int:
        """An upper bound of the memory that resizing takes in Pillow and torch, beside the image itself.

        Rows come first: w x height pixels are held for the columns. Then w x h pixels and their copies in
        NumPy; and for each output row and column the weights of the input ones.
        """
        h, w = self._after_resize(height, width)
        bands = 4 if self.channels > 1 else 1
        weights = sum(8 * (7 * max(new, old) + new) for new, old in ((h, height), (w, width)))
        return bands * w * height + (bands + 2 * self.channels) * h * w + weights

    def _after_resize(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing; the longer side is rounded down, as in every library."""
        (h, w), short = self.before_crop, min(height, width)
        if self.resize == "shortest":
            h, w = (h if side == short else int(h * side / short) for side in (height, width))
        return h, w

    def resized_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing, if the image can be resized."""
        if self.resize == "none" and (height, width) != self.target:
            H, W = self.target
            raise InputError(
                f"With resize='none' an image must be {H} x {W} (height x width), and this one is "
                f"{height} x {width}; resize it first, or set resize to squash or shortest."
            )
        h, w = self._after_resize(height, width)
        if (needed := self.resize_bytes(height, width)) > MEMORY:
            raise InputError(
                f"An image of {height} x {width} (height x width) would become {h} x {w} and take "
                f"{needed / 2**20:,.0f} MiB; the limit is {MEMORY / 2**20:,.0f} MiB. "
                "Crop it, or use a smaller size."
            )
        return h, w


def fit_preprocess(preprocess: Preprocess, config: ViTConfig) -> Preprocess:
    """Fit a preprocessing to the image size and the channels of a model.

    The crop keeps its fraction of the resized image. For another number of channels, every channel gets the
    average of mean and std.
    """
    if preprocess.channels != config.channels:
        mean, std = (sum(values) / len(values) for values in (preprocess.mean, preprocess.std))
        preprocess = replace(preprocess, mean=(mean,) * config.channels, std=(std,) * config.channels)
    if preprocess.target == config.pixels:
        return preprocess
    scale = max(preprocess.before_crop) / max(preprocess.target)
    before = max(round(max(config.pixels) * scale), *config.pixels)
    resize_to = None if preprocess.resize_to is None else before
    return replace(preprocess, size=config.pixels, resize_to=resize_to)  # type: ignore[arg-type]


def default_preprocess(config: ViTConfig) -> Preprocess:
    """Resize to the model's size and map pixel values to -1 ... 1."""
    half = (0.5,) * config.channels
    return Preprocess(size=config.pixels, mean=half, std=half)  # type: ignore[arg-type]
