"""The way between a zero-shot and a fine-tuned model (WiSE-FT), on the target data and on shifted data.

    OMP_NUM_THREADS=1 python -m bench.interpolation

The model is the tiny CLIP of the repository, trained on scenes of scikit-learn's digits and their captions
(tests/weights/digit-clip.safetensors). The target is MNIST, of which it has seen nothing: fine-tuning has so
many images of each class. Every point of the way is evaluated on test digits of MNIST, on the same digits
with noise, and on scenes of held-out digits, which are what the model was trained on first.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import vitrail as vt
from bench.measure import environment, save
from tests.support.digit_clip import DIGITS, FILE, save_scenes
from vitrail.weights.conversion import interpolate

RESULTS = Path(__file__).parent / "results" / "interpolation.json"


def read_mnist(folder: Path, part: str) -> tuple[Any, Any]:
    """Pixels (N, 28, 28) and labels (N,) of the IDX files."""
    images, labels = (next(folder.glob(f"{part}-{kind}*.gz")) for kind in ("images", "labels"))
    pixels = np.frombuffer(gzip.decompress(images.read_bytes())[16:], np.uint8).reshape(-1, 28, 28)
    return pixels, np.frombuffer(gzip.decompress(labels.read_bytes())[8:], np.uint8)


def save_digits(folder: Path, pixels: Any, labels: Any) -> Path:
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        (folder / DIGITS[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / DIGITS[label] / f"{number:05}.png")
    return folder


def choose(labels: Any, each: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.permutation(np.flatnonzero(labels == k))[:each] for k in range(10)])


def table(rows: list[dict[str, Any]], names: list[str]) -> str:
    """Markdown: the mean accuracy over the seeds, in percent, with the lowest and the highest."""
    lines = [f"| t | {' | '.join(names)} |", "|---:|" + "---|" * len(names)]
    for t in sorted({row["t"] for row in rows}):
        cells = []
        for name in names:
            values = [100 * row[name] for row in rows if row["t"] == t]
            cells.append(f"{sum(values) / len(values):.1f} ({min(values):.1f}-{max(values):.1f})")
        lines.append(f"| {t:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--each", type=int, default=100, help="training images of each class")
    parser.add_argument("--test", type=int, default=100, help="test images of each class")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        pixels, labels = read_mnist(args.folder / "mnist", "t10k")
        chosen = choose(labels, args.test, 0)
        noise = np.random.default_rng(1).normal(0, 60, (len(chosen), 28, 28))
        noisy = (pixels[chosen] + noise).clip(0, 255).astype(np.uint8)
        tests = {
            "MNIST": save_digits(work / "mnist", pixels[chosen], labels[chosen]),
            "MNIST with noise": save_digits(work / "noisy", noisy, labels[chosen]),
            "scenes": save_scenes(work / "scenes", 1000),
        }
        zero = vt.load(FILE).zero_shot(DIGITS)
        zero.save(work / "zero.safetensors")
        pixels, labels = read_mnist(args.folder / "mnist", "train")
        for seed in args.seeds:
            some = choose(labels, args.each, seed)
            data = work / f"train-{seed}"
            save_digits(data / "train", pixels[some], labels[some])
            save_digits(data / "val", pixels[:200], labels[:200])  # it chooses nothing here
            how: dict[str, Any] = {"epochs": args.epochs, "lr": args.lr, "seed": seed, "tune": "full"}
            augment: dict[str, Any] = {"augment": {"flip": 0.0, "crop": None}, "mixing": {"mixup": 0.0}}
            out = work / f"run-{seed}"
            how |= {"report": False, "verbose": False, "evaluate_every": 1000, "save_every": 1000, **augment}
            vt.train(data, out=out, from_=work / "zero.safetensors", ema=None, **how)
            tuned = vt.load(out / "last.safetensors")
            for t in (0, 0.2, 0.4, 0.5, 0.6, 0.8, 1):
                model = interpolate(zero, tuned, t)
                row: dict[str, Any] = {"seed": seed, "t": t}
                for name, path in tests.items():
                    metrics = vt.evaluate(model, path).metrics
                    assert metrics is not None
                    row[name] = metrics.top1
                rows.append(row)
                print(row, flush=True)
    save({"rows": rows, "environment": environment()}, args.out)
    print(table(rows, list(tests)))


if __name__ == "__main__":
    main()
