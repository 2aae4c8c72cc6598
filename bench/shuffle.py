"""The quality of a block shuffle (`shuffle_block`): what a batch is made of, and the accuracy that it costs.

    python -m bench.shuffle --out bench/results/shuffle.json

Batches: 1,280,000 images in shards of 10,000, sorted by class, 1,280 of each; the mean of 25 batches of one
epoch. Accuracy: the digits of scikit-learn by their recipe, in random order and sorted by class, after the
last epoch. Eleven minutes on two busy CPU cores.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.measure import environment, save
from vitrail.images.formats.sources import Dataset, open_dataset
from vitrail.images.loader import batch_indices, steps_in_epoch
from vitrail.images.order import BlockOrder, KeyedPermutation
from vitrail.training.start import train

IMAGES, BATCH, SHARD, CLASS = 1_280_000, 1024, 10_000, 1280  # images of a batch, a shard, a class
BATCHES, EPOCHS, SEEDS = 25, 15, (0, 1, 2)
BLOCKS = (None, 100, 1000, 10_000)
RUNS = (("random", None), ("random", 16), ("sorted", 4), ("sorted", 16))  # order of the data, shuffle_block


def describe_batches(block: int | None) -> dict[str, Any]:
    """How many shards and classes a batch has, on average."""
    keys = [0, 0]  # seed and epoch
    order = KeyedPermutation(keys, IMAGES) if block is None else BlockOrder(keys, IMAGES, block)
    steps = torch.linspace(0, steps_in_epoch(IMAGES, BATCH) - 1, BATCHES).long().tolist()
    batches = [batch_indices(order, step, BATCH) for step in steps]

    def different(size: int) -> float:
        return sum(len((batch // size).unique()) for batch in batches) / BATCHES

    return {"shuffle_block": block, "shards": different(SHARD), "classes": different(CLASS)}


def arrange(data: Dataset, order: str) -> Dataset:
    """The same training images in another order."""
    labels = data.train.labels
    shuffled = np.random.default_rng(0).permutation(len(labels))
    return replace(
        data,
        train=data.train.take(shuffled if order == "random" else np.argsort(labels, kind="stable")),
    )


def measure_accuracy(order: str, block: int | None) -> dict[str, Any]:
    """The accuracy on the held-out digits, for each seed."""
    data, found = arrange(open_dataset("digits"), order), []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            run = train(
                data,
                out=Path(folder) / "run",
                recipe="digits",
                epochs=EPOCHS,
                seed=seed,
                shuffle_block=block,
                report=False,
                verbose=False,
            )
        found.append(round(run.metrics[-1]["val_accuracy"], 4))
    return {"order": order, "shuffle_block": block, "epochs": EPOCHS, "seeds": SEEDS, "accuracy": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/shuffle.json"))
    options = parser.parse_args()
    batches = [describe_batches(block) for block in BLOCKS]
    print(*batches, sep="\n", flush=True)
    accuracy = []
    for order, block in RUNS:
        accuracy.append(measure_accuracy(order, block))
        print(accuracy[-1], flush=True)
    save({"batches": batches, "accuracy": accuracy, "environment": environment()}, options.out)


if __name__ == "__main__":
    main()
