"""DeiT-Ti on a few images: every way to fine-tune, a linear probe, and a plain loop with timm.

    python -m bench.transfer hymenoptera flowers10 mnist --shots 1 5 10 all --seeds 0 1 2
    python -m bench.transfer hymenoptera --ways llrd probe --shots 5 --seeds 0 --epochs 2     # a quick look

full, llrd, lora, head and bias are `vitrail train --from FILE --set tune=...` with the recipe's own settings
for that way; the default of `--from` is llrd. probe is `vitrail probe`. timm is timm's DeiT-Ti with the same
weights, images, augmentation and epochs, AdamW (lr 1e-4, weight decay 0.05) and one cycle of learning rates.
"shots" are training images of each class, chosen by the seed and the same for every way. Accuracies are those
of all held-out images after the last epoch. Rows are added to bench/results/transfer.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.measure import environment
from bench.recipes import DATA, prepare, train_plainly
from vitrail.data.sources import Dataset, open_dataset
from vitrail.evaluation.probe_head import probe_head
from vitrail.experiment.interval import fraction_interval
from vitrail.training.api import train
from vitrail.training.resolve import resolve_recipe
from vitrail.weights.load import load

WAYS = ("full", "llrd", "lora", "head", "bias", "probe", "timm")
RESULTS = Path(__file__).parent / "results" / "transfer.json"
_DEIT = "weights/deit_tiny_imagenet1k.safetensors"


def few(data: Dataset, shots: int | None, seed: int) -> Dataset:
    """The data with so many training images of each class; all of them without a number."""
    if shots is None:
        return data
    labels, rng = np.asarray(data.train.labels), np.random.default_rng(seed)
    chosen = [rng.permutation(np.flatnonzero(labels == k))[:shots] for k in range(len(data.classes))]
    return replace(data, train=data.train.take(np.sort(np.concatenate(chosen))))


def train_timm(
    data: Dataset, weights: Path, seed: int, changes: dict[str, Any], device: torch.device
) -> float:
    """Accuracy of timm's DeiT-Ti after a plain loop."""
    from bench.peers import make_torchvision_importable

    make_torchvision_importable()
    import timm
    from safetensors.torch import load_file

    recipe, _ = resolve_recipe("auto", data, weights, changes)
    torch.manual_seed(seed)
    model = timm.create_model("deit_tiny_patch16_224", num_classes=len(data.classes)).to(device)
    state = {name: tensor for name, tensor in load_file(weights).items() if not name.startswith("head.")}
    missing = model.load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["head.weight", "head.bias"], []), missing
    batch = min(64, len(data.train))
    return train_plainly(model, data, recipe, batch=batch, lr=1e-4, seed=seed, device=device)


def accuracy_of(
    way: str, data: Dataset, weights: Path, seed: int, changes: dict[str, Any], device: torch.device
) -> float:
    if way == "timm":
        return train_timm(data, weights, seed, changes, device)
    if way == "probe":
        result = probe_head(load(weights, preprocess="deit", device=device), data, workers=0)
        assert result.accuracy is not None  # the data has held-out images
        return result.accuracy
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run = train(data, out=out, from_=weights, tune=way, seed=seed, report=False, verbose=False, **changes)
        return float(run.metrics[-1]["val_accuracy"])


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the mean over seeds in percent, with its 95 % interval, a column for each way."""
    lines = [
        f"| data | images of each class | seeds | {' | '.join(WAYS)} |",
        "|---|---|---:|" + "---|" * len(WAYS),
    ]
    for data, shots in dict.fromkeys((row["data"], row["shots"]) for row in rows):
        cells, seeds = [], 0
        for way in WAYS:
            some = [one for one in rows if (one["data"], one["shots"], one["way"]) == (data, shots, way)]
            values = [one["accuracy"] for one in some]
            seeds = max(seeds, len(values))
            interval = fraction_interval(values, some[0]["held_out"]) if len(values) > 1 else None
            mean = f"{100 * sum(values) / len(values):.1f}" if values else ""
            cells.append(mean + (f" ({100 * interval[0]:.1f}-{100 * interval[1]:.1f})" if interval else ""))
        lines.append(f"| {data} | {shots} | {seeds} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", nargs="+", choices=DATA)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--shots", nargs="+", default=["1", "5", "10", "all"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, help="instead of the recipe's")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # The file's names do not say which preprocessing it was trained with.
    changes: dict[str, Any] = {"preprocess": "deit", **({"epochs": args.epochs} if args.epochs else {})}
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.data:
            whole = replace(open_dataset(prepare(name, args.folder, Path(folder))), name=name, notes=[])
            cases = [(shots, seed, way) for shots in args.shots for seed in args.seeds for way in args.ways]
            for shots, seed, way in cases:
                data, start = few(whole, None if shots == "all" else int(shots), seed), time.perf_counter()
                accuracy = accuracy_of(way, data, args.folder / _DEIT, seed, changes, device)
                case = {"data": name, "shots": shots, "seed": seed, "way": way, "epochs": args.epochs}
                rows = [row for row in rows if any(row[key] != value for key, value in case.items())]
                result = {"accuracy": round(accuracy, 5), "seconds": round(time.perf_counter() - start, 1)}
                sizes = {"train": len(data.train), "held_out": len(data.eval_split)}
                rows.append({**case, **result, **sizes, "environment": environment()})
                args.out.parent.mkdir(exist_ok=True)
                args.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
                print(
                    f"{name} {shots} seed {seed} {way}: {accuracy:.2%} in {result['seconds']} s", flush=True
                )
    print(table(rows))


if __name__ == "__main__":
    main()
