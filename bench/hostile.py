"""`vitrail serve` while some clients send images that are small to send and costly to decode.

    python -m bench.hostile

Four honest clients ask the toy model without a pause, first by themselves, then beside two clients with a
progressive JPEG of 1,200 extra scans, and beside twelve with a PNG of 1 x 24.9 million pixels. Memory is that
of the server and its decoders together.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import Any

from PIL import Image

from bench.load import Body, closed
from bench.measure import environment, save
from bench.serve import as_bodies, make_images, make_model, memory, serving

HONEST = 4


def many_scans(side: int = 4900, count: int = 1200) -> bytes:
    """A progressive JPEG whose last scan comes again and again: each goes over all of the image."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (9, 99, 200)).save(file, "JPEG", progressive=True, quality=50)
    data = file.getvalue()
    begin, end = data.rindex(b"\xff\xc4"), data.rindex(b"\xff\xd9")  # its Huffman table, and all of it
    return data[:end] + data[begin:end] * count + data[end:]


def strip(wide: int = 1, high: int = 24_900_000) -> bytes:
    """A PNG of one pixel by many, all black."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes((3 * wide + 1) * high))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


async def beside(port: int, process: subprocess.Popen[bytes], body: Body, count: int, seconds: float) -> Any:
    """Honest clients beside so many others."""
    honest, most = as_bodies("ours", make_images(16, 224)), [0.0]

    async def watch() -> None:
        while True:
            most[0] = max(most[0], memory(process))
            await asyncio.sleep(0.05)

    watcher = asyncio.create_task(watch())
    attack = asyncio.create_task(closed(port, "/v1/predict", [body], count, seconds)) if count else None
    seen = await closed(port, "/v1/predict", honest, HONEST, seconds)
    found = await attack if attack else None
    watcher.cancel()
    return {
        "p50_ms": seen.latency(0.5),
        "p99_ms": seen.latency(0.99),
        "answered": len(seen.seconds),
        "not_answered": seen.other | ({503: len(seen.refused)} if seen.refused else {}),
        "most_mb": round(most[0]),
        "answers_to_hostile": found.other if found else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--out", type=Path, default=Path("bench/results/hostile.json"))
    args = parser.parse_args()
    kinds = {"none": (b"", 0), "scans": (many_scans(), 2), "strips": (strip(), 12)}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, serving("ours", make_model("mu/4", Path(folder))) as server:
        for name, (data, count) in kinds.items():
            found[name] = asyncio.run(beside(*server, (data, "image/png"), count, args.seconds))
            print(name, json.dumps(found[name]), flush=True)
    save({**found, "seconds": args.seconds, "honest": HONEST, "environment": environment()}, args.out)


if __name__ == "__main__":
    main()
