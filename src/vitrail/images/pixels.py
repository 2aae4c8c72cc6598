"""Conversion of PIL images to upright uint8 arrays in a model's channels, and resizing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import ExifTags, Image

from vitrail.base.errors import InputError
from vitrail.base.fields import short_repr
from vitrail.images.preprocess import MODES

if TYPE_CHECKING:
    from numpy.typing import NDArray

STRIP = 2**20  # pixels that are converted at a time


def resize_array(
    image: Image.Image | NDArray[np.uint8], h: int, w: int, interpolation: str, backend: str
) -> NDArray[np.uint8]:
    """The pixels (h, w, C) of a resized image: an RGB image of Pillow's, or an array (H, W, C)."""
    filter = Image.Resampling[interpolation.upper()]
    if isinstance(image, Image.Image):
        return np.asarray(image if image.size == (w, h) else image.resize((w, h), filter))
    if image.shape[:2] == (h, w):
        return image
    if backend == "torch":
        import torch

        contiguous = image if image.flags.writeable and image.flags.c_contiguous else image.copy()
        x = torch.from_numpy(contiguous).movedim(-1, 0)[None]  # (1, C, H, W)
        x = torch.nn.functional.interpolate(x, (h, w), mode=interpolation, antialias=True)
        return cast("NDArray[np.uint8]", x[0].movedim(0, -1).numpy())
    # Other than RGB channel by channel: in RGBA, Pillow would weight the colors by the fourth.
    parts = [image] if image.shape[2] == 3 else [image[..., c] for c in range(image.shape[2])]
    resized = [np.asarray(Image.fromarray(part).resize((w, h), filter)) for part in parts]
    return resized[0] if image.shape[2] == 3 else np.stack(resized, axis=-1)


def to_uint8(image: Image.Image, channels: int) -> NDArray[np.uint8]:
    """The upright pixels of a PIL image, uint8 (H, W, C), or (H, W) for one channel."""
    upright = apply_orientation(image, channels)
    if upright.width * upright.height <= STRIP:
        return np.asarray(upright)
    array = np.empty((upright.height, upright.width, channels)[: 2 if channels == 1 else 3], np.uint8)
    for box in _strips(upright):  # np.asarray would allocate the memory for all of it twice
        array[box[1] : box[3]] = np.asarray(upright.crop(box))
    return array


def array_to_uint8(image: Any, what: str = "An image") -> NDArray[np.uint8]:
    """The pixels, uint8 (h, w, C), of an array (h, w) or (h, w, C), or of a tensor (h, w) or (C, h, w).

    Floats must lie between 0 and 1, as torchvision's ToTensor makes them.

    Args:
        what: the image, for messages.
    """
    array = image if isinstance(image, np.ndarray) else _tensor_to_array(image, what)
    pixels = array[..., None] if array.ndim == 2 else array
    if pixels.ndim != 3 or 0 in pixels.shape:
        raise InputError(
            f"{what} must have the shape (h, w, C), or (C, h, w) as a tensor, and not be empty; this one has "
            f"the shape {tuple(image.shape)}."
        )
    if pixels.dtype == np.uint8:
        return pixels
    check_pixel_range(pixels, what)
    return np.rint(pixels * 255).astype(np.uint8)


def check_pixel_range(images: Any, what: str) -> None:
    """Check that an array or a tensor is uint8, or floats from 0 to 1."""
    kind = str(images.dtype).removeprefix("torch.")
    if kind == "uint8" or 0 in images.shape:
        return
    low, high = float(images.min()), float(images.max())
    if "float" not in kind or not (low >= 0 and high <= 1):  # also false for NaN
        advice = "remove Normalize: the model normalizes by itself" if low < 0 else "convert it to uint8"
        raise InputError(
            f"{what} must be uint8, or floats from 0 to 1, not {kind} from {low:.4g} to {high:.4g}; {advice}."
        )


def _tensor_to_array(image: Any, what: str) -> NDArray[Any]:
    import torch

    if not isinstance(image, torch.Tensor):
        raise InputError(
            f"{what} must be a PIL image, an array (h, w, C) or a tensor (C, h, w), not {short_repr(image)}; "
            "open a file with PIL.Image.open."
        )
    tensor = image.detach().cpu()
    tensor = tensor.float() if tensor.is_floating_point() else tensor
    return (tensor.permute(1, 2, 0) if tensor.ndim == 3 else tensor).numpy()


def apply_orientation(image: Image.Image, channels: int) -> Image.Image:
    """An upright PIL image, as its EXIF orientation says, with 8 bits in each of these channels.

    Transparent images are composited over white, as transformers does, unless there are four channels.
    Modes with more than 8 bits are scaled to 8, all others converted by Pillow's `convert`. An image that
    is upright and in its mode already is returned without a copy.
    """
    if channels not in MODES:
        raise InputError(
            f"A PIL image has 1, 3 or 4 channels, and the model takes {channels}; pass an array "
            f"(h, w, {channels})."
        )
    try:
        image.load()
        upright = _transpose(image, image.getexif().get(ExifTags.Base.Orientation, 1))
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(
            f"Pillow cannot read the image ({error}); it must be complete. Save or download it again."
        ) from error
    upright = _to_eight_bits(upright)
    try:
        if upright.has_transparency_data and channels != 4:
            return _over_white(upright, MODES[channels])
        return upright if upright.mode == MODES[channels] else upright.convert(MODES[channels])
    except ValueError as error:
        raise InputError(
            f"Pillow cannot convert an image of mode {image.mode} to {MODES[channels]}; convert it to RGB "
            "first."
        ) from error


def _transpose(image: Image.Image, orientation: Any) -> Image.Image:
    """Apply an EXIF orientation, without writing new EXIF data as ImageOps.exif_transpose does."""
    methods = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    if orientation not in methods:
        return image
    upright = image.transpose(methods[orientation])
    upright.info = {key: value for key, value in image.info.items() if key == "transparency"}
    return upright


def _strips(image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    """Boxes of a few rows each: converting them one after the other takes little memory."""
    rows = max(1, STRIP // max(image.width, 1))
    for top in range(0, image.height if image.width else 0, rows):
        yield 0, top, image.width, min(top + rows, image.height)


def _over_white(image: Image.Image, mode: str) -> Image.Image:
    """A transparent image composited over white."""
    opaque = Image.new(mode, image.size)
    for box in _strips(image):
        part = image.crop(box).convert("RGBA")
        part = Image.alpha_composite(Image.new("RGBA", part.size, "white"), part)
        opaque.paste(part.convert(mode), box)
    return opaque


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """16-bit gray (also in Pillow's 32-bit mode I) divided by 257, floats from 0 to 1 multiplied by 255.

    Pillow's `convert` would clip all of these at 255. The range is that of the mode, not of the pixels: a
    dark image stays dark.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    largest = 1 if image.mode == "F" else 65535
    converted = Image.new("L", image.size)
    low, high = np.inf, -np.inf
    for box in _strips(image):
        array = np.asarray(image.crop(box))
        low, high = np.minimum(low, array.min()), np.maximum(high, array.max())
        with np.errstate(invalid="ignore"):  # NaN is refused below
            converted.paste(Image.fromarray(np.rint(array * (255 / largest)).astype(np.uint8)), box)
    if all(image.size) and not (low >= 0 and high <= largest):  # false for NaN too
        raise InputError(
            f"The pixel values of an image of mode {image.mode} must lie between 0 and {largest}, and these "
            f"go from {low:g} to {high:g}; convert it to 8 bits first."
        )
    return converted
