"""How often int8 and fp8 give the class of fp32, with real models on images that did not calibrate.

    python -m bench.agreement flowers --out bench/results            # trains, on a GPU; bf16 and fp8
    python -m bench.agreement flowers --model flowers.safetensors    # int8, on a CPU
    python -m bench.agreement cifar10 --npz cifar10.npz --out bench/results

flowers   DeiT-Ti (ImageNet) fine-tuned on Oxford Flowers-102 at 224 pixels (files of 64), 819 test images
cifar10   B/16 trained from scratch for some minutes on CIFAR-10 enlarged to 224 pixels, 10,000 test images;
          mean pooling and a fixed position embedding

Calibration images are from the training set, evenly spaced. `all` quantizes every layer; `auto` is
keep="auto" with the gate's default limit. On a CPU the speed is the processor's time of one thread, in turns
with timm's model in eager fp32.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail as vt
from bench.cpu_inference import forward, processor_time
from bench.measure import environment, interleave, save
from bench.peers import PEERS, make_torchvision_importable
from vitrail.data.sources import Dataset, Split, open_dataset
from vitrail.fast.gate import GateError, compare
from vitrail.images.normalize import normalize_batch
from vitrail.images.reader import read_pixels
from vitrail.model.modes import eval_mode
from vitrail.weights.bundle import Bundle

SPLITS = {"train": "train", "valid": "val", "val": "val", "test": "test"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", choices=("flowers", "cifar10"))
    parser.add_argument("--folder", type=Path, default=Path("../shared/data"), help="of flowers and DeiT-Ti")
    parser.add_argument("--npz", type=Path, help="cifar10.npz")
    parser.add_argument("--epochs", type=int, help="of training; 20 for flowers, 12 for CIFAR-10")
    parser.add_argument("--model", type=Path, help="a file that was trained before; no training")
    parser.add_argument("--save", type=Path, help="where the trained model goes")
    parser.add_argument("--calibration", type=int, default=512, help="images")
    parser.add_argument("--test", type=int, help="test images; all by default")
    parser.add_argument("--out", type=Path, help="a folder for the results")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        data = flowers(args.folder, Path(folder)) if args.data == "flowers" else cifar10(args.npz, device)
        begin = time.perf_counter()
        bundle = vt.load(args.model, device=device) if args.model else train(args, data, Path(folder), device)
        seconds = None if args.model else round(time.perf_counter() - begin)
        if args.save and not args.model:
            bundle.save(args.save)
        result = {"data": args.data, "epochs": args.epochs, "training_s": seconds}
        result |= measure(bundle, data, args)
    if args.out:
        save({**result, "environment": environment()}, args.out / f"agreement-{args.data}-{device}.json")


# ---- data and models ------------------------------------------------------------------------


def flowers(source: Path, folder: Path) -> Dataset:
    """The files, unpacked into a folder."""
    with zipfile.ZipFile(source / "flowers102_64.zip") as archive:
        for path in archive.namelist():
            *_, split, kind, file = ["", "", *path.split("/")]
            if file.endswith(".jpg"):
                out = folder / "flowers" / SPLITS[split] / kind / file
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_bytes(archive.read(path))
    return open_dataset(folder / "flowers")


def cifar10(npz: Path, device: str) -> Dataset:
    """All images enlarged to 224 pixels; the test set is the validation set of training, too."""
    data = open_dataset(npz)
    assert data.test is not None
    train, test = (enlarge(split, device) for split in (data.train, data.test))
    return Dataset("cifar10", data.classes, train, val=test, test=test)


def enlarge(split: Split, device: str, side: int = 224) -> Split:
    assert split.images is not None
    parts = []
    for part in torch.from_numpy(split.images).split(1000):
        pixels = part.to(device).permute(0, 3, 1, 2).float()
        larger = F.interpolate(pixels, (side, side), mode="bicubic").round().clamp(0, 255).to(torch.uint8)
        parts.append(larger.permute(0, 2, 3, 1).contiguous().cpu().numpy())
    return Split(split.labels, split.names, None, np.concatenate(parts))


def train(args: Any, data: Dataset, folder: Path, device: str) -> Bundle:
    how: dict[str, Any] = {"report": False, "save_every": 1000, "fingerprint": False, "device": device}
    if args.data == "flowers":
        args.epochs = args.epochs or 20
        weights = args.folder / "weights" / "deit_tiny_imagenet1k.safetensors"
        how |= {"from_": weights, "preprocess": "deit", "batch": 256, "lr": 4e-4}
    else:
        args.epochs = args.epochs or 12
        how |= {
            "recipe": "small",
            "model": {"name": "B/16", "drop_path": 0.0},
            "batch": 512,
            "optimizer": "muon",
            "lr": 1e-3,
            "smoothing": 0.0,
            "augment": {"rotate": 0.0, "zoom": 1.1, "translate": 0.1, "flip": 0.5},
        }
    return vt.train(data, out=folder / "run", epochs=args.epochs, **how).bundle


# ---- agreement ------------------------------------------------------------------------------


def measure(bundle: Bundle, data: Dataset, args: Any) -> dict[str, Any]:
    model = bundle.model.eval()
    on_gpu = next(model.parameters()).is_cuda
    assert data.test is not None
    test = data.test if args.test is None else data.test.take(every(len(data.test), args.test))
    calibration = data.train.take(every(len(data.train), args.calibration))
    images = read(bundle, test)
    calibrate = normalize_batch(read(bundle, calibration), bundle.preprocess, next(model.parameters()))
    labels = torch.from_numpy(test.labels)
    with eval_mode(model):
        exact = logits(model, images, bundle)
    result: dict[str, Any] = {"test_images": len(images), "calibration_images": len(calibrate), "rows": []}
    for precision, keep in (
        [("bf16", ()), ("fp8", ()), ("fp8", "auto")] if on_gpu else [("int8", ()), ("int8", "auto")]
    ):
        begin = time.perf_counter()
        row: dict[str, Any] = {"precision": precision, "keep": keep or "none"}
        how: dict[str, Any] = {}
        if precision != "bf16":
            how = {"calibrate": calibrate, "keep": keep} | ({} if keep else {"min_agreement": 0.0})
        try:
            fast = vt.accelerate(model, precision, remember=False, **how)
        except GateError as error:
            row["error"] = str(error)
        else:
            row["accelerate_s"] = round(time.perf_counter() - begin, 1)
            row |= {"route": fast.report.route, "kept": fast.report.kept}
            if fast.report.gate is not None:
                row["calibration"] = fast.report.gate.as_dict()
            found = compare(
                logits(fast, images, bundle), exact, precision=precision, min_agreement=0, labels=labels
            )
            row |= {name: getattr(found, name) for name in ("agreement", "kl", "top1", "top1_fp32")}
            if not on_gpu:
                row["speed_to_timm"] = speed(fast, model)
        print({name: value for name, value in row.items() if name not in ("kept", "calibration")}, flush=True)
        result["rows"].append(row)
    return result


def every(count: int, wanted: int) -> np.ndarray[Any, Any]:
    """Evenly spaced indices."""
    return np.linspace(0, count - 1, min(count, wanted)).astype(int)


def read(bundle: Bundle, split: Split) -> Tensor:
    """uint8 pixels (N, C, H, W), as the model sees them."""
    if split.images is not None:
        return torch.from_numpy(split.images).permute(0, 3, 1, 2)
    assert bundle.preprocess is not None
    pixels = [read_pixels(path, bundle.preprocess) for path in split.paths or ()]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)


@torch.inference_mode()
def logits(run: Any, pixels: Tensor, bundle: Bundle) -> Tensor:
    like = next(bundle.model.parameters())
    batch = 256 if like.is_cuda else 8
    parts = [run(normalize_batch(part, bundle.preprocess, like)) for part in pixels.split(batch)]
    return torch.cat([part.float().cpu() for part in parts])


def speed(fast: Any, model: Any) -> float:
    """The processor time of timm's model in eager fp32, by that of the faster one: batches of 8 in turns."""
    make_torchvision_importable()
    images = torch.randn(8, *model.config.input_shape)
    runs = {"timm": PEERS["timm"](model.config).eval(), "ours": fast}
    jobs = {}
    for name, run in runs.items():
        step = functools.partial(forward, run, images)
        step()
        jobs[name] = functools.partial(processor_time, step)
    seconds = interleave(jobs, 12)
    pairs = zip(seconds["timm"], seconds["ours"], strict=True)
    return round(statistics.median(theirs / ours for theirs, ours in pairs), 3)


if __name__ == "__main__":
    main()
