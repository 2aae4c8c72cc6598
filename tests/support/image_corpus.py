"""Small image files that are, or claim to be, expensive to decode. Each is generated on demand.

for name, case in CASES.items():
    decode_image(io.BytesIO(case.make()), name)    # with the result case.outcome
"""

import io
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image

OK, LARGE, BROKEN, OTHER = "ok", "too large", "broken", "not an image"


@dataclass(frozen=True)
class Case:
    make: Callable[[], bytes]
    outcome: str


def saved(kind, image, **settings):
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def plain(mode="RGB", size=(64, 64)):
    return Image.new(mode, size, 0)


# ---- JPEG -----------------------------------------------------------------------------------

END = b"\xff\xd9"


def segment(marker, body):
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def jpeg(width, height, scans, frame=0xC2, components=3, before=b""):
    """A JPEG with tables of one symbol each: a bit for a DC value of 0, and a bit for 2**14 empty blocks."""
    parts = b"".join(bytes([number + 1, 0x11, 0]) for number in range(components))
    head = segment(0xDB, b"\0" + b"\1" * 64) + before
    head += segment(frame, struct.pack(">BHHB", 8, height, width, components) + parts)
    for table, symbol in ((0x00, 0x00), (0x10, 0xE0)):
        head += segment(0xC4, bytes([table, 1]) + bytes(15) + bytes([symbol]))
    return b"\xff\xd8" + head + b"".join(scans) + END


def scan(components, data=b"", band=(0, 0), bits=(0, 0)):
    parts = b"".join(bytes([one, 0]) for one in components)
    return segment(0xDA, bytes([len(components)]) + parts + bytes([*band, bits[0] << 4 | bits[1]])) + data


