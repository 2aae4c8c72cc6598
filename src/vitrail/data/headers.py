"""A pass over an image file's structure before Pillow opens it: no pixel, and no metadata, is decoded.

Pillow walks segments, chunks and tags in Python, keeps what they hold, and has few limits on how many
there are. What is counted here bounds that work; the pass itself ends where a limit is passed.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from vitrail.data.limits import (
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

SEGMENTS = 2_000  # of a JPEG; an ICC profile may have 255
CHUNKS, OTHER_CHUNKS = 100_000, 500  # of a PNG: all, and those that hold no pixels
BLOCKS = 10_000  # of a GIF's comments and other extensions before its first frame
TAGS, VALUES = 4_096, 2**21  # of a TIFF: entries of a directory, and bytes of its numbers
STRIPS = 20_000  # of a TIFF, when they are JPEGs
METADATA = 16 * 2**20  # bytes, in all
EXIF = 2**20  # bytes; a segment of a JPEG has 2**16
JUNK = 2**16  # bytes before a JPEG's first scan that belong to no segment
WINDOW = 2**18

FORMATS = ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"]  # no others: some of Pillow's start programs
SIGNATURES = {
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
    """What the pass found."""

    bytes: int
    """Of the file."""
    scans: int = 0
    scan_weight: int = 0
    """Components of all scans; an arithmetic-coded one, slow and without a least size, counts as 20.
    In a TIFF, where each strip has its own scans, the mean of the strips."""
    cut_short: bool = False
    """There are more scans than were counted."""
    may_turn: bool = False
    """A PNG has metadata in which an orientation may be, perhaps after the pixels."""
    tag_bytes: int = 0
    """Of a TIFF's tags, three times: Pillow reads them as often."""


def read_header(file: BinaryIO, name: str, limits: DecodeLimits) -> Header:
    """Look through a file, and leave it at its beginning.

    Raises:
        NotAnImage, BrokenImage, ImageTooLarge: it is one that no decoder should see.
    """
    file.seek(0, 2)
    header = Header(file.tell())
    file.seek(0)
    start = file.read(32)
    kind = next((kind for sign, kind in SIGNATURES.items() if start.startswith(sign)), None)
    if kind is None or (kind == "WEBP" and start[8:12] != b"WEBP"):
        raise NotAnImage(f"{name} is not an image of a known format; give one of {', '.join(FORMATS)}.")
    try:
        match kind:
            case "JPEG":
                walk_jpeg(file, name, header, limits)
            case "PNG":
                walk_png(file, name, header)
            case "GIF":
                walk_gif(file, name)
            case "TIFF":
                walk_tiff(file, name, header, limits)
            case "WEBP":
                check_canvas(start, name, limits)
            case "BMP" if struct.unpack_from("<I", start, 14)[0] > 1024:
                raise broken(name)
    except (struct.error, IndexError) as error:  # it ends before it should
        raise broken(name) from error
    file.seek(0)
    return header


def broken(name: str) -> BrokenImage:
    return BrokenImage(f"{name} is broken and cannot be decoded; get it again, or use another.")


def too_much(name: str, what: str) -> ImageTooLarge:
    return ImageTooLarge(f"{name} has {what}, which no ordinary image has. Save it again without metadata.")


# ---- JPEG -----------------------------------------------------------------------------------

MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # not a stuffed zero, a restart, or fill
SOI, EOI, SOS, APP1 = 0xD8, 0xD9, 0xDA, 0xE1
BARE = {0x01, 0xC8, SOI, EOI, *range(0xF0, 0xFE)}  # Pillow takes none of these to have a length
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
ARITHMETIC = {0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
ENDS = {SOI, EOI, *FRAMES}


def walk_jpeg(
    file: BinaryIO, name: str, header: Header, limits: DecodeLimits, start: int = 0, end: int | None = None
) -> None:
    """Count scans. What lies inside a segment, like a thumbnail in EXIF, is not looked into."""
    place, count, size, exif, junk, frame, weight, components = start + 2, 0, 0, 0, 0, 0, 1, 0
    while (found := next_marker(file, place, header.bytes if end is None else end)) is not None:
        at, marker = found
        count, junk = count + 1, junk + at - place
        if count > SEGMENTS or size > METADATA or exif > EXIF:
            raise too_much(name, f"{count:,} segments with {size:,} bytes of metadata")
        if junk > JUNK and not header.scans:
            raise too_much(name, f"{junk:,} bytes before its first scan that belong to no segment")
        if header.scans and marker in ENDS:  # libjpeg reads no further
            return
        place = at + 2
        if marker in BARE:
            continue
        body = read_at(file, place, 8)  # its length, and its first bytes
        if header.scans and len(body) < 3:
            return
        length = struct.unpack_from(">H", body)[0]
        place += max(length, 2)
        size += length
        exif += length if marker == APP1 and body[2:] == b"Exif\0\0" else 0
        if marker in FRAMES:
            if frame:  # Pillow would believe the second, and libjpeg the first
                raise broken(name)
            frame, components, weight = marker, body[7], 20 if marker in ARITHMETIC else 1
        elif marker == SOS:
            header.scans += 1
            header.scan_weight += weight * body[2]
            header.cut_short = header.scans > limits.scans
            whole = frame not in PROGRESSIVE and body[2] == components  # there is but one, whatever follows
            if whole or header.cut_short:
                return


def next_marker(file: BinaryIO, place: int, end: int) -> tuple[int, int] | None:
    """Where the next marker is, from a place on, and its second byte."""
    window = 2  # as a rule one segment follows another
    while place + 1 < end:
        if match := MARKER.search(read_at(file, place, min(window, end - place))):
            return place + match.start(), match[0][1]
        place, window = place + window - 1, min(window * 64, WINDOW)
    return None


# ---- PNG, GIF, WebP -------------------------------------------------------------------------


def walk_png(file: BinaryIO, name: str, header: Header) -> None:
    """Count chunks. A file that ends too early is for the decoder to find."""
    place, count, others, size = 8, 0, 0, 0
    while len(head := read_at(file, place, 8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        place += length + 12
        count += 1
        if kind not in (b"IDAT", b"fdAT", b"fcTL"):
            others, size = others + 1, size + length
            header.may_turn |= kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
        if count > CHUNKS or others > OTHER_CHUNKS or size > METADATA or (kind == b"eXIf" and length > EXIF):
            raise too_much(name, f"{count:,} chunks with {size:,} bytes of metadata")
        if kind == b"IEND":
            return


def walk_gif(file: BinaryIO, name: str) -> None:
    """Count the blocks before the first frame."""
    flags = read_at(file, 10, 1)[0]
    place, count = 13 + (3 << (flags & 7) + 1 if flags & 128 else 0), 0
    while read_at(file, place, 1) == b"!":
        place += 2
        while length := (read_at(file, place, 1) or b"\0")[0]:
            place += 1 + length
            count += 1
            if count > BLOCKS:
                raise too_much(name, f"more than {BLOCKS:,} blocks before its first frame")
        place += 1
        count += 1


def check_canvas(start: bytes, name: str, limits: DecodeLimits) -> None:
    """A WebP's decoder takes memory for the canvas as soon as Pillow opens the file."""
    match start[12:16]:
        case b"VP8X":
            wide, high = (int.from_bytes(start[at : at + 3], "little") + 1 for at in (24, 27))
        case b"VP8L":
            bits = struct.unpack_from("<I", start, 21)[0]
            wide, high = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            wide, high = (side & 0x3FFF for side in struct.unpack_from("<HH", start, 26))
        case _:
            raise broken(name)
    check_size(name, wide, high, limits)
    check_memory(name, WEBP_BYTES * wide * high, limits)


def read_at(file: BinaryIO, place: int, count: int) -> bytes:
    file.seek(place)
    return file.read(count)


# ---- TIFF -----------------------------------------------------------------------------------

ONE, TWO, FOUR, EIGHT = {1, 2, 6, 7}, {3, 8}, {4, 9, 11, 13}, {5, 10, 12, 16, 17, 18}  # types by width
WIDTHS = {kind: width for width, kinds in ((1, ONE), (2, TWO), (4, FOUR), (8, EIGHT)) for kind in kinds}
DIRECTORIES = {34665, 34853, 40965}  # EXIF, GPS and interoperability: Pillow reads these too


def walk_tiff(file: BinaryIO, name: str, header: Header, limits: DecodeLimits) -> None:
    """Count the tags of the first image; Pillow does not read the directories of others."""
    start = read_at(file, 0, 16)
    order = "<" if start[:2] == b"II" else ">"
    big = start[2:4] in (b"+\0", b"\0+")
    waiting, seen = list(struct.unpack_from(order + ("8xQ" if big else "4xI"), start)), 0
    while waiting and seen < 4:
        seen += 1
        numbers = 0
        for tag, kind, size, value in tags_of(file, name, waiting.pop(), order, big):
            if tag in DIRECTORIES and seen == 1:
                waiting.append(value)
            size = min(size, header.bytes)  # no more can be read
            header.tag_bytes += 3 * size
            # Bytes stay what they are; Pillow makes Python objects of all others.
            numbers += 0 if kind in ONE else size
            if numbers > VALUES or header.tag_bytes > limits.memory:
                raise too_much(name, "tags of very many values")


def tags_of(
    file: BinaryIO, name: str, place: int, order: str, big: bool
) -> Iterator[tuple[int, int, int, int]]:
    """(tag, type, bytes, value or offset) of a directory's entries."""
    if place >= 2**63:
        raise broken(name)
    form = f"{order}HHQQ" if big else f"{order}HHII"
    head = read_at(file, place, 8 if big else 2)
    count = struct.unpack(f"{order}{'Q' if big else 'H'}", head)[0] if head else 0
    if count > TAGS:
        raise too_much(name, f"{count:,} tags")
    step = struct.calcsize(form)
    entries = file.read(count * step)
    for tag, kind, number, value in struct.iter_unpack(form, entries[: len(entries) // step * step]):
        size = number * WIDTHS.get(kind, 0)
        yield tag, kind, size if size > (8 if big else 4) else 0, value


def walk_strips(file: BinaryIO, name: str, opened: ImageFile, header: Header, limits: DecodeLimits) -> None:
    """Count the scans of a TIFF whose strips or tiles are JPEGs, each a file by itself."""
    tags = opened.tag_v2  # type: ignore[attr-defined]
    starts, sizes = (tags.get(one, tags.get(other, ())) for one, other in ((273, 324), (279, 325)))
    if len(starts) > STRIPS:
        raise too_much(name, f"{len(starts):,} strips of JPEG data")
    if sum(sizes) > header.bytes:  # they overlap, and the same bytes would be decoded many times
        raise broken(name)
    scans = weight = 0
    for start, size in zip(starts, sizes, strict=False):
        strip = Header(header.bytes)
        walk_jpeg(file, name, strip, limits, start, min(start + size, header.bytes))
        scans, weight = max(scans, strip.scans), weight + strip.scan_weight
        header.cut_short |= strip.cut_short
    w, h = strip_size(opened)
    header.scans, header.scan_weight = scans, math.ceil(weight * w * h / math.prod(opened.size))
