"""The default recipe against a small CNN and against fine-tuning, on four data sets.

    python -m bench.recipes flowers10 hymenoptera mnist --models cnn auto deit --seeds 0 1 2
    python -m bench.recipes flowers10 --epochs 8                       # the case of a short run

The data lies in --folder (../shared/data); cifar10 needs cifar10.npz there or in the working directory. The
CNN has 280 thousand parameters, the same images, the same augmentation and as many epochs as the recipe; its
learning rate and batch size are not tuned for the data either. Accuracies are those after the last epoch: no
epoch is selected. Rows are added to bench/results/recipes.json; one of the same case and machine is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import tarfile
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measure import environment
from vitrail.evaluation.forward import resize_split
from vitrail.images.augment.pipeline import augment_batch
from vitrail.images.formats.sources import Dataset, Split, open_dataset
from vitrail.images.loader import Reader, batch_indices, epoch_order, steps_in_epoch
from vitrail.images.normalize import build_normalize
from vitrail.images.preprocess import Preprocess
from vitrail.training.recipes.settings import Recipe
from vitrail.training.resolve import resolve_recipe
from vitrail.training.start import train

DATA = ("flowers10", "flowers102", "hymenoptera", "mnist", "cifar10")
MODELS = ("cnn", "auto", "deit")
RESULTS = Path(__file__).parent / "results" / "recipes.json"
_FLOWERS = ("046", "051", "073", "074", "077", "078", "081", "088", "089", "094")  # the ten largest classes
_DEIT = "weights/deit_tiny_imagenet1k.safetensors"


# ---- the data -------------------------------------------------------------------------------


def prepare(name: str, source: Path, folder: Path) -> Path:
    """The path of a data set; archives are unpacked into `folder`. Flowers: val and test are evaluated on."""
    match name:
        case "flowers10" | "flowers102":
            with zipfile.ZipFile(source / "flowers102_64.zip") as archive:
                for path in archive.namelist():
                    *_, split, kind, file = ["", "", *path.split("/")]
                    if (kind in _FLOWERS or name == "flowers102") and file.endswith(".jpg"):
                        out = folder / name / ("train" if split == "train" else "val") / kind / file
                        out.parent.mkdir(parents=True, exist_ok=True)
                        out.write_bytes(archive.read(path))
            return folder / name
        case "hymenoptera":
            with tarfile.open(source / "hymenoptera_s160.tar") as archive:
                archive.extractall(folder, filter="data")
            return folder / "hymenoptera_s160"
        case "mnist":
            return source / "mnist"
        case _:
            return next(path for path in (source / "cifar10.npz", Path("cifar10.npz")) if path.exists())


def some_images(data: Dataset, count: int | None) -> Dataset:
    """The data with only some of its training images, for machines without a GPU; always the same ones."""
    if count is None or count >= len(data.train):
        return data
    chosen = np.random.default_rng(0).permutation(len(data.train))[:count]
    return replace(data, train=data.train.take(np.sort(chosen)))


# ---- the CNN --------------------------------------------------------------------------------


def build_cnn(channels: int, classes: int) -> nn.Sequential:
    """Four convolutions with batch norm, ReLU and pooling; 280 thousand parameters in color."""
    layers: list[nn.Module] = []
    for width in (32, 64, 128, 160):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def train_cnn(data: Dataset, recipe: Recipe, seed: int, device: torch.device) -> tuple[float, int]:
    """Accuracy after the last epoch, and the number of parameters."""
    torch.manual_seed(seed)
    model = build_cnn(recipe.preprocess.channels, len(data.classes)).to(device)
    accuracy = train_plainly(model, data, recipe, batch=64, lr=3e-3, seed=seed, device=device)
    return accuracy, sum(p.numel() for p in model.parameters())


def train_plainly(
    model: nn.Module,
    data: Dataset,
    recipe: Recipe,
    *,
    batch: int,
    lr: float,
    seed: int,
    device: torch.device,
) -> float:
    """Accuracy on held-out images after a plain loop, with the recipe's epochs and augmentation."""
    s, spec = recipe.train, recipe.preprocess
    images = read_images(data.train, spec).to(device)
    held_out = read_images(resize_split(data.eval_split, spec), spec).to(device)
    labels, normalize = torch.from_numpy(data.train.labels).to(device), build_normalize(spec, device)
    steps = steps_in_epoch(len(data.train), batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps * s.epochs)
    for epoch in range(s.epochs):
        order = epoch_order(data.train, seed=seed, epoch=epoch)
        for step in range(steps):
            indices = batch_indices(order, step, batch).to(device)
            x = augment_batch(images[indices], indices, s.augment, seed=seed, epoch=epoch, size=spec.target)
            loss = F.cross_entropy(model(normalize(x)), labels[indices], label_smoothing=s.smoothing)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(normalize(x.float() / 255)).argmax(1).cpu() for x in held_out.split(250)])
    return (found == torch.from_numpy(data.eval_split.labels)).float().mean().item()


