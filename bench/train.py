"""Training end to end on one GPU, from JPEG files to updated weights: ours beside timm's loader and loop.

    python -m bench.train --out bench/results

A B/16 at 224 pixels, batch 256, bf16, compiled; random crops of 8 to 100 % of the area, flips, RandAugment
(two operations of magnitude 9 of 30), random erasing, mixup and CutMix; AdamW, gradients clipped. The images
are those of bench.photos. Rows:

vitrail, files               the trainer of `vitrail train`, from JPEG files
vitrail, packed              the same from a packed file (`vitrail pack`)
vitrail, data on the device  the same steps on one batch that is on the GPU already: what loading can reach
timm, files                  timm's create_loader with as many workers, prefetching over epochs, its
                             RandAugment and erasing, Mixup on the GPU, its model compiled, the loop of its
                             train.py
timm, files, its defaults    the same without prefetching over epochs: its workers start again every epoch
transformers, files          its Trainer, as many persistent workers, compiled, bf16; crops, RandAugment and
                             erasing by torchvision with the mean of its image processor; it mixes nothing

Every row has a process of its own. All compile at the same time; then they take turns. Before a turn all
loaders fill up what they prefetch and fall silent. A turn starts with untimed steps, until a loader
that is slower than the GPU has nothing prefetched left: a loader that holds 32 batches and makes 7 where the
GPU takes 10 needs 107 steps. Evaluation is timed by itself. All rows must fit on the card: of our captured
steps each takes some 35 GiB, so transformers is asked for by itself:

    python -m bench.train --rows "vitrail, files" "transformers, files" --out bench/results
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.measure import environment, interleave, rates, save
from bench.peers import make_torchvision_importable
from bench.photos import CLASSES, write_images
from bench.train_peers import (
    BATCH,
    CLIP,
    ERASE,
    LR,
    MIN_AREA,
    MIXING,
    PEER_ROWS,
    SMOOTHING,
    Answer,
    timed,
)
from vitrail.images.augment.pipeline import Augment
from vitrail.images.formats.pack_writer import pack_dataset
from vitrail.images.formats.sources import Dataset, read_data
from vitrail.images.loader import Batch, Reader
from vitrail.images.preprocess import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.model.device import choose_device
from vitrail.model.presets import preset
from vitrail.training.epoch import evaluate_epoch
from vitrail.training.recipes.settings import Recipe, TrainConfig
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

ROWS = (
    "vitrail, files",
    "vitrail, packed",
    "vitrail, data on the device",
    "timm, files",
    "timm, files, its defaults",
    "transformers, files",
)
AUGMENT = Augment(crop=MIN_AREA, flip=0.5, policy="randaugment", erase=ERASE)
EVALUATING = ("vitrail, files", "vitrail, packed", "timm, files")
UNTIMED = 120  # steps at the start of a turn
FILL = 5.0  # seconds in which every loader has prefetched what it may


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="B/16")
    parser.add_argument("--images", type=int, default=12_800, help="for training, and a fifth to evaluate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="timed in a round")
    parser.add_argument("--without-evaluation", action="store_true", help="timm compiles once more for it")
    parser.add_argument("--rows", nargs="*", default=ROWS[:4], choices=ROWS)
    parser.add_argument("--folder", type=Path, default=None, help="where the images go for a while")
    parser.add_argument("--out", type=Path, help="a folder for the results")
    parser.add_argument("--row", help=argparse.SUPPRESS)  # what a row's own process is started with
    args = parser.parse_args()
    if args.row:
        serve(args.row, args.size, args.folder)
        return
    if not torch.cuda.is_available():
        sys.exit("bench/train.py needs a CUDA device; there is none here.")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(args, Path(folder))
    if args.out:
        name = "train-transformers.json" if ROWS[-1] in args.rows else "train.json"
        save({**result, "environment": environment()}, args.out / name)


def measure(args: Any, folder: Path) -> dict[str, Any]:
    held_out = args.images // 5
    kilobytes = write_images(folder / "files" / "train", args.images)
    write_images(folder / "files" / "val", held_out)
    if "vitrail, packed" in args.rows:
        begin = time.perf_counter()
        packed = pack_dataset(read_data(folder / "files"), folder / "images.pack", workers="auto")
        print(f"packed: {packed.bytes / 1e9:.1f} GB in {time.perf_counter() - begin:.0f} s", flush=True)
    rows = {name: RowProcess(name, args.size, folder) for name in args.rows}
    ready = {name: row.read() for name, row in rows.items()}
    print("ready after", {name: found["ready_s"] for name, found in ready.items()}, flush=True)
    seconds = interleave(
        {name: functools.partial(row.take_turn, args.steps) for name, row in rows.items()}, args.rounds
    )
    speeds = rates(seconds, BATCH * args.steps)
    found = []
    for name, row in rows.items():
        entry = {"row": name, **ready[name], **speeds[name]}
        if name in EVALUATING and not args.without_evaluation:
            row.ask("evaluate", held_out)  # which compiles, or starts
            entry["evaluated_per_s"] = round(held_out / row.ask("evaluate", held_out), 1)
        row.end()
        found.append(entry)
        print(json.dumps(entry), flush=True)
    settings = {name: getattr(args, name) for name in ("size", "images", "rounds", "steps")}
    return {**settings, "batch": BATCH, "kilobytes": round(kilobytes, 1), "rows": found}


# ---- processes ------------------------------------------------------------------------------


class RowProcess:
    """The process of a row. Not one of multiprocessing's: those may not start loaders' workers."""

    def __init__(self, name: str, size: str, folder: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.train",
            "--row",
            name,
            "--size",
            size,
            "--folder",
            str(folder),
        ]
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit("The process of a row has ended with an error.")
        return json.loads(line)

    def ask(self, task: str, count: int) -> float:
        assert self.process.stdin is not None
        print(json.dumps([task, count]), file=self.process.stdin, flush=True)
        return float(self.read())

    def take_turn(self, steps: int) -> float:
        time.sleep(FILL)
        seconds = self.ask("train", steps)
        print(f"{self.name}: {BATCH * steps / seconds:,.0f} images/s", flush=True)
        return seconds

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(name: str, size: str, folder: Path) -> None:
    """In a row's process: get ready, say so, and answer until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    make_torchvision_importable()
    torch.manual_seed(0)
    begin = time.perf_counter()
    config = preset(size, classes=CLASSES)
    ours = name.startswith("vitrail")
    answer = our_row(name, config, folder) if ours else PEER_ROWS[name](config, folder)
    answer("train", 6, untimed=0)
    print(json.dumps({"ready_s": round(time.perf_counter() - begin, 1)}), file=answers, flush=True)
    for line in sys.stdin:
        task, count = json.loads(line)
        untimed = 0 if "device" in name else UNTIMED
        print(json.dumps(answer(task, count, untimed=untimed)), file=answers, flush=True)


