"""How long very large data takes to open: indexes of shards without their images.

python -m bench.shards --images 100000000 --shards 10000 --folder indexes --out bench/results/shards.json

The shards are sparse files, so they take no space; the indexes are real (about 28 bytes for each image).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import time
import zlib
from pathlib import Path

import numpy as np


def write_indexes(folder: Path, images: int, shards: int, classes: int = 1000) -> None:
    """Shards with an index each; keys are random, labels uniform, names empty."""
    from vitrail.images.formats.shard_images import HEADER, MAGIC, PLACE, VERSION, column_starts

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    count = images // shards
    info = json.dumps({"classes": [f"class {n}" for n in range(classes)], "others": []}).encode()
    starts, _ = column_starts(len(info), count)
    places = np.zeros(count, dtype=PLACE)
    places["offset"], places["size"] = np.arange(count) * 110_592, 110_000
    for number in range(shards):
        tar = folder / f"photos-{number:06}.tar"
        with tar.open("wb") as file:
            file.truncate(count * 110_592)
        status = os.stat(tar)
        columns = {
            "places": places,
            "labels": rng.integers(classes, size=count, dtype=np.uint32),
            "keys": rng.integers(2**64, size=count, dtype=np.uint64),
            "ends": np.zeros(count, dtype=np.uint64),
        }
        digest = hashlib.sha256(b"".join(columns[name].tobytes() for name in ("labels", "keys", "ends")))
        digests = digest.digest(), hashlib.sha256(places.tobytes()).digest()[:8]
        head = zlib.crc32(info), len(info), count, status.st_size, status.st_mtime_ns, 0, *digests
        with open(f"{tar}.index", "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, *head) + info)
            for column, values in columns.items():
                file.seek(starts[column])
                file.write(values.tobytes())


def resident() -> float:
    """Megabytes of this process in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(folder: Path) -> dict[str, float]:
    """Seconds and megabytes to open the data, and to order an epoch; and how busy the machine was before."""
    import torch

    from vitrail.images.formats.lazy import take_items
    from vitrail.images.formats.sources import open_dataset
    from vitrail.images.loader import batch_indices, epoch_order, steps_in_epoch

    load, before = os.getloadavg()[0], resident()
    start, cpu = time.perf_counter(), time.process_time()
    data = open_dataset(folder)
    opened, opened_cpu = time.perf_counter() - start, time.process_time() - cpu
    after, start = resident(), time.perf_counter()
    order = epoch_order(data.train, seed=0, epoch=1)
    steps = steps_in_epoch(len(data.train), 1024)
    first = batch_indices(order, 0, 1024)
    first_batch = time.perf_counter() - start
    start = time.perf_counter()
    for step in torch.linspace(0, steps - 1, 100).long().tolist():
        list(take_items(data.train.paths or (), batch_indices(order, step, 1024).numpy()))
    each = (time.perf_counter() - start) / 100
    return {
        "images": len(data.train) + len(data.eval_split),
        "load": load,
        "open_s": opened,
        "open_cpu_s": opened_cpu,
        "next_epoch_s": first_batch,
        "batch_of_1024_s": each,
        "first_index": float(first[0]),
        "resident_before_mb": before,
        "resident_after_open_mb": after,
        "resident_mb": resident(),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args()
    if not options.folder.exists():
        write_indexes(options.folder, options.images, options.shards)
    result = measure(options.folder)
    print(json.dumps(result, indent=1))
    if options.out:
        from bench.measure import environment, save

        save({**result, "environment": environment()}, options.out)


if __name__ == "__main__":
    main()
