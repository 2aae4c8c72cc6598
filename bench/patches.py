"""Patches by convolution against patches by one matrix product: the same numbers, how fast?

    python -m bench.patches

On the GPU if there is one (B/16's projection, 256 images, bf16, eager and compiled), else on the
CPU (8 images, fp32, eager). Interleaved; the median round counts.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.measure import clock, environment, interleave, save
from vitrail.model.tokens import patchify


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, help="default: bench/results/patches-DEVICE.json")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if gpu else {}
    batch, repeats = (256, 20) if gpu else (8, 1)
    x = torch.randn(batch, 3, 224, 224, **options)
    weight, bias = torch.randn(768, 3, 16, 16, **options), torch.randn(768, **options)

    def product() -> torch.Tensor:
        return F.linear(patchify(x, (16, 16)), weight.flatten(1), bias)

    def convolution() -> torch.Tensor:
        return F.conv2d(x, weight, bias, stride=16).flatten(2).transpose(1, 2)

    ways = {"product": product, "convolution": convolution}
    if gpu:
        ways |= {f"{name}, compiled": torch.compile(way) for name, way in ways.items()}
    for way in ways.values():
        way()
    sync = torch.cuda.synchronize if gpu else lambda: None
    jobs = {name: functools.partial(clock, way, repeats, sync) for name, way in ways.items()}
    milliseconds = {
        name: round(1000 * statistics.median(times), 3)
        for name, times in interleave(jobs, args.rounds).items()
    }
    for name, time in milliseconds.items():
        print(f"{name:24} {time:9.3f} ms")
    result = {
        "batch": batch,
        "rounds": args.rounds,
        "milliseconds": milliseconds,
        "environment": environment(),
    }
    save(result, args.out or Path(f"bench/results/patches-{'gpu' if gpu else 'cpu'}.json"))


if __name__ == "__main__":
    main()
