"""A pass over the structure of an image file before Pillow opens it. No pixel and no metadata is decoded.

Pillow walks segments, chunks and tags in Python, stores their contents, and has few limits on their number.
The counts made here bound that work. The pass itself stops at the first limit exceeded.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from vitrail.images.limits import (
    WEBP_BYTES,
    BrokenImage,
    DecodeLimits,
    ImageTooLarge,
    NotAnImage,
    check_memory,
    check_size,
    strip_size,
)

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

_MAX_SEGMENTS = 2_000  # of a JPEG; an ICC profile may have 255
_MAX_CHUNKS, _MAX_OTHER_CHUNKS = 100_000, 500  # of a PNG: all, and those that hold no pixels
_MAX_BLOCKS = 10_000  # of a GIF's comments and other extensions before its first frame
_MAX_TAGS, _MAX_VALUE_BYTES = 4_096, 2**21  # of a TIFF: entries of a directory, and bytes of its numbers
_MAX_STRIPS = 20_000  # of a TIFF, when they are JPEGs
_MAX_METADATA = 16 * 2**20  # bytes, in total
MAX_EXIF = 2**20  # bytes; a segment of a JPEG has 2**16
_MAX_JUNK = 2**16  # bytes before a JPEG's first scan that belong to no segment
WINDOW = 2**18

FORMATS = ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"]  # no others: some of Pillow's run external programs
_SIGNATURES = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
    b"RIFF": "WEBP",
}


@dataclass
class Header:
    """The result of the pass."""

    bytes: int
    """The size of the file."""
    scans: int = 0
    scan_weight: int = 0
    """The components of all scans. One with arithmetic coding, which is slow and has no minimum size, counts
    as 20. In a TIFF, where each strip has its own scans, the mean over the strips."""
    incomplete: bool = False
    """Whether there may be more scans than were counted."""
    may_turn: bool = False
    """Whether a PNG has metadata that may contain an orientation, perhaps after the pixels."""
    tag_bytes: int = 0
    """The bytes of a TIFF's tags, times three: Pillow reads them three times."""


def read_header(file: BinaryIO, name: str, limits: DecodeLimits) -> Header:
    """Check the structure of a file, and leave it at its start.

    Raises:
        NotAnImage, BrokenImage, ImageTooLarge: the file must not reach a decoder.
    """
    file.seek(0, 2)
    header = Header(file.tell())
    file.seek(0)
    start = file.read(32)
    kind = next((kind for sign, kind in _SIGNATURES.items() if start.startswith(sign)), None)
    if kind is None or (kind == "WEBP" and start[8:12] != b"WEBP"):
        raise NotAnImage(f"{name} is not an image of a known format; use one of {', '.join(FORMATS)}.")
    try:
        match kind:
            case "JPEG":
                _walk_jpeg(file, name, header, limits)
            case "PNG":
                _walk_png(file, name, header)
            case "GIF":
                _walk_gif(file, name)
            case "TIFF":
                _walk_tiff(file, name, header, limits)
            case "WEBP":
                _check_canvas(start, name, limits)
            case "BMP" if struct.unpack_from("<I", start, 14)[0] > 1024:
                raise broken_image(name)
    except (struct.error, IndexError) as error:  # the file ends too early
        raise broken_image(name) from error
    file.seek(0)
    return header


def broken_image(name: str) -> BrokenImage:
    return BrokenImage(f"{name} is broken and cannot be decoded; download it again, or remove it.")


def excessive_metadata(name: str, what: str) -> ImageTooLarge:
    return ImageTooLarge(f"{name} has {what}, which no ordinary image has; save it again without metadata.")


# ---- JPEG -----------------------------------------------------------------------------------

