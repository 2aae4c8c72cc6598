"""What looking costs: are recorded weights right, what time do they take, and how much memory?

    python -m bench.inspect

Three questions, on the CPU in fp32 with one thread. Are recorded weights softmax(q k^T / sqrt(d)), and
does the model answer as without recording? How much longer does B/16 take while the weights of three
layers are recorded (first, middle, last), and of all twelve, than the same model plain? Rounds are
interleaved in random order; the ratio is the median of each round's own. How much does the process
grow while attention distances are computed over 10,000 images?
"""

from __future__ import annotations

import argparse
import copy
import functools
import resource
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vitrail as vt
from bench.measure import clock, environment, interleave, save
from vitrail.views import distance

ROUNDS = {1: 30, 8: 8}  # by batch
SHARPER = (1, 2, 3, 5)  # q and k are multiplied with these
LAYERS = (0, 6, 11)
SMALL = dict(width=64, depth=4, heads=4, patch=4, size=32, registers=2, classes=10)
IMAGES, BATCH = 10_000, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=1.0, help="of rounds and images, for a quick look")
    parser.add_argument("--out", type=Path, default=Path("bench/results/inspect.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Memory first: what B/16 leaves to the allocator would hide growth.
    memory = growth(max(10 * BATCH, int(IMAGES * args.share)))
    print(memory, flush=True)
    torch.manual_seed(0)
    model = vt.create("B/16").eval()
    exact = [difference(model, factor) for factor in SHARPER]
    print(exact, flush=True)
    times = []
    for batch, rounds in ROUNDS.items():
        times.append(cost(model, batch, max(3, int(rounds * args.share))))
        print(times[-1], flush=True)
    save({"memory": memory, "difference": exact, "cost": times, "environment": environment()}, args.out)


@torch.no_grad()
def difference(model: vt.ViT, sharper: int) -> dict[str, Any]:
    """How far recorded weights are from softmax(q k^T / sqrt(d)) in float64, at most, in any layer.

    A fresh model looks everywhere nearly alike, which is easy to get right. With larger q and k it looks
    at few patches; how few, the entropy says (uniform: 5.28 nats). Large scores are rounded coarsely.
    """
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attention.qkv.weight[: 2 * model.config.heads_width] *= sharper
    images = torch.randn(2, 3, 224, 224)
    plain = model.encode(images).pooled
    with vt.record(model, *(f"blocks.*.attention.{name}" for name in ("q", "k", "weights"))) as tape:
        recorded = model.encode(images).pooled
    worst, entropy = 0.0, []
    for layer in range(model.config.depth):
        q, k, weights = (tape[f"blocks.{layer}.attention.{name}"].double() for name in ("q", "k", "weights"))
        explicit = (q @ k.transpose(-2, -1) / model.config.d**0.5).softmax(dim=-1)
        worst = max(worst, float((explicit - weights).abs().max()))
        entropy.append(float(torch.special.entr(weights).sum(dim=-1).mean()))
    return {
        "model": "B/16",
        "sharper": sharper,
        "entropy_nats": [round(min(entropy), 2), round(max(entropy), 2)],
        "weights": worst,
        "pooled": float((plain - recorded).abs().max()),
        "pooled_size": float(plain.abs().mean()),
    }


def cost(model: vt.ViT, batch: int, rounds: int) -> dict[str, Any]:
    images = torch.randn(batch, 3, 224, 224)

    @torch.no_grad()
    def run(*names: str) -> Tensor:
        with vt.record(model, *names):
            return model(images)

    ways = {
        "plain": functools.partial(torch.no_grad()(model), images),
        "three layers": functools.partial(run, *(f"blocks.{n}.attention.weights" for n in LAYERS)),
        "all layers": functools.partial(run, "blocks.*.attention.weights"),
    }
    for way in ways.values():
        way()
    jobs = {name: functools.partial(clock, way, 1, lambda: None) for name, way in ways.items()}
    seconds = interleave(jobs, rounds)
    ratios = {
        name: round(statistics.median(a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)), 3)
        for name in ways
    }
    middle = {name: round(1000 * statistics.median(times), 1) for name, times in seconds.items()}
    return {"model": "B/16", "batch": batch, "rounds": rounds, "milliseconds": middle, "ratio": ratios}


def growth(images: int) -> dict[str, Any]:
    """How far the process grows over all batches but the first ten, which fill the allocator's stores."""
    torch.manual_seed(0)
    model = vt.ViT(vt.ViTConfig(**SMALL))
    marks: list[float] = []

    def batches() -> Iterator[Tensor]:
        for number in range(images // BATCH):
            if number == 10:
                marks.append(resident())
            yield torch.randn(BATCH, 3, 32, 32)

    found = distance.compute(model, batches())
    marks.append(resident())
    config = model.config
    kept = 4 * found.images * config.depth * config.heads * config.tokens**2 / 2**20
    return {
        "images": found.images,
        "batch": BATCH,
        "model": SMALL,
        "after_ten_batches_mib": round(marks[0], 1),
        "at_the_end_mib": round(marks[1], 1),
        "growth_mib": round(marks[1] - marks[0], 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "all_weights_would_take_mib": round(kept),
    }


def resident() -> float:
    """The memory that this process holds now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
