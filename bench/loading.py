"""Loading alone, by workers: from JPEG files and packed files to uint8 batches in the calling process.

    python -m bench.loading --images 12800 --workers 0,2,4,8,16

The images are those of bench.photos. Training reads random crops of 8 to 100 % of the area at 224 x 224,
evaluation a short side of 256 and the center of 224. Batches have 256 images, on the GPU where there is one;
nothing is computed on them. A rate is that of five passes over the images, after one that fills the caches
and starts the workers. `independent` is the same decoding in as many processes that exchange nothing: the
limit of the machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.measure import environment, save
from bench.photos import HIGH, WIDE, write_images
from vitrail.images.augment.pipeline import Augment, crop_numbers
from vitrail.images.crop import propose_crops, read_crop
from vitrail.images.decode import read_pixels
from vitrail.images.formats.pack_writer import pack_dataset
from vitrail.images.formats.sources import Split, read_data
from vitrail.images.loader import Reader
from vitrail.images.preprocess import Preprocess
from vitrail.images.workers import WorkerPlan, Workers

BATCH = 256
PASSES = 5
SPEC = Preprocess(size=224, resize="shortest", resize_to=256)
CROP = Augment(crop=0.08)
TASKS = {"training": CROP, "evaluation": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=12_800)
    parser.add_argument("--workers", default="0,2,4,8,16", help="numbers of workers, separated by commas")
    parser.add_argument("--folder", type=Path, default=None, help="where the images go for a while")
    parser.add_argument("--out", type=Path, default=Path("bench/results/loading.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts = [int(count) for count in args.workers.split(",")]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        files = Path(folder) / "files"
        kilobytes = write_images(files, args.images)
        print(f"{args.images:,} JPEGs of {WIDE} x {HIGH}, {kilobytes:.1f} kB each on average", flush=True)
        rows = [print_row(row) for row in measure_files(read_data(files).train, counts)]
        rows += [print_row(row) for row in measure_packed(files, counts)]
    result = {"images": args.images, "kilobytes": kilobytes, "rows": rows, "environment": environment()}
    save(result, args.out)


def print_row(row: dict[str, Any]) -> dict[str, Any]:
    print(
        f"{row['source']:14}{row['task']:12}{row['by']:12}{row['workers']:4d}"
        f"{row['images_per_s']:12,.0f} images/s{row.get('to_independent', ''):>8}",
        flush=True,
    )
    return row


# ---- rates ----------------------------------------------------------------------------------


def measure_files(split: Split, counts: list[int]) -> Iterator[dict[str, Any]]:
    for task, augment in TASKS.items():
        for count in counts:
            limit = independent_rate(split, augment, max(1, count))
            yield _row("files", task, "independent", max(1, count), limit)
            for kind in ("processes", "threads") if count else ("none",):
                if kind == "threads" and count > 4:
                    continue
                rate = reader_rate(split, augment, WorkerPlan(kind, count, ""))  # type: ignore[arg-type]
                yield _row("files", task, kind, count, rate, limit)


def measure_packed(files: Path, counts: list[int]) -> Iterator[dict[str, Any]]:
    for name, jpeg in (("packed", False), ("packed JPEG", True)):
        out = files.with_name(f"{name}.pack")
        begin = time.perf_counter()
        result = pack_dataset(read_data(files), out, jpeg=jpeg, workers=max(counts))
        seconds = time.perf_counter() - begin
        yield _row(name, f"{result.bytes / 1e9:.2f} GB", "packing", max(counts), result.images / seconds)
        split = read_data(out).train
        for task, augment in TASKS.items():
            for count in counts:
                plan = WorkerPlan("processes" if count else "none", count, "")
                yield _row(name, task, plan.kind, count, reader_rate(split, augment, plan))
        out.unlink()


def _row(
    source: str, task: str, by: str, workers: int, rate: float, limit: float | None = None
) -> dict[str, Any]:
    row = {"source": source, "task": task, "by": by, "workers": workers, "images_per_s": round(rate, 1)}
    return row | ({} if limit is None else {"to_independent": round(rate / limit, 3)})


def reader_rate(split: Split, augment: Augment | None, plan: WorkerPlan) -> float:
    """Images per second after the first pass over the images.

    Of several passes, since workers that have no more batches wait for the others at the very end: a single
    pass of 25 batches by 16 workers would measure that.
    """
    running = Workers(plan, image_bytes=3 * SPEC.target[0] * SPEC.target[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reader = Reader(split, SPEC, augment=augment, workers=running, device=device)
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    requests = ((epoch, part) for epoch in range(1 + PASSES) for part in order.split(BATCH))
    begin, passed = 0.0, 0
    try:
        for batch in reader.batches(requests):
            passed += len(batch.indices)
            if passed == len(split):
                begin = time.perf_counter()
        return PASSES * len(split) / (time.perf_counter() - begin)
    finally:
        running.close()


def independent_rate(split: Split, augment: Augment | None, count: int) -> float:
    """Images per second of as many processes that decode their part of the images and return nothing."""
    context = multiprocessing.get_context("spawn")
    barrier, seconds = context.Barrier(count), context.SimpleQueue()
    paths = list(split.paths or ())
    processes = [
        context.Process(target=_decode_part, args=(paths[part::count], augment, barrier, seconds))
        for part in range(count)
    ]
    for process in processes:
        process.start()
    slowest = max(seconds.get() for _ in processes)
    for process in processes:
        process.join()
    return len(paths) / slowest


def _decode_part(paths: list[Any], augment: Augment | None, barrier: Any, seconds: Any) -> None:
    torch.set_num_threads(1)
    read: Callable[..., Any]
    if augment is None or augment.crop is None:
        read, extra = partial(read_pixels, preprocess=SPEC), [{} for _ in paths]
    else:
        numbers = crop_numbers(0, 1, torch.arange(len(paths)))
        proposals = propose_crops(numbers, augment.crop, augment.crop_ratio).tolist()
        read = partial(read_crop, preprocess=SPEC, max_ratio=augment.crop_ratio)
        extra = [{"proposals": one} for one in proposals]
    for path, more in zip(paths[:32], extra, strict=False):  # imports, caches
        read(path, **more)
    barrier.wait()
    begin = time.perf_counter()
    for path, more in zip(paths, extra, strict=True):
        read(path, **more)
    seconds.put(time.perf_counter() - begin)


if __name__ == "__main__":
    main()