def read_images(split: Split, preprocess: Preprocess) -> Tensor:
    """(N, C, H, W) uint8, as a model is evaluated on them."""
    reader = Reader(split, preprocess, seed=0)
    parts = torch.arange(len(split)).split(256)
    try:
        return torch.cat([batch.images for batch in reader.batches((0, part) for part in parts)])
    finally:
        reader.close()


# ---- the runs -------------------------------------------------------------------------------


def measure(
    model: str, data: Dataset, seed: int, changes: dict[str, Any], weights: Path, device: torch.device
) -> dict[str, Any]:
    """One row: a model trained on a data set."""
    start, start_cpu = time.perf_counter(), time.process_time()
    from_ = weights if model == "deit" else None
    recipe, _ = resolve_recipe("auto", data, from_, changes)
    if model == "cnn":
        accuracy, parameters = train_cnn(data, recipe, seed, device)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run = train(data, out=Path(folder) / "run", from_=from_, report=False, seed=seed, **changes)
        accuracy = run.metrics[-1]["val_accuracy"]
        parameters = sum(p.numel() for p in run.bundle.model.parameters())
    return {
        "data": data.name,
        "model": model,
        "seed": seed,
        "train_images": len(data.train),
        "val_images": len(data.eval_split),
        "epochs": recipe.train.epochs,
        "size": list(recipe.preprocess.target),
        "parameters": parameters,
        "accuracy": round(accuracy, 5),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - start_cpu, 1),
    }


def merge(rows: list[dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """Add rows to the file; a row of the same case on the same machine is replaced."""
    before = json.loads(out.read_text())["rows"] if out.exists() else []

    def case(row: dict[str, Any]) -> list[Any]:
        names = ("data", "model", "seed", "train_images", "epochs")
        return [*(row[name] for name in names), row["environment"]["machine"]]

    new = [case(row) for row in rows]
    merged = [row for row in before if case(row) not in new] + rows
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"rows": merged}, indent=1) + "\n")
    return merged


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: accuracies of all seeds for each case."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        machine = row["environment"]["machine"]
        where = machine.get("gpu") or f"{machine.get('cpu', 'CPU')}, {row['threads']} thread"
        key = (row["data"], row["train_images"], row["val_images"], row["epochs"], row["model"], where)
        cases.setdefault(key, []).append(row)
    lines = [
        "| data | training / held-out images | epochs | model | parameters | accuracy, % | seconds | on |"
    ]
    lines.append("|---|---:|---:|---|---:|---|---:|---|")
    for (data, train_images, val_images, epochs, model, where), some in cases.items():
        scores = ", ".join(f"{100 * row['accuracy']:.1f}" for row in some)
        kind = "seconds" if "gpu" in some[0]["environment"]["machine"] else "cpu_seconds"  # a CPU is shared
        times = [row[kind] for row in some if kind in row]
        seconds = f"{sum(times) / len(times):.0f}" if times else ""
        lines.append(
            f"| {data} | {train_images:,} / {val_images:,} | {epochs} | {model} | "
            f"{some[0]['parameters']:,} | {scores} | {seconds} | {where} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", nargs="+", choices=DATA)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["cnn", "auto"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=int, help="instead of the recipe's")
    parser.add_argument("--images", type=int, help="only so many of the training images")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    changes = {} if args.epochs is None else {"epochs": args.epochs}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.data:
            data = some_images(open_dataset(prepare(name, args.folder, Path(folder))), args.images)
            data = replace(data, name=name, notes=[])
            for model in args.models:
                for seed in args.seeds:
                    row = measure(model, data, seed, changes, args.folder / _DEIT, device)
                    row |= {"threads": torch.get_num_threads(), "environment": environment()}
                    merged = merge([row], args.out)
                    print(
                        f"{name} {model} seed {seed}: {row['accuracy']:.2%} in {row['seconds']:.0f} s",
                        flush=True,
                    )
    print(table(merged))


if __name__ == "__main__":
    main()
