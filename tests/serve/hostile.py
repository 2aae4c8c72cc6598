"""Images that are small to send and costly to decode, and a decoder that obeys images."""

import io
import struct
import sys
import zlib

from PIL import Image

from serving import picture

# A decoder process in which an image does what its last bytes say: what no limit of `decode` can prevent.
OBEDIENT = """
import os, time
from vitrail.serve import decode_worker, images
usual = images.decode
def decode(file, *more, **options):
    word = bytes(file.getvalue()[-4:])
    while word == b"spin":
        pass
    if word == b"nap.":
        time.sleep(0.6)
    if word == b"die.":
        os.abort()
    if word == b"eat.":
        held = []
        while True:
            held.append(b"x" * 2**24)
    return usual(file, *more, **options)
images.decode = decode
decode_worker.main()
"""
COMMAND = [sys.executable, "-c", OBEDIENT]


def told(word):
    """A good image with a word for the decoder above."""
    return picture() + {"spin": b"spin", "nap": b"nap.", "die": b"die.", "eat": b"eat."}[word]


def many_scans(side=4900, count=1200):
    """A progressive JPEG whose last scan comes again and again: each goes over all of the image."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (9, 99, 200)).save(file, "JPEG", progressive=True, quality=50)
    data = file.getvalue()
    begin, end = data.rindex(b"\xff\xc4"), data.rindex(b"\xff\xd9")  # its Huffman table, scan and all
    return data[:end] + data[begin:end] * count + data[end:]


def strip(wide=1, high=24_900_000):
    """A PNG of one pixel by many, all black."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes((3 * wide + 1) * high))
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", rows), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
