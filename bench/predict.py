"""`vitrail predict` of many JPEG files, from start to end, beside a script with timm's loader and model.

    python -m bench.predict --out bench/results

The images are those of bench.photos: 500 x 375 pixels, about 35 kB. A B/16 with random weights in 8 classes;
the short side is resized to 256 pixels (bilinear) and the center of 224 is cropped by all. Every row is a
process of its own that reads the files, and writes a CSV file with the class and score of each:

vitrail           vitrail predict MODEL FOLDER --batch 256 --out FILE
vitrail, fp32     the same with --precision fp32
timm              ImageDataset and create_loader with a worker for each core, bf16
timm, compiled    the same with torch.compile

Seconds are those of whole processes, start and compilation included, in turns. `start_s` is the same command
with 32 images, the second time, and `running` the images per second without it. `phases` says where the
seconds of ours go. With --folder the images stay there for the next time; results are saved as they come.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.measure import environment, save
from bench.peers import PEERS, make_torchvision_importable
from bench.photos import CLASSES, write_images
from vitrail.base.machine import usable_cores
from vitrail.images.preprocess import Preprocess
from vitrail.model.presets import preset

ROWS = ("vitrail", "vitrail, fp32", "timm", "timm, compiled")
FEW = 32
BATCH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="B/16")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", nargs="*", default=[ROWS[0], *ROWS[2:]], choices=ROWS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=None, help="where the images are, or go")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a process")
    parser.add_argument("--out", type=Path, help="a folder for the results")
    parser.add_argument("--timm", nargs=4, help=argparse.SUPPRESS)  # row, folder, size and device
    parser.add_argument("--phases", nargs=3, help=argparse.SUPPRESS)  # model, folder and device
    args = parser.parse_args()
    if args.timm:
        row, folder, size, device = args.timm
        predict_with_timm(Path(folder), size, device, compiled="compiled" in row)
    elif args.phases:
        print("PHASES " + json.dumps(phases(*args.phases)))
    elif args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench/predict.py needs a CUDA device; there is none here.")
    elif args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
        measure(args, args.folder)
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(args, Path(folder))


def measure(args: Any, folder: Path) -> None:
    for name, count in (("many", args.images), ("few", FEW)):
        if not (folder / name).exists():
            begin = time.perf_counter()
            kilobytes = write_images(folder / name, count)
            print(f"{count:,} files of {kilobytes:.0f} kB in {time.perf_counter() - begin:.0f} s", flush=True)
    save_model(args.size, folder / "model.safetensors")
    settings = {name: getattr(args, name) for name in ("size", "images", "rounds")}
    result: dict[str, Any] = {**settings, "batch": BATCH, "rows": {}}

    def take(name: str, which: str) -> None:
        found = run_row(name, folder, which, args)
        print(f"{name}, {which}: {found}", flush=True)
        result["rows"].setdefault(name, {}).setdefault(which, []).append(found)
        result["rows"][name] |= summarize(result["rows"][name], args.images)
        if args.out:
            save({**result, "environment": environment()}, args.out / "predict.json")

    for name in args.rows:
        take(name, "few")  # fills the caches of compilers
        take(name, "few")
    for _ in range(args.rounds):
        for name in args.rows:
            take(name, "many")
    command = ["--phases", str(folder / "model.safetensors"), str(folder / "many"), args.device]
    done = run_process([sys.executable, "-m", "bench.predict", *command], args.limit)
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("PHASES ")]
    result["phases"] = json.loads(lines[-1]) if lines else done.stderr[-500:]
    print("phases:", result["phases"], flush=True)
    if args.out:
        save({**result, "environment": environment()}, args.out / "predict.json")


def summarize(row: dict[str, Any], images: int) -> dict[str, Any]:
    """Rates of a row, of those of its processes that came to an end."""
    few, many = ([one for one in row.get(which, ()) if isinstance(one, float)] for which in ("few", "many"))
    if not many or not few:
        return {}
    total, start = statistics.median(many), few[-1]
    rate = (images - FEW) / max(1e-3, total - start)
    return {"images_per_s": round(images / total, 1), "start_s": start, "running": round(rate, 1)}


def run_process(command: list[str], limit: int) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"took longer than {limit} s")


def run_row(name: str, folder: Path, which: str, args: Any) -> float | str:
    """Seconds of a process, or why it failed."""
    out = folder / "rows.csv"
    out.unlink(missing_ok=True)
    if name.startswith("vitrail"):
        command = [sys.executable, "-m", "vitrail", "predict"]
        command += [str(folder / "model.safetensors"), str(folder / which)]
        command += ["--batch", str(BATCH), "--format", "csv", "--out", str(out)]
        command += ["--device", "cpu"] if args.device == "cpu" else []  # a GPU is the default
        command += ["--precision", "fp32"] if "fp32" in name else []
    else:
        command = [sys.executable, "-m", "bench.predict", "--timm", name, str(folder / which)]
        command += [args.size, args.device]
    begin = time.perf_counter()
    done = run_process(command, args.limit)
    seconds = time.perf_counter() - begin
    expected = args.images if which == "many" else FEW
    if done.returncode or len(out.read_text().splitlines()) != 1 + expected:
        return done.stderr[-500:] or "rows are missing"
    return round(seconds, 2)


def save_model(size: str, path: Path) -> None:
    import vitrail as vt

    torch.manual_seed(0)
    model = vt.create(size, classes=CLASSES)
    torch.nn.init.normal_(model.head.weight, std=0.02)
    side = model.config.pixels[0]
    how = Preprocess(size=side, resize="shortest", resize_to=round(side * 8 / 7))
    names = [f"class{number}" for number in range(CLASSES)]
    vt.Bundle(model=model, preprocess=how, labels=names).save(path)


def phases(model: str, folder: str, device: str) -> dict[str, float]:
    """Seconds of the parts of our command: one process, the same calls."""
    started = time.perf_counter()
    from vitrail.predict import Predictor
    from vitrail.predict.image_sources import expand_paths, prefetch
    from vitrail.predict.output_rows import format_rows

    found = {"imports": time.perf_counter() - started}
    begin = time.perf_counter()
    predictor = Predictor(model, device=device, batch=BATCH)
    found["loading and accelerating"] = time.perf_counter() - begin
    begin = time.perf_counter()
    sources = list(expand_paths([folder]))
    found["listing"] = time.perf_counter() - begin
    _, format_row = format_rows("csv", 1, predictor.config.classes, False)
    totals = dict.fromkeys(("first batch of pixels", "other pixels", "computing", "rows"), 0.0)
    how: dict[str, Any] = {"workers": "auto", "ahead": 3 * BATCH, "busy": predictor.on_cpu}
    read = prefetch(iter(sources), predictor.preprocess, **how)
    name = "first batch of pixels"
    while True:
        begin = time.perf_counter()
        batch = list(itertools.islice(read, BATCH))
        totals[name] += time.perf_counter() - begin
        if not batch:
            break
        begin, name = time.perf_counter(), "other pixels"
        predictions = list(predictor.predict_batch(batch))
        totals["computing"] += time.perf_counter() - begin
        begin = time.perf_counter()
        for prediction in predictions:
            format_row(prediction)
        totals["rows"] += time.perf_counter() - begin
    return {key: round(value, 2) for key, value in (found | totals).items()}


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
    with (folder.parent / "rows.csv").open("w") as file:
        file.write("image,label,score\n")
        for name, best, score in zip(names, torch.cat(classes), torch.cat(scores), strict=True):
            file.write(f"{name},class{int(best)},{float(score):.4f}\n")


if __name__ == "__main__":
    main()
