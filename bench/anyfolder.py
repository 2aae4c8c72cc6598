"""Any folder of images, no settings: our default command against simple peers in the same seconds.

    python -m bench.anyfolder                                        # all sets, seed 0
    python -m bench.anyfolder letters textures --minutes 2 --seeds 0 1 2
    python -m bench.anyfolder pets --from deit_tiny.safetensors      # from published weights, against timm's
    python -m bench.anyfolder --table

Ours is `vitrail train SET/train --out RUN`, with --minutes only where it is given here, then the answers of
its best.safetensors for SET/test, of which no run sees anything. The peers are a small CNN with and without
flips, a support vector machine on pixels, and with --from timm's model at three learning rates. Each has as
many seconds as our training command took from start to exit; differences are paired by test image and seed.
A finished row is a line of bench/results/anyfolder.jsonl and is not measured again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.folder_peers import paths_and_labels
from bench.folder_sets import SETS, write_set
from bench.measure import environment
from vitrail.experiment.interval import t_quantile

RESULTS = Path(__file__).parent / "results" / "anyfolder.jsonl"
SCRATCH_PEERS = {"CNN": "cnn", "CNN, flips": "cnn --flips", "SVM": "sklearn"}
WEIGHTS_PEERS = {f"timm {lr}": f"timm --lr {lr} --weights {{weights}}" for lr in ("3e-5", "1e-4", "3e-4")}

Answers = NDArray[np.bool_]
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sets", nargs="*", choices=list(SETS), metavar="SET", default=list(SETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, help="given to our command; without it, its own choice")
    parser.add_argument("--train", type=int, help="at most so many training images")
    parser.add_argument("--from", dest="weights", type=Path, help="weights of DeiT-Ti; else from scratch")
    parser.add_argument("--folder", type=Path, help="where the sets are, or go; kept")
    parser.add_argument("--table", action="store_true", help="only print the table of what is saved")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for name in () if args.table else args.sets:
            data = write_set(name, args.folder or Path(temporary), args.train)
            for seed in args.seeds:
                if not saved(case := describe(args, data, seed)):
                    row = case | measure(data, seed, args, Path(temporary)) | {"environment": environment()}
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(json.dumps({key: row[key] for key in ("set", "seed", "seconds", "accuracy")}))
    print(table(read_rows()))


def describe(args: Any, data: Path, seed: int) -> Row:
    """What tells one case from another."""
    return {
        "set": data.name,
        "seed": seed,
        "start": args.weights.stem if args.weights else "scratch",
        "minutes": args.minutes,
        "machine": environment()["machine"],
    }


def saved(case: Row) -> bool:
    return any(case.items() <= row.items() for row in read_rows())


def read_rows() -> list[Row]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def measure(data: Path, seed: int, args: Any, folder: Path) -> Row:
    """Train ours, then each peer for as many seconds: accuracies, and how each pair of answers differs."""
    paths, labels = paths_and_labels(data / "test")
    begin = time.perf_counter()
    ours = train_ours(data, seed, args, folder)
    seconds = time.perf_counter() - begin
    correct = {"vitrail": predicted_by_ours(ours, data, paths)}
    peers = WEIGHTS_PEERS if args.weights else SCRATCH_PEERS
    for peer, arguments in peers.items():
        out = folder / "predicted.npy"
        name, *rest = arguments.format(weights=args.weights).split()
        run("bench.folder_peers", name, data, "--seconds", seconds, "--seed", seed, "--out", out, *rest)
        correct[peer] = np.load(out) == labels
    return {
        "seconds": round(seconds, 1),
        "train_images": sum(path.is_file() for path in (data / "train").rglob("*")),
        "test_images": len(labels),
        "accuracy": {who: round(float(found.mean()), 5) for who, found in correct.items()},
        "only_ours": {who: int((correct["vitrail"] & ~found).sum()) for who, found in correct.items()},
        "only_theirs": {who: int((~correct["vitrail"] & found).sum()) for who, found in correct.items()},
    }


def train_ours(data: Path, seed: int, args: Any, folder: Path) -> Path:
    """Run the command as a user types it; its best weights."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    options = ["--minutes", args.minutes] if args.minutes else []
    options += ["--from", args.weights] if args.weights else []
    run("vitrail", "train", data / "train", "--out", out, "--seed", seed, *options)
    return out / "best.safetensors"


def predicted_by_ours(model: Path, data: Path, paths: list[Path]) -> Answers:
    """Whether each test image is classified correctly."""
    out = model.with_name("test.csv")
    run("vitrail", "predict", model, data / "test", "--format", "csv", "--out", out)
    with out.open(newline="") as file:
        labels = {Path(row["file"]): row["label"] for row in csv.DictReader(file)}
    return np.array([labels[path] == path.parent.name for path in paths])


def run(module: str, *arguments: object) -> None:
    """Run a module in a fresh process; its messages are shown if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{module} {' '.join(map(str, arguments))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


# ---- the table --------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    """Markdown: for each set and start the mean accuracies, and ours minus each peer's with its interval."""
    lines = [
        "| set | training images | start | seeds | seconds | vitrail | ours minus theirs, points |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    for _, group in groupby(sorted(rows, key=_key), key=_key):
        runs = list(group)
        accuracy = 100 * np.mean([row["accuracy"]["vitrail"] for row in runs])
        differences = ", ".join(
            f"{who} {mean:+.1f} ({low:+.1f} to {high:+.1f})" for who, mean, low, high in compare(runs)
        )
        first, seconds = runs[0], np.mean([row["seconds"] for row in runs])
        lines.append(
            f"| {first['set']} | {first['train_images']:,} | {first['start']} | {len(runs)} | {seconds:.0f} "
            f"| {accuracy:.1f} % | {differences} |"
        )
    return "\n".join(lines)


def _key(row: Row) -> tuple[str, str, str]:
    return row["set"], row["start"], json.dumps([row["minutes"], row["machine"]])


def compare(runs: list[Row]) -> Iterator[tuple[str, float, float, float]]:
    """Ours minus each peer's in points, with the paired 95 % interval.

    The variance is that of the test images, who of the two is correct on each, and with several seeds also
    that between their differences, by Student's t.
    """
    n = runs[0]["test_images"]
    for who in (name for name in runs[0]["accuracy"] if name != "vitrail"):
        gains = np.array([(row["only_ours"][who] - row["only_theirs"][who]) / n for row in runs])
        disputed = np.mean([(row["only_ours"][who] + row["only_theirs"][who]) / n for row in runs])
        mean = float(gains.mean())
        half = 1.96 * math.sqrt(max(0.0, float(disputed) - mean**2) / n)
        if len(runs) > 1:
            between = t_quantile(len(runs) - 1) * float(gains.std(ddof=1)) / math.sqrt(len(runs))
            half = math.hypot(half, between)
        half = max(half, 3 / n)  # a difference that no image showed may still occur at that rate
        yield who, 100 * mean, 100 * (mean - half), 100 * (mean + half)


if __name__ == "__main__":
    main()