# ---- rows -----------------------------------------------------------------------------------


def our_row(name: str, config: ViTConfig, folder: Path) -> Answer:
    """The trainer of `vitrail train`, and its evaluation."""
    torch.set_num_threads(1)  # as `threads=auto` does beside a GPU
    data = read_data(folder / ("images.pack" if "packed" in name else "files"))
    trainer = build_trainer(data, config)
    reader = Reader(
        data.train,
        trainer.preprocess,
        augment=trainer.settings.augment,
        workers=trainer.workers,
        device=trainer.compute.device,
    )
    batches: Iterator[Batch] = reader.batches(trainer.micro_batch_indices())
    if "device" in name:
        batches = itertools.repeat(next(batches).to(trainer.compute.device))
        trainer.workers.close()
    print(trainer.choose_mode().reason, trainer.workers.plan, flush=True)

    def answer(task: str, count: int, *, untimed: int) -> float:
        if task == "train":
            return timed(lambda: trainer.take_step(batches), untimed, count)
        begin = time.perf_counter()
        evaluate_epoch(
            trainer.model, data.eval_split, trainer.preprocess, trainer.compute, workers=trainer.workers
        )
        return time.perf_counter() - begin

    return answer


def build_trainer(data: Dataset, config: ViTConfig) -> Trainer:
    settings = TrainConfig(
        epochs=10_000,
        batch=BATCH,
        lr=LR,
        smoothing=SMOOTHING,
        clip=CLIP,
        augment=AUGMENT,
        mixing=MIXING,
        compile=True,
    )
    side = config.pixels[0]
    preprocess = Preprocess(size=side, resize="shortest", resize_to=round(side * 8 / 7))
    return Trainer(RunPlan(data, Recipe(config, preprocess, settings), choose_device("auto")))


if __name__ == "__main__":
    main()
