"""`vitrail predict` of many JPEG files, from start to end, beside a script with timm's loader and model.

    python -m bench.predict --out bench/results

The images are those of bench.loading: 500 x 375 pixels, about 35 kB. A B/16 with random weights in 8 classes;
the short side is resized to 256 pixels (bilinear) and the center of 224 is cropped by all. Every row is a
process of its own that reads the files, and writes a CSV file with the class and score of each:

vitrail           vitrail predict MODEL FOLDER --device cuda --batch 256 --out FILE
vitrail, fp32     the same with --precision fp32
timm              ImageDataset and create_loader with a worker for each core, bf16
timm, compiled    the same with torch.compile

Seconds are those of whole processes, start and compilation included, in turns. `start_s` is the same command
with 32 images, and `running` the images per second without it.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.loading import CLASSES, write_images
from bench.measure import environment, interleave, save
from bench.peers import PEERS, make_torchvision_importable
from vitrail.images.preprocess import Preprocess
from vitrail.images.workers import usable_cores
from vitrail.presets import preset

ROWS = ("vitrail", "vitrail, fp32", "timm", "timm, compiled")
FEW = 32
BATCH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="B/16")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", default=ROWS, choices=ROWS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=None, help="where the images go for a while")
    parser.add_argument("--out", type=Path, help="a folder for the results")
    parser.add_argument("--timm", nargs=4, help=argparse.SUPPRESS)  # row, folder, size and device
    args = parser.parse_args()
    if args.timm:
        row, folder, size, device = args.timm
        predict_with_timm(Path(folder), size, device, compiled="compiled" in row)
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench/predict.py needs a CUDA device; there is none here.")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(args, Path(folder))
    if args.out:
        save({**result, "environment": environment()}, args.out / "predict.json")


def measure(args: Any, folder: Path) -> dict[str, Any]:
    kilobytes = write_images(folder / "many", args.images)
    write_images(folder / "few", FEW)
    save_model(args.size, folder / "model.safetensors")
    first = {name: take(name, folder, "few", args) for name in args.rows}  # fills the caches of compilers
    jobs = {
        (name, which): functools.partial(take, name, folder, which, args)
        for name in args.rows
        for which in ("few", "many")
    }
    seconds = interleave(jobs, args.rounds)  # type: ignore[arg-type, type-var]
    rows = []
    for name in args.rows:
        start, total = (statistics.median(seconds[name, which]) for which in ("few", "many"))  # type: ignore[index]
        rows.append(
            {
                "row": name,
                "seconds": [round(one, 2) for one in seconds[name, "many"]],  # type: ignore[index]
                "images_per_s": round(args.images / total, 1),
                "start_s": round(start, 2),
                "first_start_s": round(first[name], 2),
                "running": round((args.images - FEW) / max(1e-3, total - start), 1),
            }
        )
        print(rows[-1], flush=True)
    settings = {name: getattr(args, name) for name in ("size", "images", "rounds")}
    return {**settings, "batch": BATCH, "kilobytes": round(kilobytes, 1), "rows": rows}


def save_model(size: str, path: Path) -> None:
    import vitrail as vt

    torch.manual_seed(0)
    model = vt.create(size, classes=CLASSES)
    torch.nn.init.normal_(model.head.weight, std=0.02)
    side = model.config.pixels[0]
    how = Preprocess(size=side, resize="shortest", resize_to=round(side * 8 / 7))
    names = [f"class{number}" for number in range(CLASSES)]
    vt.Bundle(model=model, preprocess=how, labels=names).save(path)


def take(name: str, folder: Path, which: str, args: Any) -> float:
    """Seconds of a process."""
    out = folder / "rows.csv"
    if name.startswith("vitrail"):
        command = [
            sys.executable,
            "-m",
            "vitrail",
            "predict",
            str(folder / "model.safetensors"),
            str(folder / which),
        ]
        command += ["--device", args.device, "--batch", str(BATCH), "--format", "csv", "--out", str(out)]
        command += ["--precision", "fp32"] if "fp32" in name else []
    else:
        command = [sys.executable, "-m", "bench.predict", "--timm", name, str(folder / which)]
        command += [args.size, args.device]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "100"})
    seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
    file = out if name.startswith("vitrail") else folder / which / "rows.csv"
    expected = args.images if which == "many" else FEW
    rows = file.read_text().splitlines()
    assert len(rows) == 1 + expected, (name, len(rows))
    file.unlink()
    return seconds


def predict_with_timm(folder: Path, size: str, device: str, *, compiled: bool) -> None:
    make_torchvision_importable()
    from timm.data import ImageDataset, create_loader

    config = preset(size, classes=CLASSES)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = PEERS["timm"](config).to(device, dtype).eval()
    run = torch.compile(model) if compiled else model
    dataset = ImageDataset(str(folder))
    loader = create_loader(
        dataset,
        input_size=(config.channels, *config.pixels),
        batch_size=BATCH,
        interpolation="bilinear",
        crop_pct=0.875,
        num_workers=usable_cores(),
        pin_memory=device == "cuda",
        device=torch.device(device),
        use_prefetcher=device == "cuda",
        **({"img_dtype": dtype} if device == "cuda" else {}),
    )
    classes, scores = [], []
    with torch.inference_mode():
        for images, _ in loader:
            score, best = run(images).float().softmax(1).max(1)
            classes.append(best.cpu())
            scores.append(score.cpu())
    names = dataset.filenames(basename=False)
    with (folder / "rows.csv").open("w") as file:
        file.write("image,label,score\n")
        for name, best, score in zip(names, torch.cat(classes), torch.cat(scores), strict=True):
            file.write(f"{name},class{int(best)},{float(score):.4f}\n")


if __name__ == "__main__":
    main()
