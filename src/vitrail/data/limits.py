"""How much an image file may cost to decode, and the errors that say why one was refused.

Memory is computed from the header before any pixel is allocated. The bytes per pixel are those of
Pillow's image modes and of its decoders, measured; tests/data/test_decode_limits.py holds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitrail.errors import InputError
from vitrail.preprocess import MEMORY

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

    from vitrail.data.headers import Header
    from vitrail.preprocess import Preprocess

SCAN_PIXELS = 1_500_000_000  # scans times pixels of a JPEG: at most one second, by 0.6 ns for each
ORIENTATION = 0x0112  # the EXIF tag that says how an image is to be turned
RLE_PIXELS, RLE_BYTES = 8_000_000, 4_000_000  # Pillow decodes run-length BMPs in Python
WEBP_BYTES = 16  # per pixel: two canvases, the frame as bytes, and the image
STORED = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}  # bytes per pixel; others 4


class ImageTooLarge(InputError):
    """An image file that would take more memory or time than the limits allow."""


class BrokenImage(InputError):
    """A file of a known image format that cannot be decoded."""


class NotAnImage(InputError):
    """A file of no known image format."""


@dataclass(frozen=True)
class DecodeLimits:
    """What decoding one image may cost."""

    pixels: int = 50_000_000
    side: int = 65_535
    """Width and height; no JPEG can have more."""
    scans: int = 100
    """Of a JPEG; libjpeg writes 10, optimizers some 20. With 50 megapixels 30: see SCAN_PIXELS."""
    memory: int = MEMORY
    """Bytes for decoding, conversion and resizing together, by the estimate of `bytes_needed`."""


def check_size(name: str, wide: int, high: int, limits: DecodeLimits) -> None:
    """Refuse too many pixels, and sides that only a made-up header has."""
    if wide * high > limits.pixels:
        raise ImageTooLarge(
            f"{name} has {wide} x {high} pixels; the limit is {limits.pixels / 1e6:g} megapixels. "
            "Make it smaller."
        )
    if max(wide, high) > limits.side:
        raise ImageTooLarge(
            f"{name} has {wide} x {high} pixels; a side may have at most {limits.side:,}. Cut it into parts."
        )


def check_work(name: str, opened: ImageFile, header: Header, limits: DecodeLimits) -> None:
    """Refuse small files that take long to decode: JPEGs of many scans, and large run-length BMPs."""
    pixels = math.prod(opened.size)
    if header.scans > limits.scans or header.scan_weight * pixels > SCAN_PIXELS:
        count = f"{header.scans} scan{'s' * (header.scans > 1)}{' or more' * header.cut_short}"
        raise ImageTooLarge(
            f"{name} is a JPEG of {count} and {pixels / 1e6:.1f} megapixels; the limit is {limits.scans} "
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
            f"the limit is {limits.memory / 2**20:,.0f} MiB. Make it smaller, or nearer to square."
        )


def bytes_needed(opened: ImageFile, header: Header, preprocess: Preprocess | None) -> int:
    """The most memory at any moment from the decoder's start to the model's input, from the header.

    Args:
        opened: an image whose pixels are not loaded.
        preprocess: what becomes of it; None: it is made upright and RGB, and not resized.
    """
    pixels, stored = math.prod(opened.size), STORED.get(opened.mode, 4)
    decoding = stored * pixels + codec_bytes(opened, header)
    # A TIFF turns while it loads; a PNG may say after its pixels that it is to be turned.
    turned = header.may_turn or (opened.format not in ("PNG", "TIFF") and is_turned(opened))
    channels = preprocess.channels if preprocess is not None else 3
    # The decoded image is kept; turned, of 8 bits and of the model's channels are copies of it.
    converted = 0 if opened.mode == "RGB" and channels == 3 else 1 if channels == 1 else 4
    converted += 1 if opened.mode.startswith(("I", "F")) else 0
    upright = (stored * (2 if turned else 1) + converted) * pixels
    if preprocess is None:
        return max(decoding, upright)
    wide, high = opened.size
    sides = [(high, wide), (wide, high)] if turned else [(high, wide)]
    resizing = max(preprocess.resize_bytes(*both) for both in sides)
    if channels != 3 or preprocess.backend == "torch":  # as an array; torch makes floats of a single channel
        resizing += (channels + (8 if preprocess.backend == "torch" and channels == 1 else 0)) * pixels
    return max(decoding, upright + resizing)


def is_turned(opened: ImageFile) -> bool:
    return bool(opened.getexif().get(ORIENTATION, 1) != 1)


def codec_bytes(opened: ImageFile, header: Header) -> int:
    """What a decoder takes beside the pixels."""
    pixels = math.prod(opened.size)
    match opened.format:
        case "JPEG" | "MPO":
            return coefficient_bytes(opened, header)
        case "WEBP":  # which is held twice besides
            return (WEBP_BYTES - 4) * pixels + 2 * header.bytes
        case "TIFF":
            return header.tag_bytes + strip_bytes(opened)
        case "BMP" if opened.tile and opened.tile[0][0] == "bmp_rle":
            return 3 * pixels
    return 0


def coefficient_bytes(opened: ImageFile, header: Header) -> int:
    """A JPEG of several scans keeps all its coefficients, two bytes each, until the last of them."""
    if header.scans <= 1 and not opened.info.get("progressive"):
        return 0
    layers = [(v, h) for _, v, h, _ in opened.layer]  # type: ignore[attr-defined]
    most = max([v for v, _ in layers] or [1]) * max([h for _, h in layers] or [1])
    return math.ceil(2 * math.prod(opened.size) * sum(v * h for v, h in layers) / max(most, 1))


def strip_size(opened: ImageFile) -> tuple[int, int]:
    """Width and height of a TIFF's tiles, or of its strips."""
    tags = opened.tag_v2  # type: ignore[attr-defined]
    wide, high = opened._tile_size  # type: ignore[attr-defined]
    w, h = tags.get(322), tags.get(323)
    return (w, h) if isinstance(w, int) and isinstance(h, int) else (wide, min(tags.get(278, high), high))


def strip_bytes(opened: ImageFile) -> int:
    """libtiff decodes a strip or a tile at a time, as large as it says it is; TIFFs turn while they load."""
    tags = opened.tag_v2  # type: ignore[attr-defined]
    wide, high = opened.size
    w, h = strip_size(opened)
    depths = tags.get(258, (1,))
    per_pixel = max(4, math.ceil(max(depths) * max(len(depths), tags.get(277, 1)) / 8))
    turned = STORED.get(opened.mode, 4) * wide * high if tags.get(ORIENTATION, 1) != 1 else 0
    return w * h * per_pixel + turned
