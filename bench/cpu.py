"""Speed on this machine's cores, ours beside timm, transformers and torchvision, in one process.

    python -m bench.cpu --out bench/results/cpu.json

Eager fp32, exact GELU: inference at batch 1 and 8, and a training step (forward, cross-entropy,
backward, fused AdamW) at batch 8. Rounds are interleaved; compare the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.measure import clock, environment, interleave, rates, save
from bench.peers import PEERS, make_torchvision_importable
from vitrail.model.config import ViTConfig
from vitrail.model.presets import preset

# task: batch, rounds. A round is one step of each library: short, so that what slows the machine
# slows neighbors alike, and many, so that the median of their ratios settles.
TASKS = {"inference, batch 1": (1, 240), "inference, batch 8": (8, 24), "training, batch 8": (8, 20)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="S/16")
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu.json"))
    args = parser.parse_args()
    make_torchvision_importable()
    result: dict[str, Any] = {"size": args.size, "rows": [], "environment": environment()}
    print(f"{args.size:20} {'rounds':>6}  {'library':13} {'images/s':>9} {'ours to it':>11}")
    for task, (batch, rounds) in TASKS.items():
        for row in measure(preset(args.size), task, batch, rounds):
            result["rows"].append({"task": task, "rounds": rounds, **row})
            rate, ratio = row["images_per_s"], row["ours_to_it"]
            print(f"{task:20} {rounds:6}  {row['library']:13} {rate:9.2f} {ratio:11.3f}", flush=True)
    save(result, args.out)


def measure(config: ViTConfig, task: str, batch: int, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    images = torch.randn(batch, config.channels, *config.pixels)
    labels = torch.randint(config.classes, (batch,))
    jobs = {}
    for name, build in PEERS.items():
        model = build(config)
        step = training(model, images, labels) if "training" in task else inference(model, images)
        step()
        jobs[name] = functools.partial(clock, step, 1, lambda: None)
    seconds = interleave(jobs, rounds)
    found = rates(seconds, batch)

    def ours_to(name: str) -> float:
        """How many times as fast ours is: the median of the rounds' own ratios."""
        pairs = zip(seconds[name], seconds["vitrail"], strict=True)
        return round(statistics.median(theirs / ours for theirs, ours in pairs), 4)

    return [{"library": name, **found[name], "ours_to_it": ours_to(name)} for name in found]


def inference(model: nn.Module, images: torch.Tensor) -> Callable[[], object]:
    model.eval()

    def step() -> object:
        with torch.inference_mode():
            return model(images)

    return step


def training(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], object]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> object:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


if __name__ == "__main__":
    main()