_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # not a stuffed zero, a restart, or fill
SOI, EOI, SOS, APP1 = 0xD8, 0xD9, 0xDA, 0xE1
BARE = {0x01, 0xC8, SOI, EOI, *range(0xF0, 0xFE)}  # for Pillow, none of these has a length
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
ARITHMETIC = {0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
ENDS = {SOI, EOI, *FRAMES}


def _walk_jpeg(
    file: BinaryIO, name: str, header: Header, limits: DecodeLimits, start: int = 0, end: int | None = None
) -> None:
    """Count scans. The contents of a segment, such as a thumbnail in EXIF, are skipped."""
    position, count, size, exif, junk, frame, weight, components = start + 2, 0, 0, 0, 0, 0, 1, 0
    while (match := _next_marker(file, position, header.bytes if end is None else end)) is not None:
        at, marker = match
        count, junk = count + 1, junk + at - position
        if count > _MAX_SEGMENTS or size > _MAX_METADATA or exif > MAX_EXIF:
            raise excessive_metadata(name, f"{count:,} segments with {size:,} bytes of metadata")
        if junk > _MAX_JUNK and not header.scans:
            raise excessive_metadata(name, f"{junk:,} bytes before its first scan that belong to no segment")
        if header.scans and marker in ENDS:  # libjpeg reads no further
            return
        position = at + 2
        if marker in BARE:
            continue
        body = _read_at(file, position, 8)  # its length, and its first bytes
        if header.scans and len(body) < 3:
            return
        length = struct.unpack_from(">H", body)[0]
        position += max(length, 2)
        size += length
        exif += length if marker == APP1 and body[2:] == b"Exif\0\0" else 0
        if marker in FRAMES:
            if frame:  # Pillow would use the second, and libjpeg the first
                raise broken_image(name)
            frame, components, weight = marker, body[7], 20 if marker in ARITHMETIC else 1
        elif marker == SOS:
            header.scans += 1
            header.scan_weight += weight * body[2]
            header.incomplete = header.scans > limits.scans
            single = frame not in PROGRESSIVE and body[2] == components  # the only scan, whatever follows
            if single or header.incomplete:
                return


def _next_marker(file: BinaryIO, position: int, end: int) -> tuple[int, int] | None:
    """The position of the next marker and its second byte; None at the end."""
    window = 2  # usually one segment directly follows another
    while position + 1 < end:
        if match := _MARKER.search(_read_at(file, position, min(window, end - position))):
            return position + match.start(), match[0][1]
        position, window = position + window - 1, min(window * 64, WINDOW)
    return None


# ---- PNG, GIF, WebP -------------------------------------------------------------------------


def _walk_png(file: BinaryIO, name: str, header: Header) -> None:
    """Count chunks. A file that ends too early is left to the decoder."""
    position, count, others, size = 8, 0, 0, 0
    while len(head := _read_at(file, position, 8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        position += length + 12
        count += 1
        if kind not in (b"IDAT", b"fdAT", b"fcTL"):
            others, size = others + 1, size + length
            header.may_turn |= kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
        if (
            count > _MAX_CHUNKS
            or others > _MAX_OTHER_CHUNKS
            or size > _MAX_METADATA
            or (kind == b"eXIf" and length > MAX_EXIF)
        ):
            raise excessive_metadata(name, f"{count:,} chunks with {size:,} bytes of metadata")
        if kind == b"IEND":
            return


def _walk_gif(file: BinaryIO, name: str) -> None:
    """Count the blocks before the first frame."""
    flags = _read_at(file, 10, 1)[0]
    position, count = 13 + (3 << (flags & 7) + 1 if flags & 128 else 0), 0
    while _read_at(file, position, 1) == b"!":
        position += 2
        while length := (_read_at(file, position, 1) or b"\0")[0]:
            position += 1 + length
            count += 1
            if count > _MAX_BLOCKS:
                raise excessive_metadata(name, f"more than {_MAX_BLOCKS:,} blocks before its first frame")
        position += 1
        count += 1


def _check_canvas(start: bytes, name: str, limits: DecodeLimits) -> None:
    """Check the canvas of a WebP, whose memory is allocated as soon as Pillow opens the file."""
    match start[12:16]:
        case b"VP8X":
            wide, high = (int.from_bytes(start[at : at + 3], "little") + 1 for at in (24, 27))
        case b"VP8L":
            bits = struct.unpack_from("<I", start, 21)[0]
            wide, high = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            wide, high = (side & 0x3FFF for side in struct.unpack_from("<HH", start, 26))
        case _:
            raise broken_image(name)
    check_size(name, wide, high, limits)
    check_memory(name, WEBP_BYTES * wide * high, limits)


def _read_at(file: BinaryIO, position: int, count: int) -> bytes:
    file.seek(position)
    return file.read(count)


# ---- TIFF -----------------------------------------------------------------------------------

ONE, TWO, FOUR, EIGHT = {1, 2, 6, 7}, {3, 8}, {4, 9, 11, 13}, {5, 10, 12, 16, 17, 18}  # types, by bytes
WIDTHS = {kind: width for width, kinds in ((1, ONE), (2, TWO), (4, FOUR), (8, EIGHT)) for kind in kinds}
DIRECTORIES = {34665, 34853, 40965}  # EXIF, GPS and interoperability: Pillow reads these too


def _walk_tiff(file: BinaryIO, name: str, header: Header, limits: DecodeLimits) -> None:
    """Count the tags of the first image; Pillow does not read the directories of the others."""
    start = _read_at(file, 0, 16)
    order = "<" if start[:2] == b"II" else ">"
    big = start[2:4] in (b"+\0", b"\0+")
    waiting, seen = list(struct.unpack_from(order + ("8xQ" if big else "4xI"), start)), 0
    while waiting and seen < 4:
        seen += 1
        numbers = 0
        for tag, kind, size, value in _directory_entries(file, name, waiting.pop(), order, big):
            if tag in DIRECTORIES and seen == 1:
                waiting.append(value)
            size = min(size, header.bytes)  # no more can be read
            header.tag_bytes += 3 * size
            # Bytes stay bytes; Pillow makes Python objects of all other types.
            numbers += 0 if kind in ONE else size
            if numbers > _MAX_VALUE_BYTES or header.tag_bytes > limits.memory:
                raise excessive_metadata(name, "tags with very many values")


def _directory_entries(
    file: BinaryIO, name: str, position: int, order: str, big: bool
) -> Iterator[tuple[int, int, int, int]]:
    """The entries of a directory: (tag, type, bytes, value or offset)."""
    if position >= 2**63:
        raise broken_image(name)
    form = f"{order}HHQQ" if big else f"{order}HHII"
    head = _read_at(file, position, 8 if big else 2)
    count = struct.unpack(f"{order}{'Q' if big else 'H'}", head)[0] if head else 0
    if count > _MAX_TAGS:
        raise excessive_metadata(name, f"{count:,} tags")
    step = struct.calcsize(form)
    entries = file.read(count * step)
    for tag, kind, number, value in struct.iter_unpack(form, entries[: len(entries) // step * step]):
        size = number * WIDTHS.get(kind, 0)
        yield tag, kind, size if size > (8 if big else 4) else 0, value


def walk_strips(file: BinaryIO, name: str, opened: ImageFile, header: Header, limits: DecodeLimits) -> None:
    """Count the scans of a TIFF whose strips or tiles are JPEGs, each a complete file."""
    tags = opened.tag_v2  # type: ignore[attr-defined]
    starts, sizes = (tags.get(one, tags.get(other, ())) for one, other in ((273, 324), (279, 325)))
    if len(starts) > _MAX_STRIPS:
        raise excessive_metadata(name, f"{len(starts):,} strips of JPEG data")
    if sum(sizes) > header.bytes:  # they overlap: the same bytes would be decoded many times
        raise broken_image(name)
    scans = weight = 0
    for start, size in zip(starts, sizes, strict=False):
        strip = Header(header.bytes)
        _walk_jpeg(file, name, strip, limits, start, min(start + size, header.bytes))
        scans, weight = max(scans, strip.scans), weight + strip.scan_weight
        header.incomplete |= strip.incomplete
    w, h = strip_size(opened)
    header.scans, header.scan_weight = scans, math.ceil(weight * w * h / math.prod(opened.size))
