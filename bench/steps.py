"""Training steps on one GPU: ours beside the peers in their best mode, and beside a hand-written loop.

    python -m bench.steps --size B/16 --out bench/results/steps-B16.json
    python -m bench.steps --recipe mnist --out bench/results/steps-mnist.json

`--size`: forward, cross-entropy, backward and fused AdamW at batch 256 with fp32 weights under bf16 autocast.
Peers eager, compiled, and compiled and captured as a CUDA graph; ours compiled, captured, and with what
`vitrail.training.lean` changes. `--recipe`: the steps of a recipe, from uint8 pixels to the metrics, as
`vitrail train` takes them; and a hand-written CUDA graph of the same compiled model without augmentation,
clipping, EMA and metrics, which is what is left to gain.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bench.measure import clock, environment, interleave, rates, save
from bench.peers import PEERS, make_torchvision_importable
from vitrail.config import ViTConfig
from vitrail.data.loader import Batch, Reader
from vitrail.data.sources import Dataset, Split
from vitrail.model import ViT
from vitrail.presets import preset
from vitrail.recipes import recipe
from vitrail.training.lean import use_bf16_residual, use_fast_gelu, use_short_attention
from vitrail.training.precision import choose_device
from vitrail.training.trainer import Trainer

Step = Callable[[], object]
sync = torch.cuda.synchronize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--size", help="a model's size, such as B/16")
    what.add_argument("--recipe", choices=["mnist", "cifar10-small"])
    parser.add_argument("--batch", type=int, default=256, help="with --size")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=10, help="steps in one timed round")
    parser.add_argument("--only", default="", help="rows, separated by semicolons; default: all")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/steps.py needs a CUDA device; there is none here.")
    make_torchvision_importable()
    candidates = large_steps(preset(args.size), args.batch) if args.size else recipe_steps(args.recipe)
    chosen = args.only.split(";") if args.only else list(candidates)
    jobs, rows = {}, {}
    for name in chosen:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step = candidates[name]()
        for _ in range(6):
            step()
        sync()
        ready = time.perf_counter() - begin
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        rows[name] = {"row": name, "ready_s": round(ready, 1), "peak_gib": round(peak, 2)}
        print(f"{name}: ready after {ready:.0f} s", flush=True)
        jobs[name] = functools.partial(clock, step, args.repeats, sync)
    batch = args.batch if args.size else recipe_batch(args.recipe)
    found = rates(interleave(jobs, args.rounds), batch) if args.rounds else {}
    for name in found:
        rows[name] |= {**found[name], "ms_per_step": round(1000 * batch / found[name]["images_per_s"], 3)}
        row = rows[name]
        print(
            f"{args.size or args.recipe} {name:34} {row['images_per_s']:9,.0f} images/s "
            f"{row['ms_per_step']:8.2f} ms {row['peak_gib']:6.1f} GiB"
        )
    if args.out and args.rounds:
        settings = {"rounds": args.rounds, "repeats": args.repeats, "batch": batch}
        what = {"size": args.size} if args.size else {"recipe": args.recipe}
        save({**what, **settings, "rows": list(rows.values()), "environment": environment()}, args.out)


# ---- large models ---------------------------------------------------------------------------


def large_steps(config: ViTConfig, batch: int) -> dict[str, Callable[[], Step]]:
    """What builds each candidate's step."""
    torch.manual_seed(0)
    images = torch.randn(batch, config.channels, *config.pixels, device="cuda")
    labels = torch.randint(config.classes, (batch,), device="cuda")

    def ours(residual: str, lean: bool, graph: bool) -> Step:
        model, compute = ViT(config), choose_device("bf16")
        if residual == "bf16":
            use_bf16_residual(model)
        if lean:
            use_fast_gelu(model)
            use_short_attention(model)
        return training_step(model, images, labels, compute.autocast, compiled=True, graph=graph)

    def peer(name: str, compiled: bool, graph: bool) -> Step:
        cast = functools.partial(torch.autocast, "cuda", torch.bfloat16)
        return training_step(PEERS[name](config), images, labels, cast, compiled, graph)

    return {
        "vitrail, plain step compiled": functools.partial(ours, "fp32", False, False),
        "vitrail, fp32 residual": functools.partial(ours, "fp32", True, True),
        "vitrail, bf16 residual": functools.partial(ours, "bf16", True, True),
        "timm, compiled": functools.partial(peer, "timm", True, False),
        "timm, compiled and captured": functools.partial(peer, "timm", True, True),
        "transformers, eager": functools.partial(peer, "transformers", False, False),
        "transformers, captured": functools.partial(peer, "transformers", False, True),
    }


def training_step(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, cast: Any, compiled: bool, graph: bool
) -> Step:
    """Forward, cross-entropy, backward and AdamW; with `graph`, a replay of them."""
    model = model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with cast():
            loss = F.cross_entropy(run(images), labels)
        loss.backward()
        optimizer.step()

    return capture(step) if graph else step


def capture(step: Step) -> Step:
    """The usual few lines: warm up on another stream, record, replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


# ---- recipes --------------------------------------------------------------------------------


def recipe_steps(name: str) -> dict[str, Callable[[], Step]]:
    """What builds each way to take a recipe's steps, on random images of the same size."""
    data = random_images(name)
    plan = recipe(name, data)

    def ours(**changes: Any) -> Step:
        settings = replace(plan.train, **changes)
        trainer = Trainer(ViT(plan.model), plan.preprocess, data, settings, choose_device("auto"))
        return functools.partial(trainer.take_step, endless_batches(trainer))

    def by_hand() -> Step:
        batch = plan.train.batch
        images = torch.randn(batch, plan.model.channels, *plan.model.pixels, device="cuda")
        labels = torch.randint(plan.model.classes, (batch,), device="cuda")
        cast = choose_device("auto").autocast
        return training_step(ViT(plan.model), images, labels, cast, compiled=True, graph=True)

    return {
        "plain": functools.partial(ours, compile=False, cuda_graph=False),
        "captured": functools.partial(ours, compile=False, cuda_graph=True),
        "compiled": functools.partial(ours, compile=True, cuda_graph=False),
        "compiled and captured": functools.partial(ours, compile=True, cuda_graph=True),
        "by hand": by_hand,
    }


def recipe_batch(name: str) -> int:
    return recipe(name, random_images(name)).train.batch


@functools.cache
def random_images(name: str) -> Dataset:
    """As many images of the same size as the recipe's data set has."""
    count, side, channels = {"mnist": (60_000, 28, 1), "cifar10-small": (50_000, 32, 3)}[name]
    rng = np.random.default_rng(0)

    def split(count: int) -> Split:
        images = rng.integers(0, 256, (count, side, side, channels), dtype=np.uint8)
        return Split(rng.integers(0, 10, count), [str(i) for i in range(count)], images=images)

    return Dataset(name, [str(i) for i in range(10)], train=split(count), val=split(100))


def endless_batches(trainer: Trainer) -> Iterator[Batch]:
    reader = Reader(
        trainer.data.train,
        trainer.preprocess,
        augment=trainer.settings.augment,
        seed=trainer.settings.seed,
        device=trainer.compute.device,
    )
    return reader.batches(trainer.micro_batch_indices())


if __name__ == "__main__":
    main()
