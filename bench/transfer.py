"""DeiT-Ti on a few images: every way to fine-tune, a linear probe, and a plain loop with timm.

    python -m bench.transfer hymenoptera flowers102 mnist --shots 1 5 10 all --seeds 0 1 2 --jobs 14
    python -m bench.transfer hymenoptera --ways llrd probe --shots 5 --seeds 0 --epochs 2     # a quick look
    python -m bench.transfer hymenoptera --ways llrd --shots all --seeds 0 1 --lr 0.0005 0.002
    python -m bench.transfer --table

full, llrd, lora, head and bias are `vitrail train --from FILE --set tune=...` with the recipe's own settings
for that way, or with other learning rates. probe is `vitrail probe`. timm is timm's DeiT-Ti with the same
weights, images, augmentation and epochs, AdamW (lr 1e-4, weight decay 0.05) and one cycle of learning rates.
"shots" are training images of each class, chosen by the seed and the same for every way. Accuracies are those
of all held-out images after the last epoch. Each finished case is a line of bench/results/transfer.jsonl, and
is not measured again; --minutes ends the rest. All cases of the first seed come first, those of the most
images last.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bench.measure import environment
from bench.recipes import DATA, prepare, train_plainly
from vitrail.evaluation.probes import probe_head
from vitrail.experiment.interval import fraction_interval
from vitrail.images.formats.sources import Dataset, open_dataset
from vitrail.training.resolve import resolve_recipe
from vitrail.training.start import train
from vitrail.weights.load import load

# The ways, with the recipe's learning rate for each; timm's is the usual one for fine-tuning.
WAYS = {"full": 3e-4, "llrd": 1e-3, "lora": 1e-3, "head": 1e-3, "bias": 1e-3, "probe": None, "timm": 1e-4}
RESULTS = Path(__file__).parent / "results" / "transfer.jsonl"
_DEIT = "weights/deit_tiny_imagenet1k.safetensors"
# What a run does besides its steps: only what the accuracy after the last epoch needs.
_LEAN: dict[str, Any] = {
    "compile": False,
    "workers": 0,
    "fingerprint": False,
    "save_every": 1000,
    "evaluate_every": 1000,
}


class Case(NamedTuple):
    data: str
    shots: str
    seed: int
    way: str
    lr: float | None
    """None for probe, which has none."""
    epochs: int | None
    """Instead of the recipe's."""


class Job(NamedTuple):
    case: Case
    path: Path
    """Of the data set."""
    weights: Path


def few(data: Dataset, shots: int | None, seed: int) -> Dataset:
    """The data with so many training images of each class; all of them without a number."""
    if shots is None:
        return data
    labels, rng = np.asarray(data.train.labels), np.random.default_rng(seed)
    chosen = [rng.permutation(np.flatnonzero(labels == k))[:shots] for k in range(len(data.classes))]
    return replace(data, train=data.train.take(np.sort(np.concatenate(chosen))))


def train_timm(
    data: Dataset, weights: Path, seed: int, changes: dict[str, Any], lr: float, device: torch.device
) -> float:
    """Accuracy of timm's DeiT-Ti after a plain loop."""
    from bench.peers import make_torchvision_importable

    make_torchvision_importable()
    import timm
    from safetensors.torch import load_file

    recipe, _ = resolve_recipe("auto", data, weights, changes)
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")  # of a GPU; our runs have bf16 there
    model = timm.create_model("deit_tiny_patch16_224", num_classes=len(data.classes)).to(device)
    state = {name: tensor for name, tensor in load_file(weights).items() if not name.startswith("head.")}
    missing = model.load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["head.weight", "head.bias"], []), missing
    batch = min(64, len(data.train))
    return train_plainly(InColor(model), data, recipe, batch=batch, lr=lr, seed=seed, device=device)