def first_scan(side, components=(1, 2, 3)):
    blocks = ((side + 7) // 8) ** 2
    return scan(components, bytes(len(components) * blocks // 8 + 1), bits=(0, 1))


def refinement(side):
    """Every coefficient of a component is visited, for a few bytes."""
    blocks = ((side + 7) // 8) ** 2
    return scan((1,), bytes(2 * (blocks // 2**14 + 1)), band=(1, 63), bits=(1, 0))


def many_scans(side, count):
    return jpeg(side, side, [first_scan(side)] + [refinement(side)] * count)


def with_segments(marker, body, count):
    image = saved("JPEG", plain())
    return image[:2] + segment(marker, body) * count + image[2:]


def overlapping_exif(entries=5000, size=60_000):
    """A directory in which the value of each tag is nearly all of the EXIF data."""
    tags = b"".join(struct.pack("<HHII", 1000 + number, 7, size, 8) for number in range(entries))
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, entries) + tags + bytes(4)


JPEG = {
    "jpeg progressive": Case(lambda: saved("JPEG", plain(), progressive=True), OK),
    "jpeg 4000 scans of 24 megapixels": Case(lambda: many_scans(4900, 4000), LARGE),
    "jpeg 98 scans of 14 megapixels": Case(lambda: many_scans(3800, 97), OK),
    "jpeg 40 scans of 49 megapixels": Case(lambda: many_scans(7000, 39), LARGE),
    "jpeg empty scans": Case(lambda: jpeg(4900, 4900, [first_scan(4900)] + [scan((1, 2, 3))] * 9000), LARGE),
    "jpeg baseline, many scans": Case(
        lambda: jpeg(2000, 2000, [scan((one % 3 + 1,), bytes(9), (0, 63)) for one in range(3000)], 0xC0),
        LARGE,
    ),
    "jpeg scans in a thumbnail": Case(lambda: with_segments(0xE1, b"Exif\0\0" + b"\xff\xda" * 9000, 1), OK),
    "jpeg arithmetic": Case(lambda: jpeg(64, 64, [scan((1, 2, 3), bytes(99), (0, 63))], 0xC9), OK),
    "jpeg arithmetic, large": Case(
        lambda: jpeg(7000, 7000, [scan((1, 2, 3), bytes(99), (0, 63))], 0xC9), LARGE
    ),
    "jpeg comments": Case(lambda: with_segments(0xFE, b"", 300_000), LARGE),
    "jpeg exif in pieces": Case(lambda: with_segments(0xE1, b"Exif\0\0ab", 300_000), LARGE),
    "jpeg exif that overlaps": Case(lambda: with_segments(0xE1, overlapping_exif(), 1), OK),
    "jpeg tables": Case(lambda: with_segments(0xDB, b"\0" + b"\1" * 64, 9000), LARGE),
    "jpeg profile of 16 MB": Case(lambda: with_segments(0xE2, b"ICC_PROFILE\0" + bytes(65_000), 250), OK),
    "jpeg profile of 39 MB": Case(lambda: with_segments(0xE2, b"ICC_PROFILE\0" + bytes(65_000), 600), LARGE),
    "jpeg photoshop blocks": Case(
        lambda: with_segments(0xED, b"Photoshop 3.0\0" + (b"8BIM\0\1\0\0" + bytes(4)) * 5000, 200), OK
    ),
    "jpeg junk": Case(lambda: b"\xff\xd8\xff" + bytes(3_000_000) + saved("JPEG", plain())[2:], LARGE),
    "jpeg fill": Case(lambda: b"\xff\xd8" + b"\xff" * 3_000_000 + saved("JPEG", plain())[2:], LARGE),
    "jpeg two frames": Case(
        lambda: jpeg(16, 16, [scan((1, 2, 3))], before=segment(0xC0, struct.pack(">BHHB", 8, 9, 9, 0))),
        BROKEN,
    ),
    "jpeg no data": Case(lambda: jpeg(7000, 7000, []), BROKEN),
    "mpo": Case(lambda: saved("MPO", plain(), save_all=True, append_images=[plain()] * 3), OK),
    "mpo, many tags": Case(lambda: with_segments(0xE2, b"MPF\0" + overlapping_exif()[6:], 1), OK),
}


# ---- PNG ------------------------------------------------------------------------------------


def chunk(kind, body=b""):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by PNG's color types


def png(width, height, color=0, depth=8, interlaced=False, before=b"", after=b"", data=None):
    """A black image with the best compression ratio and the slowest filter in each row."""
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
    data = chunk(b"IDAT", rows(width, height, SAMPLES[color] * depth, interlaced)) if data is None else data
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + before + data + after + chunk(b"IEND")


def rows(width, height, bits, interlaced):
    pieces = []
    for x, y, right, down in PASSES if interlaced else ((0, 0, 1, 1),):
        row = b"\4" + bytes(-(-(-(-(width - x) // right) * bits) // 8))
        count, at_once = -(-(height - y) // down), max(1, 2**20 // len(row))
        if width > x:
            pieces += [(row * at_once, count // at_once), (row * (count % at_once), 1)]
    return deflated(pieces)


def deflated(pieces):
    """A zlib stream of (piece, repetitions) at the best ratio; each piece is compressed once."""
    parts, check = [b"\x78\xda"], 1
    for piece, times in pieces:
        squeeze = zlib.compressobj(9, wbits=-15)
        parts.append((squeeze.compress(piece) + squeeze.flush(zlib.Z_FULL_FLUSH)) * times)
        for _ in range(times):
            check = zlib.adler32(piece, check)
    return b"".join(parts) + b"\3\0" + struct.pack(">I", check)


def zeros(megabytes):
    return deflated([(bytes(10**6), megabytes)])


def animated_png(frames):
    body = zlib.compress(bytes(2 * 64 * 65))[:-4]  # incomplete, but long enough
    control = struct.pack(">IIIIHHBB", 1, 1, 0, 0, 1, 1, 0, 0)
    parts = [
        chunk(b"fcTL", struct.pack(">I", 2 * n) + control)
        + chunk(b"fdAT", struct.pack(">I", 2 * n + 1) + body)
        for n in range(frames)
    ]
    return png(64, 64, before=chunk(b"acTL", struct.pack(">II", frames, 0)), after=b"".join(parts))


PNG = {
    "png column of 25 megapixels": Case(lambda: png(1, 24_900_000), LARGE),
    "png row of 40 megapixels": Case(lambda: png(40_000_000, 1), LARGE),
    "png longest row": Case(lambda: png(65_535, 1), OK),
    "png interlaced, 16 bits": Case(lambda: png(4900, 4900, 6, 16, True), OK),
    "png best ratio": Case(lambda: png(7000, 7000, 2), OK),
    "png gray, 16 bits": Case(lambda: png(6900, 6900, 0, 16), OK),
    "png transparent": Case(lambda: png(6500, 6500, 6), OK),
    "png no data": Case(lambda: png(7000, 7000, 2, data=chunk(b"IDAT")), BROKEN),
    "png far too large": Case(lambda: png(2**31 - 1, 2**31 - 1, data=chunk(b"IDAT")), LARGE),
    "png profile bomb": Case(lambda: png(8, 8, before=chunk(b"iCCP", b"a\0\0" + zeros(100))), BROKEN),
    "png profiles": Case(lambda: png(8, 8, before=chunk(b"iCCP", b"a\0\0" + zeros(1)) * 400), OK),
    "png thousands of profiles": Case(
        lambda: png(8, 8, before=chunk(b"iCCP", b"a\0\0" + zeros(1)) * 9000), LARGE
    ),
    "png zTXt bomb": Case(lambda: png(8, 8, before=chunk(b"zTXt", b"a\0\0" + zeros(100))), BROKEN),
    "png zTXt, many": Case(lambda: png(8, 8, before=chunk(b"zTXt", b"a\0\0" + zeros(1)) * 400), BROKEN),
    "png iTXt bomb": Case(lambda: png(8, 8, after=chunk(b"iTXt", b"a\0\1\0\0\0" + zeros(100))), BROKEN),
    "png empty chunks": Case(lambda: png(8, 8, before=chunk(b"aaAa") * 200_000), LARGE),
    "png data in pieces": Case(lambda: png(8, 8, data=chunk(b"IDAT") * 200_000), LARGE),
    "png private chunk of 20 MB": Case(lambda: png(8, 8, after=chunk(b"aaAa", bytes(20 * 2**20))), LARGE),
    "png exif of 2 MB": Case(lambda: png(8, 8, after=chunk(b"eXIf", bytes(2**21))), LARGE),
    "png exif that overlaps": Case(lambda: png(8, 8, before=chunk(b"eXIf", overlapping_exif()[6:])), OK),
    "png animated": Case(lambda: animated_png(20_000), OK),
}


# ---- WebP -----------------------------------------------------------------------------------


def riff(*chunks):
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def riff_chunk(kind, body):
    return kind + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)


def animated_webp(frames, side=8):
    still = saved("WEBP", plain(size=(8, 8)), lossless=True)[12:]
    small = b"".join(struct.pack("<I", number)[:3] for number in (0, 0, 7, 7, 1)) + b"\0"
    canvas = struct.pack("<I", side - 1)[:3]
    head = riff_chunk(b"VP8X", b"\2" + bytes(3) + canvas * 2) + riff_chunk(b"ANIM", bytes(6))
    return riff(head, riff_chunk(b"ANMF", small + still) * frames)


WEBP = {
    "webp": Case(lambda: saved("WEBP", plain("RGBA", (4500, 4500)), lossless=True), OK),
    "webp canvas of 49 megapixels": Case(lambda: animated_webp(2, 7000), LARGE),
    "webp canvas": Case(lambda: animated_webp(1, 16_384), LARGE),
    "webp canvas of 2**48 pixels": Case(lambda: animated_webp(1, 2**24), LARGE),
    "webp animated": Case(lambda: animated_webp(20_000), OK),
    "webp canvas of 20 megapixels": Case(lambda: animated_webp(2, 4500), OK),
    "webp exif of 3 MB": Case(
        lambda: saved("WEBP", plain(), exif=b"Exif\0\0II*\0" + struct.pack("<IH", 8, 0) + bytes(3 * 2**20)),
        LARGE,
    ),
    "webp cut off": Case(lambda: animated_webp(1)[:40], BROKEN),
}


# ---- TIFF -----------------------------------------------------------------------------------


def tiff(width, height, *tags, data=b"", compression=1, following=0, strips=True):
    """A gray TIFF. Tags are (number, type, count, value); the value "data" is the offset of the data."""
    every = [
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 3, 1, 8),
        (259, 3, 1, compression),
        (262, 3, 1, 1),
    ]
    every += [(273, 4, 1, "data"), (279, 4, 1, len(data))] if strips else []
    every = sorted([*every, *tags])
    at = 8 + 2 + 12 * len(every) + 4
    entries = [struct.pack("<HHII", a, b, c, at if d == "data" else d) for a, b, c, d in every]
    return (
        b"II*\0" + struct.pack("<IH", 8, len(every)) + b"".join(entries) + struct.pack("<I", following) + data
    )


def many_directories(count):
    """A TIFF with many directories, of which only the first is read."""
    first = tiff(8, 8, data=bytes(64))
    file = bytearray(first[:-68] + struct.pack("<I", len(first)) + first[-64:])
    directory = first[8:-68]
    for _ in range(count):
        file += directory + struct.pack("<I", len(file) + len(directory) + 4)
    return bytes(file)


def tiled(side, tile, compression=8):
    data = rows(tile, tile, 8, False) if tile * tile < 10**7 else zeros(10)
    tags = [(322, 4, 1, tile), (323, 4, 1, tile), (324, 4, 1, "data"), (325, 4, 1, len(data))]
    return tiff(side, side, *tags, data=data, compression=compression, strips=False)


def jpeg_in_tiff(side, scans):
    data = jpeg(side, side, [first_scan(side, (1,))] + [refinement(side)] * scans, components=1)
    return tiff(side, side, (278, 4, 1, side), data=data, compression=7)


TIFF = {
    "tiff deflated": Case(
        lambda: saved("TIFF", plain(size=(6900, 6900)), compression="tiff_adobe_deflate"), OK
    ),
    "tiff lzw": Case(lambda: saved("TIFF", plain(size=(6900, 6900)), compression="tiff_lzw"), OK),
    "tiff jpeg": Case(lambda: saved("TIFF", plain(size=(6900, 6900)), compression="jpeg"), OK),
    "tiff lzma": Case(lambda: saved("TIFF", plain(size=(1000, 1000)), compression="lzma"), OK),
    "tiff jpeg of many scans": Case(lambda: jpeg_in_tiff(6900, 3000), LARGE),
    "tiff one strip of zeros": Case(
        lambda: tiff(7000, 7000, (278, 4, 1, 7000), data=zeros(49), compression=8), OK
    ),
    "tiff no data": Case(lambda: tiff(7000, 7000, data=b"", compression=8), BROKEN),
    "tiff strips beyond the end": Case(lambda: tiff(7000, 7000, data=bytes(100)), BROKEN),
    "tiff strip of 4 GB": Case(
        lambda: tiff(64, 64, (278, 4, 1, 2**32 - 1), data=zeros(9), compression=8), OK
    ),
    "tiff tile of 900 megapixels": Case(lambda: tiled(64, 30_000), LARGE),
    "tiff tile of 2**62 pixels": Case(lambda: tiled(64, 2**31), LARGE),
    "tiff tile": Case(lambda: tiled(64, 64), OK),
    "tiff far too large": Case(lambda: tiff(2**31, 2**31, data=bytes(9)), LARGE),
    "tiff column": Case(lambda: tiff(1, 30_000_000, data=zeros(30), compression=8), LARGE),
    "tiff many directories": Case(lambda: many_directories(20_000), OK),
    "tiff many tags": Case(
        lambda: tiff(8, 8, *((n, 1, 1, 0) for n in range(1000, 60_000)), data=bytes(64)), LARGE
    ),
    "tiff many rationals": Case(lambda: tiff(8, 8, (282, 5, 2**20, 8), data=bytes(2**23)), LARGE),
    "tiff tags that overlap": Case(
        lambda: tiff(8, 8, *((n, 7, 2**22, 8) for n in range(1000, 2000)), data=bytes(2**22)), LARGE
    ),
    "tiff 2**60 tags": Case(lambda: b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 2**60) + bytes(100), LARGE),
    "tiff cut off": Case(lambda: tiff(8, 8)[:20], BROKEN),
}


# ---- GIF, BMP, and others -------------------------------------------------------------------


def gif(screen, frame, data=b"\2\2\x44\1\0", before=b"", frames=1):
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + bytes([1, 2, 3, 9, 8, 7])
    one = b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + data
    return head + before + one * frames + b";"


def bmp(width, height, compression, data, header=40):
    bits = {0: 24, 1: 8, 2: 4}[compression]
    info = struct.pack("<IiiHHIIiiII", header, width, height, 1, bits, compression, 0, 0, 0, 2, 0)
    colors = b"" if bits == 24 else bytes([1, 2, 3, 0, 9, 8, 7, 0])
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + len(colors)) + info + colors + data


REST = {
    "gif": Case(lambda: saved("GIF", plain("P", (7000, 7000))), OK),
    "gif frame larger than the screen": Case(lambda: gif((1, 1), (60_000, 60_000)), LARGE),
    "gif frame of 36 megapixels, no data": Case(lambda: gif((1, 1), (6000, 6000)), BROKEN),
    "gif screen larger than the frame": Case(lambda: gif((65_535, 65_535), (1, 1)), LARGE),
    "gif screen of 49 megapixels": Case(lambda: gif((7000, 7000), (1, 1)), OK),
    "gif frames": Case(lambda: gif((1, 1), (1, 1), frames=100_000), OK),
    "gif comment in pieces": Case(
        lambda: gif((1, 1), (1, 1), before=b"!\xfe" + b"\1a" * 500_000 + b"\0"), LARGE
    ),
    "gif comments": Case(lambda: gif((1, 1), (1, 1), before=b"!\xfe\1a\0" * 500_000), LARGE),
    "bmp no data": Case(lambda: bmp(7000, 7000, 0, b""), BROKEN),
    "bmp runs, far too large": Case(lambda: bmp(2**31 - 1, 2**31 - 1, 1, b"\xff\1" * 9), LARGE),
    "bmp runs of 49 megapixels": Case(lambda: bmp(7000, 7000, 1, b"\xff\1" * 200_000), LARGE),
    "bmp runs, ends of lines": Case(lambda: bmp(2800, 2800, 1, b"\1\1\0\0" * 2800), OK),
    "bmp runs of 4 bits": Case(lambda: bmp(2800, 2800, 2, (b"\xff\1" * 11 + b"\0\0") * 2800), OK),
    "bmp short runs": Case(lambda: bmp(2800, 2800, 1, b"\1\1" * 7_840_000), LARGE),
    "bmp runs, nothing but ends": Case(lambda: bmp(2800, 2800, 1, b"\0\0" * 5_000_000), LARGE),
    "bmp header of 2 GB": Case(lambda: bmp(8, 8, 0, bytes(5_000_000), header=2**31 - 1), BROKEN),
    "text": Case(lambda: b"hello", OTHER),
    "nothing": Case(lambda: b"", OTHER),
    "postscript": Case(lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", OTHER),
    "noise": Case(lambda: b"\1" + os.urandom(9999), OTHER),
    "wave": Case(lambda: b"RIFF\0\0\1\0WAVEfmt " + bytes(100), OTHER),
}

CASES = JPEG | PNG | WEBP | TIFF | REST
