"""How often int8 and fp8 give the class of fp32, with real models on images that did not calibrate.

    python -m bench.agreement flowers --out bench/results            # trains, on a GPU; bf16 and fp8
    python -m bench.agreement flowers --model flowers.safetensors    # int8, on a CPU
    python -m bench.agreement cifar10 --npz cifar10.npz --out bench/results

flowers   DeiT-Ti (ImageNet) fine-tuned on Oxford Flowers-102 at 224 pixels (files of 64), 819 test images
cifar10   B/16 trained from scratch for some minutes on CIFAR-10, 10,000 test images; mean pooling and a fixed
          position embedding. The images are enlarged to 112 pixels, and to 224 for the last three epochs

Calibration images are from the validation set, evenly spaced (of CIFAR-10, training images that are held
out): of images that it was trained on, a model is too sure. `all` quantizes every layer; `auto` is
keep="auto" with the gate's default limit. On a CPU the speed is the processor's time of one thread, in turns
with timm's model in eager fp32. A trained model is saved beside the results before anything is measured, and
--model takes it the next time; results are saved after each row.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
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
from vitrail.fast.gate import GateError, compare
from vitrail.images.decode import read_pixels
from vitrail.images.formats.sources import Dataset, Split, open_dataset
from vitrail.images.normalize import normalize_batch
from vitrail.model.device import eval_mode
from vitrail.weights.bundle.bundle import Bundle

SIDE, FIRST_SIDE = 224, 112  # pixels
LAST_EPOCHS = 3  # at the larger size
SPLITS = {"train": "train", "valid": "val", "val": "val", "test": "test"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", choices=("flowers", "cifar10"))
    parser.add_argument("--folder", type=Path, default=Path("../shared/data"), help="of flowers and DeiT-Ti")
    parser.add_argument("--npz", type=Path, help="cifar10.npz")
    parser.add_argument("--epochs", type=int, help="of training; 20 for flowers, 30 for CIFAR-10")
    parser.add_argument("--model", type=Path, help="a file that was trained before; no training")
    parser.add_argument("--calibration", type=int, default=512, help="images")
    parser.add_argument("--test", type=int, help="test images; all by default")
    parser.add_argument(
        "--merge", type=int, nargs="*", default=[], help="token merging instead: r of each row"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="a folder for the results")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        with phase("reading the data"):
            data = flowers(args.folder, Path(folder)) if args.data == "flowers" else cifar10(args, device)
        if args.model:
            bundle = vt.load(args.model, device=device)
        else:
            with phase("training"):
                bundle = train(args, data, Path(folder), device)
                args.out.mkdir(parents=True, exist_ok=True)
                bundle.save(args.out / f"agreement-{args.data}.safetensors")
            bundle.model.to(device)
        measure(bundle, data, args, device)


@contextmanager
def phase(name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)


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


def cifar10(args: Any, device: str) -> Dataset:
    """CIFAR-10, with those images enlarged that are measured."""
    data = open_dataset(args.npz)
    assert data.test is not None
    chosen = every(len(data.train), args.calibration)
    others = np.setdiff1d(np.arange(len(data.train)), chosen)
    val, test = (
        enlarge(split, device)
        for split in (data.train.take(chosen), data.test.take(every(len(data.test), args.test)))
    )
    return Dataset("cifar10", data.classes, data.train.take(others), val=val, test=test)


def enlarge(split: Split, device: str, side: int = SIDE) -> Split:
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
        return vt.train(data, out=folder / "run", epochs=args.epochs, **how).bundle
    args.epochs = args.epochs or 30
    assert data.val is not None
    how |= {
        "recipe": "small",
        "batch": 512,
        "optimizer": "muon",
        "evaluate_every": 10,
        "augment": {"rotate": 10.0, "zoom": 1.1, "translate": 0.1, "flip": 0.5, "brightness": 0.2},
    }
    small = Dataset(
        "cifar10",
        data.classes,
        enlarge(data.train, device, FIRST_SIDE),
        val=enlarge(data.val, device, FIRST_SIDE),
    )
    size = {"name": f"B/16@{FIRST_SIDE}", "drop_path": 0.1}
    first = {"epochs": args.epochs - LAST_EPOCHS, "lr": 1e-3, "mixing": {"mixup": 0.2, "probability": 0.5}}
    vt.train(small, out=folder / "first", model=size, **how, **first)
    large = Dataset("cifar10", data.classes, enlarge(data.train, device), val=data.val)
    start, last = folder / "first" / "best.safetensors", {"epochs": LAST_EPOCHS, "lr": 2e-4, "tune": "full"}
    return vt.train(large, out=folder / "last", from_=start, size=SIDE, **how, **last).bundle


# ---- agreement ------------------------------------------------------------------------------


def measure(bundle: Bundle, data: Dataset, args: Any, device: str) -> None:
    model = bundle.model.eval()
    assert data.test is not None
    assert data.val is not None
    test = data.test.take(every(len(data.test), args.test))
    with phase("reading the images"):
        images = read(bundle, test)
        calibration = read(bundle, data.val.take(every(len(data.val), args.calibration)))
    calibrate = normalize_batch(calibration, bundle.preprocess, next(model.parameters()))
    with phase("fp32"), eval_mode(model):
        exact = logits(model, images, bundle)
    labels = torch.from_numpy(test.labels)
    result: dict[str, Any] = {"data": args.data, "epochs": args.epochs, "rows": []}
    result |= {"test_images": len(images), "calibration_images": len(calibrate)}
    lossy = "fp8" if device == "cuda" else "int8"
    plain: dict[str, Any] = {"precision": "auto", "min_agreement": 0.0}
    cases: dict[str, dict[str, Any]] = {"auto": plain} if device == "cuda" else {}
    cases |= {f"{lossy}, all": {"precision": lossy, "min_agreement": 0.0, "calibrate": calibrate}}
    cases |= {f"{lossy}, auto": {"precision": lossy, "keep": "auto", "calibrate": calibrate}}
    if args.merge:
        cases = {f"merge {r}": plain | {"merge": r, "calibrate": calibrate[:8]} for r in args.merge}
    for name, how in cases.items():
        row: dict[str, Any] = {"row": name}
        begin = time.perf_counter()
        try:
            fast = vt.accelerate(model, remember=False, **how)
        except GateError as error:
            row |= {"error": str(error), "gate": error.gate.as_dict()}
        else:
            row |= {"accelerate_s": round(time.perf_counter() - begin, 1), "report": fast.report.as_dict()}
            found = compare(
                logits(fast, images, bundle), exact, precision=name, min_agreement=0, labels=labels
            )
            row |= {key: getattr(found, key) for key in ("agreement", "kl", "top1", "top1_fp32")}
            row |= {"speed_to_timm": speed(fast, model)} if device == "cpu" else {}
        print({key: value for key, value in row.items() if key not in ("report", "gate")}, flush=True)
        result["rows"].append(row)
        name = "merge" if args.merge else "agreement"
        save({**result, "environment": environment()}, args.out / f"{name}-{args.data}-{device}.json")


def every(count: int, wanted: int | None) -> np.ndarray[Any, Any]:
    """Evenly spaced indices; all without a number."""
    return np.linspace(0, count - 1, min(count, wanted or count)).astype(int)


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
