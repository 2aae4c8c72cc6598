"""Out of distribution: do the feature statistics of a flower model tell ants and bees from flowers?

    python -m bench.ood --shared ../shared                     # the frozen features of DeiT-Ti at 224 pixels
    python -m bench.ood --shared ../shared --model x.safetensors

The ten largest classes of Flowers-102 (64 pixels) against photos of ants and bees, as they are and reduced to
64 pixels: sharpness alone would tell them apart. Statistics are fitted as at the end of training.
"""

from __future__ import annotations

import argparse
import json
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitrail as vt
from bench.measure import environment
from vitrail.evaluation.forward import run_model
from vitrail.evaluation.trained_images import fit_statistics
from vitrail.images.formats.sources import Dataset, Split, open_dataset

CLASSES, TRAIN, SIDE = 10, 700, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, required=True, help="the folder with data/")
    parser.add_argument("--model", help="a model of these flowers; by default DeiT-Ti, as for a linear head")
    arguments = parser.parse_args()
    data = arguments.shared / "data"
    with tempfile.TemporaryDirectory() as folder:
        flowers, insects, small = unpack(data, Path(folder))
        weights = arguments.model or data / "weights" / "deit_tiny_imagenet1k.safetensors"
        print(
            json.dumps(measure(weights, flowers, insects, small) | {"environment": environment()}, indent=2)
        )


def unpack(data: Path, folder: Path) -> tuple[Dataset, Dataset, Dataset]:
    """Flowers, insects, and insects as small as the flowers."""
    with zipfile.ZipFile(data / "flowers102_64.zip") as archive:
        archive.extractall(folder)
    with tarfile.open(data / "hymenoptera_s160.tar") as archive:
        archive.extractall(folder, filter="data")
    root = folder / "flowers102_64"
    counts = {path.name: len(list(path.iterdir())) for path in (root / "train").iterdir()}
    for name in sorted(counts, key=lambda name: -counts[name])[:CLASSES]:
        for split in ("train", "valid", "test"):
            (folder / "flowers" / split).mkdir(parents=True, exist_ok=True)
            (root / split / name).rename(folder / "flowers" / split / name)
    for path in (folder / "hymenoptera_s160").rglob("*.jpg"):
        image = Image.open(path).convert("RGB")
        width, height = image.size
        side = min(image.size)
        left, top = (width - side) // 2, (height - side) // 2
        square = image.crop((left, top, left + side, top + side)).resize(
            (SIDE, SIDE), Image.Resampling.BICUBIC
        )
        copy = folder / "small" / path.relative_to(folder / "hymenoptera_s160")
        copy.parent.mkdir(parents=True, exist_ok=True)
        square.save(copy, quality=90)
    flowers, insects, small = (open_dataset(folder / n) for n in ("flowers", "hymenoptera_s160", "small"))
    return flowers, insects, small


def measure(weights: str | Path, flowers: Dataset, insects: Dataset, small: Dataset) -> dict[str, Any]:
    """AUROC and the flagged fractions, of the test split against each set of insects."""
    bundle = vt.load(weights)
    assert flowers.val is not None
    assert flowers.test is not None
    assert bundle.preprocess is not None
    few = flowers.train.take(np.linspace(0, len(flowers.train) - 1, TRAIN).astype(np.int64))
    train, val, test = (features(bundle, split) for split in (few, flowers.val, flowers.test))
    statistics = fit_statistics(train, few.labels, val, 2**30)
    assert statistics is not None
    known = statistics.scores(test)
    rows: dict[str, Any] = {"flowers": len(test), "flagged": float((known > 1).mean())}
    for name, data in (("as they are", insects), ("reduced", small)):
        assert data.val is not None
        other = statistics.scores(np.concatenate([features(bundle, part) for part in (data.train, data.val)]))
        flagged = float((other > 1).mean())
        rows[name] = {"images": len(other), "auroc": auroc(known, other), "flagged": flagged}
    return rows | {"bytes": statistics.bytes}


def features(bundle: vt.Bundle, split: Split) -> np.ndarray:
    model, preprocess = bundle.model, bundle.preprocess
    assert preprocess is not None

    def pooled(images: torch.Tensor) -> torch.Tensor:
        return model.encode(images).pooled

    return run_model(model, split, preprocess, compute=pooled, batch=32)[0].numpy()


def auroc(known: np.ndarray, other: np.ndarray) -> float:
    """The probability that an image of the second kind has the higher score."""
    ranks = np.concatenate([known, other]).argsort(kind="stable").argsort(kind="stable") + 1
    return float((ranks[len(known) :].sum() / len(other) - (len(other) + 1) / 2) / len(known))


if __name__ == "__main__":
    main()
