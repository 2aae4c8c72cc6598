"""Limits on the cost of decoding an image file, and the errors for files that exceed them.

Memory is estimated from the header, before pixels are allocated. The bytes per pixel of Pillow's modes and
decoders were measured; tests/images/test_decode_limits.py checks them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitrail.base.errors import InputError
from vitrail.images.preprocess import MEMORY

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

    from vitrail.images.headers import Header
    from vitrail.images.preprocess import Preprocess

SCAN_PIXELS = 1_500_000_000  # scans times pixels of a JPEG: at most one second, at 0.6 ns each
ORIENTATION = 0x0112  # the EXIF tag
RLE_PIXELS, RLE_BYTES = 8_000_000, 4_000_000  # Pillow decodes run-length BMPs in Python
WEBP_BYTES = 16  # per pixel: two canvases, the frame as bytes, and the image
MODE_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}  # per pixel; others 4


class ImageTooLarge(InputError):
    """An image file that would take more memory or time than the limits allow."""


class BrokenImage(InputError):
    """A file of a known image format that cannot be decoded."""


class NotAnImage(InputError):
    """A file that is not in a known image format."""


@dataclass(frozen=True)
class DecodeLimits:
    """Limits on the cost of decoding one image."""

    pixels: int = 50_000_000
    side: int = 65_535
    """The largest width and height, which is also that of JPEG."""
    scans: int = 100
    """The scans of a JPEG: libjpeg writes 10, optimizers about 20. For 50 megapixels 30, see SCAN_PIXELS."""
    memory: int = MEMORY
    """The bytes for decoding, conversion and resizing together, as estimated by `bytes_needed`."""


def check_size(name: str, width: int, height: int, limits: DecodeLimits) -> None:
    """Refuse too many pixels, and sides that only a forged header has."""
    if width * height > limits.pixels:
        raise ImageTooLarge(
            f"{name} has {width} x {height} pixels; the limit is {limits.pixels / 1e6:g} megapixels. "
            "Make it smaller."
        )
    if max(width, height) > limits.side:
        raise ImageTooLarge(
            f"{name} has {width} x {height} pixels; the limit of a side is {limits.side:,}. Split it."
        )


def check_work(name: str, opened: ImageFile, header: Header, limits: DecodeLimits) -> None:
    """Refuse small files that are slow to decode: JPEGs with many scans, and large run-length BMPs."""
    pixels = math.prod(opened.size)
    if header.scans > limits.scans or header.scan_weight * pixels > SCAN_PIXELS:
        count = f"{header.scans} scan{'s' * (header.scans > 1)}{' or more' * header.incomplete}"
        raise ImageTooLarge(
            f"{name} is a JPEG with {count} and {pixels / 1e6:.1f} megapixels; the limit is {limits.scans} "
            "scans, and fewer for a large image or arithmetic coding. Save it again as a baseline JPEG."
        )
    runs = bool(opened.tile) and opened.tile[0][0] == "bmp_rle"
    if runs and (pixels > RLE_PIXELS or header.bytes > RLE_BYTES):
        raise ImageTooLarge(
            f"{name} is a run-length BMP of more than {RLE_PIXELS / 1e6:g} megapixels or "
            f"{RLE_BYTES / 1e6:g} MB. Save it as a PNG."
        )


def check_memory(name: str, needed: int, limits: DecodeLimits) -> None:
    if needed > limits.memory:
        raise ImageTooLarge(
            f"{name} would take {needed / 2**20:,.0f} MiB to decode and resize; "
            f"the limit is {limits.memory / 2**20:,.0f} MiB. Make it smaller, or less elongated."
        )


def bytes_needed(opened: ImageFile, header: Header, preprocess: Preprocess | None) -> int:
    """An estimate, from the header, of the peak memory from decoding to the model's input.

    Args:
        opened: an image whose pixels are not loaded.
        preprocess: what is done with it; None makes it upright and RGB, and does not resize it.
    """
    pixels, stored = math.prod(opened.size), MODE_BYTES.get(opened.mode, 4)
    decoding = stored * pixels + _codec_bytes(opened, header)
    # A TIFF is transposed while it loads; the orientation of a PNG may follow its pixels.
    upright = opened.format in ("PNG", "TIFF") or opened.getexif().get(ORIENTATION, 1) == 1
    turned = header.may_turn or not upright
    channels = preprocess.channels if preprocess is not None else 3
    # The decoded image stays; the upright one, that of 8 bits and that in the model's channels are copies.
    converted = 0 if opened.mode == "RGB" and channels == 3 else 1 if channels == 1 else 4
    converted += 1 if opened.mode.startswith(("I", "F")) else 0
    converting = (stored * (2 if turned else 1) + converted) * pixels
    if preprocess is None:
        return max(decoding, converting)
    width, height = opened.size
    sides = [(height, width), (width, height)] if turned else [(height, width)]
    resizing = max(preprocess.resize_bytes(*both) for both in sides)
    if channels != 3 or preprocess.backend == "torch":  # an array; torch converts a single channel to float
        resizing += (channels + (8 if preprocess.backend == "torch" and channels == 1 else 0)) * pixels
    return max(decoding, converting + resizing)


def _codec_bytes(opened: ImageFile, header: Header) -> int:
    """The memory of a decoder beside the pixels."""
    pixels = math.prod(opened.size)
    match opened.format:
        case "JPEG" | "MPO":
            return _coefficient_bytes(opened, header)
        case "WEBP":  # the file itself is held twice
            return (WEBP_BYTES - 4) * pixels + 2 * header.bytes
        case "TIFF":
            return header.tag_bytes + _strip_bytes(opened)
        case "BMP" if opened.tile and opened.tile[0][0] == "bmp_rle":
            return 3 * pixels
    return 0


def _coefficient_bytes(opened: ImageFile, header: Header) -> int:
    """The coefficients of a JPEG with several scans, two bytes each, which are held until the last scan."""
    if header.scans <= 1 and not opened.info.get("progressive"):
        return 0
    layers = [(v, h) for _, v, h, _ in opened.layer]  # type: ignore[attr-defined]
    most = max([v for v, _ in layers] or [1]) * max([h for _, h in layers] or [1])
    return math.ceil(2 * math.prod(opened.size) * sum(v * h for v, h in layers) / max(most, 1))


def strip_size(opened: ImageFile) -> tuple[int, int]:
    """The width and height of a TIFF's tiles, or of its strips."""
    tags = opened.tag_v2  # type: ignore[attr-defined]
    wide, high = opened._tile_size  # type: ignore[attr-defined]
    w, h = tags.get(322), tags.get(323)
    return (w, h) if isinstance(w, int) and isinstance(h, int) else (wide, min(tags.get(278, high), high))


def _strip_bytes(opened: ImageFile) -> int:
    """The memory of libtiff, which decodes a strip or a tile at a time, and of the transposition on load."""
    tags = opened.tag_v2  # type: ignore[attr-defined]
    wide, high = opened.size
    w, h = strip_size(opened)
    depths = tags.get(258, (1,))
    per_pixel = max(4, math.ceil(max(depths) * max(len(depths), tags.get(277, 1)) / 8))
    turned = MODE_BYTES.get(opened.mode, 4) * wide * high if tags.get(ORIENTATION, 1) != 1 else 0
    return w * h * per_pixel + turned
