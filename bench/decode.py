"""From a JPEG file to the pixels of a model: ours against plain Pillow, in one process and one thread.

    python -m bench.decode

The images are the two sample photographs of scikit-learn, resized and saved as JPEG of quality 90. By hand
is `Image.open(file).convert("RGB")`, then `resize` and `crop` for evaluation (short side 256,
center 224), and `resize` of the same random boxes for training (to 224, from 8 % of the area up).
Rounds are interleaved; each reads both photographs four times. Compare the ratios, not the milliseconds.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, __version__, features

from bench.measure import environment, interleave, save
from vitrail.images.augment.pipeline import Augment, crop_numbers
from vitrail.images.crop import place_crop, propose_crops, read_crop
from vitrail.images.decode import read_pixels
from vitrail.images.formats.sources import Split
from vitrail.images.preprocess import Preprocess

SIZES = {(500, 375): 60, (1600, 1200): 30, (4000, 3000): 10}  # (width, height): rounds
EACH = 4  # times that each photograph is read in a round
SPEC = Preprocess(size=224, resize="shortest", resize_to=256)
MIN_AREA = 0.08
CROP = Augment(crop=MIN_AREA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fraction", type=float, default=1.0, help="of the rounds, for a quick run")
    parser.add_argument("--out", type=Path, default=Path("bench/results/decode.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size, rounds in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            for row in measure(photographs(Path(folder), size), max(3, round(rounds * args.fraction))):
                rows.append({"size": "x".join(map(str, size)), **row})
                print("  ".join(f"{value}" for value in rows[-1].values()), flush=True)
    versions = {"pillow": __version__, "libjpeg-turbo": features.version("libjpeg_turbo")}
    save({"rows": rows, "pillow": versions, "environment": environment()}, args.out)


def photographs(folder: Path, size: tuple[int, int]) -> Split:
    from sklearn.datasets import load_sample_images

    paths = []
    for number, pixels in enumerate(load_sample_images().images):
        paths.append(folder / f"{number}.jpg")
        Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS).save(paths[-1], quality=90)
    paths *= EACH
    return Split(np.zeros(len(paths), np.int64), [path.name for path in paths], paths)


def measure(split: Split, rounds: int) -> Iterator[dict[str, Any]]:
    for how in ("bilinear", "bicubic"):
        spec = Preprocess(**{**vars(SPEC), "interpolation": how})
        for task, augment in (("evaluation", None), ("training", CROP)):
            hand = functools.partial(by_hand, split, spec, augment)
            ways = {"decoding alone": functools.partial(decode, split), "by hand": hand}
            ways["ours"] = functools.partial(ours, split, spec, augment)
            seconds = interleave({name: timed(way, len(split)) for name, way in ways.items()}, rounds)
            ratio = statistics.median(
                by_hand / own for by_hand, own in zip(seconds["by hand"], seconds["ours"], strict=True)
            )
            middle = {name: round(1000 * statistics.median(times), 2) for name, times in seconds.items()}
            yield {"task": task, "interpolation": how, **middle, "ratio": round(ratio, 2), "rounds": rounds}


def timed(read: Callable[[int, torch.Tensor], Any], count: int) -> Callable[[], float]:
    """A job that reads every image, with other crops each time, and returns the seconds for one."""
    epoch = 0

    def job() -> float:
        nonlocal epoch
        begin = time.perf_counter()
        numbers = crop_numbers(0, epoch, torch.arange(count))
        for index, proposals in enumerate(propose_crops(numbers, MIN_AREA, CROP.crop_ratio)):
            read(index, proposals)
        epoch += 1
        return (time.perf_counter() - begin) / count

    job()
    return job


def decode(split: Split, index: int, proposals: torch.Tensor) -> None:
    """The cost of decoding at full size, which every method has that needs the complete image."""
    assert split.paths is not None
    Image.open(split.paths[index]).load()


def ours(split: Split, spec: Preprocess, augment: Augment | None, index: int, proposals: torch.Tensor) -> Any:
    assert split.paths is not None
    if augment is None:
        return read_pixels(split.paths[index], spec)
    return read_crop(split.paths[index], spec, proposals.tolist(), augment.crop_ratio)


def by_hand(
    split: Split, spec: Preprocess, augment: Augment | None, index: int, proposals: torch.Tensor
) -> Any:
    assert split.paths is not None
    image = Image.open(split.paths[index]).convert("RGB")
    how = Image.Resampling[spec.interpolation.upper()]
    if augment is not None:
        top, left, h, w = place_crop(proposals, image.height, image.width, augment.crop_ratio).tolist()
        return np.asarray(image.resize((224, 224), how, box=(left, top, left + w, top + h)))
    short = min(image.size)
    image = image.resize((image.width * 256 // short, image.height * 256 // short), how)
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    return np.asarray(image.crop((left, top, left + 224, top + 224)))


if __name__ == "__main__":
    main()
