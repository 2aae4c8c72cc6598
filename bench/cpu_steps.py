"""Whole training steps on this machine's cores: those of the demo and of the default recipe.

    python -m bench.cpu_steps

A step of `vitrail train` on scikit-learn's digits, from uint8 pixels to the metrics with augmentation,
clipping and EMA, beside forward, cross-entropy, backward and fused AdamW of the same model by hand; and what
torch's own `manual_seed` would add to every step. One thread, as in the demo. Compare the ratios, not the
milliseconds.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.cpu import training
from bench.measure import clock, environment, interleave, save
from vitrail.images.formats.sources import open_dataset
from vitrail.images.loader import Reader
from vitrail.model import ViT
from vitrail.model.device import choose_device
from vitrail.training.recipes import recipe
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

RECIPES = {"digits": "the demo", "auto": "the default"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="a round is one step of each")
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu-steps.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in RECIPES:
        for row in measure(name, args.rounds):
            rows.append({"recipe": name, **row})
            print(f"{name:8} {row['step']:18} {row['ms']:8.2f} ms {row['to_ours']:8.3f}", flush=True)
    save({"rounds": args.rounds, "rows": rows, "environment": environment()}, args.out)


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    data = open_dataset("digits")
    plan = recipe(name, data)
    trainer = Trainer(RunPlan(data, plan, choose_device("fp32", device="cpu")))
    batches = Reader(data.train, plan.preprocess, augment=plan.train.augment).batches(
        trainer.micro_batch_indices()
    )
    images = torch.randn(trainer.batch, *plan.model.input_shape)
    labels = torch.randint(plan.model.classes, (trainer.batch,))
    steps: dict[str, Callable[[], object]] = {
        "vitrail": functools.partial(trainer.take_step, batches),
        "by hand": training(ViT(plan.model), images, labels),
        "torch.manual_seed": functools.partial(torch.manual_seed, 0),
    }
    for step in steps.values():
        step()
    seconds = interleave(
        {key: functools.partial(clock, step, 1, lambda: None) for key, step in steps.items()}, rounds
    )

    def to_ours(key: str) -> float:
        pairs = zip(seconds[key], seconds["vitrail"], strict=True)
        return round(statistics.median(one / ours for one, ours in pairs), 3)

    return [
        {"step": key, "ms": round(1000 * statistics.median(times), 3), "to_ours": to_ours(key)}
        for key, times in seconds.items()
    ]


if __name__ == "__main__":
    main()
