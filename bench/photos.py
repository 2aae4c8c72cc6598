"""JPEG files to measure on: photographs of 500 x 375 pixels and about 35 kB, in a folder for each class.

    python -m bench.photos OUT --train 11520 --val 1280

Each is another crop of a photograph (../shared/data/hymenoptera_s160.tar where it is there, else the two of
scikit-learn), enlarged; crop number i is the same on every machine. There are 8 classes, dealt in turn.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

PHOTOGRAPHS = Path(__file__).resolve().parents[2] / "shared" / "data" / "hymenoptera_s160.tar"
WIDE, HIGH, QUALITY = 500, 375, 84
CLASSES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=11_520)
    parser.add_argument("--val", type=int, default=1_280)
    args = parser.parse_args()
    write_splits(args.out, args.train, args.val)


def write_splits(folder: Path, train: int, val: int) -> None:
    """Write a training and a validation set of different crops."""
    write_images(folder / "val", val)
    write_images(folder / "train", train, first=val)


def write_images(folder: Path, count: int, first: int = 0) -> float:
    """Write crops into a folder per class, from number `first` on; return their mean size in kB."""
    for number in range(CLASSES):
        (folder / f"class{number}").mkdir(parents=True)
    photographs = list(_photographs())
    jobs = [
        (folder / f"class{i % CLASSES}" / f"{i:06d}.jpg", photographs[i % len(photographs)], i)
        for i in range(first, first + count)
    ]
    with multiprocessing.get_context("spawn").Pool() as pool:
        sizes = pool.starmap(_write_image, jobs, chunksize=64)
    return sum(sizes) / count / 1000


def _photographs() -> Iterator[bytes]:
    """The bytes of image files."""
    if PHOTOGRAPHS.exists():
        with tarfile.open(PHOTOGRAPHS) as tar:
            for member in tar:
                if member.name.lower().endswith(".jpg") and (file := tar.extractfile(member)):
                    yield file.read()
        return
    from sklearn.datasets import load_sample_images

    for pixels in load_sample_images().images:
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        yield buffer.getvalue()


def _write_image(path: Path, photograph: bytes, number: int) -> int:
    """Write the crop with this number, enlarged; return its bytes."""
    image = Image.open(io.BytesIO(photograph)).convert("RGB")
    rng = np.random.default_rng(number)
    w, h = (side * rng.uniform(0.8, 1.0) for side in image.size)
    left, top = rng.uniform(0, image.width - w), rng.uniform(0, image.height - h)
    box = (left, top, left + w, top + h)
    image.resize((WIDE, HIGH), Image.Resampling.BICUBIC, box=box).save(path, quality=QUALITY)
    return path.stat().st_size


if __name__ == "__main__":
    main()
