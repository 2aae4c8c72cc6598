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
from vitrail.config import ViTConfig
from vitrail.presets import preset

TASKS = {"inference, batch 1": 1, "inference, batch 8": 8, "training, batch 8": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="S/16,B/16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu.json"))
    args = parser.parse_args()
    make_torchvision_importable()
    result: dict[str, Any] = {"rounds": args.rounds, "rows": [], "environment": environment()}
    print(f"{'size':6} {'task':20} {'library':13} {'images/s':>9} {'to the fastest peer':>20}")
    for size in args.sizes.split(","):
        for task, batch in TASKS.items():
            for row in measure(preset(size), task, batch, args.rounds):
                result["rows"].append({"size": size, "task": task, **row})
                rate, ratio = row["images_per_s"], row["to_fastest_peer"]
                print(f"{size:6} {task:20} {row['library']:13} {rate:9.2f} {ratio:20.3f}", flush=True)
    save(result, args.out)


def measure(config: ViTConfig, task: str, batch: int, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    images = torch.randn(batch, config.channels, *config.pixels)
    labels = torch.randint(config.classes, (batch,))
    steps = {}
    for name, build in PEERS.items():
        model = build(config)
        steps[name] = training(model, images, labels) if "training" in task else inference(model, images)
        steps[name]()
    repeats = 4 if batch == 1 else 1
    jobs = {name: functools.partial(clock, step, repeats, lambda: None) for name, step in steps.items()}
    seconds = interleave(jobs, rounds)
    found = rates(seconds, batch)
    fastest = max((name for name in found if name != "vitrail"), key=lambda name: found[name]["images_per_s"])

    def ratio(name: str) -> float:
        """Against the fastest peer, round by round: what slowed a round slowed both."""
        pairs = zip(seconds[fastest], seconds[name], strict=True)
        return round(statistics.median(theirs / own for theirs, own in pairs), 4)

    return [{"library": name, **found[name], "to_fastest_peer": ratio(name)} for name in found]


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
