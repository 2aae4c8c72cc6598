"""Speed on one GPU, ours beside timm, transformers and torchvision, in one process.

    python -m bench.gpu --size B/16 --out bench/results/gpu-B16.json

For inference and for a training step, eager and compiled (torch.compile with its defaults): images
per second at batch 256 in bf16, the share of what this card reaches on an 8192 x 8192 x 8192 bf16
product, and the peak of memory. Inference has weights in bf16; a training step is forward,
cross-entropy, backward and fused AdamW with fp32 weights under bf16 autocast. All use exact GELU
and PyTorch's fused attention.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
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
from vitrail.training.plan.cost import forward_flops

sync = torch.cuda.synchronize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="B/16")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=10, help="steps in one timed round")
    parser.add_argument("--tasks", default="inference,training")
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--libraries", default=",".join(PEERS))
    parser.add_argument("--out", type=Path, help="default: bench/results/gpu-SIZE.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/gpu.py needs a CUDA device; there is none here. bench/cpu.py runs anywhere.")
    args.out = args.out or Path(f"bench/results/gpu-{args.size.replace('/', '')}.json")
    make_torchvision_importable()
    config = preset(args.size)
    result: dict[str, Any] = {
        "size": args.size,
        "batch": args.batch,
        "rounds": args.rounds,
        "repeats": args.repeats,
        "product_tflops": round(product_tflops(), 1),
        "rows": [],
        "environment": environment(),
    }
    for task in args.tasks.split(","):
        for mode in args.modes.split(","):
            result["rows"] += measure(config, task, mode, args, result["product_tflops"])
            save(result, args.out)
    print(f"{args.size}, batch {args.batch}; 8192^3 bf16 product: {result['product_tflops']} TFLOP/s")
    print(f"{'task':10} {'mode':9} {'library':13} {'images/s':>9} {'of product':>10} {'peak GiB':>9}")
    for row in result["rows"]:
        print(
            f"{row['task']:10} {row['mode']:9} {row['library']:13} {row['images_per_s']:9.0f} "
            f"{row['of_product']:10.1%} {row['peak_gib']:9.2f}"
        )


def measure(config: ViTConfig, task: str, mode: str, args: Any, product: float) -> list[dict[str, Any]]:
    """One row per library for one task and mode."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    images = torch.randn(args.batch, config.channels, *config.pixels, device="cuda")
    labels = torch.randint(config.classes, (args.batch,), device="cuda")
    jobs, own, peaks = {}, {}, {}
    for name in args.libraries.split(","):
        build = PEERS[name]
        before = torch.cuda.memory_allocated()
        model = build(config).cuda()
        step = (
            inference(model, images, mode) if task == "inference" else training(model, images, labels, mode)
        )
        begin = time.perf_counter()
        for _ in range(3):
            step()
        sync()
        print(f"{task} {mode} {name}: ready after {time.perf_counter() - begin:.0f} s", flush=True)
        own[name] = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        step()
        sync()
        peaks[name] = torch.cuda.max_memory_allocated() - base + own[name]
        jobs[name] = functools.partial(clock, step, args.repeats, sync)
    found = rates(interleave(jobs, args.rounds), args.batch)
    flops = forward_flops(config) * (1 if task == "inference" else 3)
    return [
        {
            "task": task,
            "mode": mode,
            "library": name,
            **found[name],
            "of_product": round(found[name]["images_per_s"] * flops / (product * 1e12), 4),
            "peak_gib": round(peaks[name] / 2**30, 3),
        }
        for name in jobs
    ]


def inference(model: nn.Module, images: torch.Tensor, mode: str) -> Callable[[], object]:
    model = model.eval().bfloat16()
    images = images.bfloat16()
    run = torch.compile(model) if mode == "compiled" else model

    def step() -> object:
        with torch.inference_mode():
            return run(images)

    return step


def training(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, mode: str) -> Callable[[], object]:
    model = model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if mode == "compiled" else model

    def step() -> object:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(run(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def product_tflops(side: int = 8192) -> float:
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    clock(lambda: a @ b, 5, sync)
    return 2 * side**3 / clock(lambda: a @ b, 20, sync) / 1e12


if __name__ == "__main__":
    main()