class InColor(nn.Module):
    """A model of color images that takes gray ones too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.expand(-1, 3, -1, -1))


def accuracy_of(
    case: Case, data: Dataset, weights: Path, changes: dict[str, Any], device: torch.device
) -> float:
    if case.way == "timm":
        assert case.lr is not None
        return train_timm(data, weights, case.seed, changes, case.lr, device)
    if case.way == "probe":
        model = load(weights, preprocess="deit", device=device, channels=data.channels)
        result = probe_head(model, data, workers=0)
        assert result.accuracy is not None  # the data has held-out images
        return result.accuracy
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        how: dict[str, Any] = {"report": False, "verbose": False, **_LEAN, **changes}
        run = train(data, out=out, from_=weights, tune=case.way, seed=case.seed, lr=case.lr, **how)
        return float(run.metrics[-1]["val_accuracy"])


Row = dict[str, Any]


def table(rows: list[Row]) -> str:
    """Markdown: the mean over seeds in percent, with its 95 % interval, a column for each way."""
    lines = [
        f"| data | images of each class | epochs | seeds | {' | '.join(WAYS)} |",
        "|---|---|---|---:|" + "---|" * len(WAYS),
    ]
    rows = [row for row in rows if row["lr"] == WAYS[row["way"]]]
    for group in dict.fromkeys((row["data"], row["shots"], row["epochs"]) for row in rows):
        some = {way: values(rows, group, way, WAYS[way]) for way in WAYS}
        seeds = sorted({len(one) for one in some.values() if one})
        data, shots, epochs = group
        cells = f"| {data} | {shots} | {epochs or 'own'} | {' to '.join(map(str, seeds))} | "
        lines.append(cells + " | ".join(cell(one) for one in some.values()) + " |")
    return "\n".join(lines)


def table_of_rates(rows: list[Row]) -> str:
    """Markdown: the same for each learning rate, where a way has several."""
    several = [way for way in WAYS if len({row["lr"] for row in rows if row["way"] == way}) > 1]
    rows = [row for row in rows if row["way"] in several]
    rates = sorted({(row["way"], row["lr"]) for row in rows})
    tried = {rate for rate in rates if rate[1] != WAYS[rate[0]]}
    groups = [
        group
        for group in dict.fromkeys((row["data"], row["shots"], row["epochs"]) for row in rows)
        if len({(row["way"], row["lr"]) for row in rows if of(row, group)} & tried) > 2
    ]
    names = [f"{data}, {shots}" for data, shots, _ in groups]
    lines = [f"| way | lr | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for way, lr in rates:
        cells = [cell(values(rows, group, way, lr), interval=False) for group in groups]
        lines.append(f"| {way} | {lr:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def of(row: Row, group: tuple[str, str, int | None]) -> bool:
    return (row["data"], row["shots"], row["epochs"]) == group


def values(rows: list[Row], group: tuple[str, str, int | None], way: str, lr: float | None) -> list[Row]:
    return [row for row in rows if of(row, group) and (row["way"], row["lr"]) == (way, lr)]


def cell(rows: list[Row], *, interval: bool = True) -> str:
    """The mean in percent; with several seeds, its interval or their number."""
    if not rows:
        return ""
    scores = [row["accuracy"] for row in rows]
    mean = f"{100 * sum(scores) / len(scores):.1f}"
    if not interval:
        return f"{mean} ({len(scores)})"
    found = fraction_interval(scores, rows[0]["held_out"]) if len(scores) > 1 else None
    return mean + (f" ({100 * found[0]:.1f}-{100 * found[1]:.1f})" if found else "")


@functools.lru_cache(maxsize=1)
def opened(path: Path, name: str) -> Dataset:
    return replace(open_dataset(path), name=name, notes=[])


def measure(job: Job) -> Row:
    """One row: the accuracy of one case."""
    case, start = job.case, time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # others run beside it
    # The file's names do not say which preprocessing it was trained with.
    changes: dict[str, Any] = {"preprocess": "deit", "threads": 1}
    changes |= {"epochs": case.epochs} if case.epochs else {}
    data = few(opened(job.path, case.data), None if case.shots == "all" else int(case.shots), case.seed)
    accuracy = accuracy_of(case, data, job.weights, changes, device)
    return {
        **case._asdict(),
        "accuracy": round(accuracy, 5),
        "seconds": round(time.perf_counter() - start, 1),
        "train": len(data.train),
        "held_out": len(data.eval_split),
    }


def finished(jobs: list[Job], processes: int, minutes: float | None) -> Iterator[Row]:
    """Rows as they are finished, until the time is over."""
    end = None if minutes is None else time.monotonic() + 60 * minutes
    with multiprocessing.get_context("spawn").Pool(min(processes, len(jobs))) as pool:
        rows = pool.imap_unordered(measure, jobs)
        for _ in jobs:
            try:
                yield rows.next(None if end is None else max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                for child in multiprocessing.active_children():
                    child.kill()  # a run answers a plain SIGTERM by saving what it has
                return
            except Exception as error:  # of one case: the others go on
                print(f"failed: {type(error).__name__}: {error}", flush=True)


def read_rows(out: Path) -> list[Row]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", nargs="*", metavar="DATA", help=", ".join(DATA))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--shots", nargs="+", default=["1", "5", "10", "all"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lr", nargs="+", type=float, help="instead of the recipe's; not for probe")
    parser.add_argument("--epochs", type=int, help="instead of the recipe's")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one case at a time")
    parser.add_argument("--minutes", type=float, help="end what is not finished then")
    parser.add_argument("--table", action="store_true", help="print the table of --out, and measure nothing")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if unknown := set(args.data) - set(DATA):
        parser.error(f"DATA must be of {', '.join(DATA)}, not {', '.join(unknown)}.")
    done = {tuple(row[name] for name in Case._fields) for row in read_rows(args.out)}
    names = [] if args.table else args.data
    cases = [
        Case(name, shots, seed, way, lr, args.epochs)
        for seed in args.seeds
        for shots in args.shots
        for name in names
        for way in args.ways
        for lr in ([WAYS[way]] if args.lr is None else args.lr if way != "probe" else [])
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: prepare(name, args.folder, Path(folder)) for name in names}
        jobs = [Job(case, paths[case.data], args.folder / _DEIT) for case in cases if case not in done]
        args.out.parent.mkdir(exist_ok=True)
        around = environment()
        for row in finished(jobs, args.jobs, args.minutes) if jobs else ():
            with args.out.open("a") as file:
                file.write(json.dumps({**row, "environment": around}) + "\n")
            print(*list(row.values())[:8], flush=True)
    print(table(read_rows(args.out)), table_of_rates(read_rows(args.out)), sep="\n\n")


if __name__ == "__main__":
    main()
