"""Images of different shapes: packed into one sequence, against padded ones and one after the other.

    python -m bench.packed
    python -m bench.packed --images 256 --dtype bfloat16 --model B/16

Shapes are those of NaFlex: aspect ratios from 1:2 to 2:1, and either at most 196 patches each ("one budget")
or from 49 to 196 ("budgets"). "padded sequences" pads token lists to the longest, with a mask; "padded
images" pads pixels to the largest height and width. Learned positions, random weights, interleaved, medians.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import vitrail as vt
from bench.measure import clock, environment, interleave, save
from vitrail.images.any_size import native_size


def shapes(count: int, budgets: bool) -> list[tuple[int, int]]:
    rng = np.random.default_rng(0)
    ratios = 2 ** rng.uniform(-1, 1, count)
    patches = rng.integers(49, 197, count) if budgets else np.full(count, 196)
    return [
        native_size(round(1000 * r), 1000, (16, 16), int(n)) for r, n in zip(ratios, patches, strict=True)
    ]


def pad_tokens(model: vt.ViT, images: list[Tensor]) -> Tensor:
    """Pooled class tokens, of token lists padded to the longest."""
    parts = [model.first_tokens(one[None], (one.shape[1] // 16, one.shape[2] // 16))[0] for one in images]
    z = pad_sequence(parts, batch_first=True)  # (B, T of the longest, D)
    lengths = torch.tensor([len(part) for part in parts], device=z.device)
    mask = (torch.arange(z.shape[1], device=z.device) < lengths[:, None])[:, None, None]
    for block in model.blocks:
        z = block(z, mask)
    return model.finish(z).pooled


def pad_pixels(model: vt.ViT, images: list[Tensor]) -> Tensor:
    """Pooled class tokens, of images padded to the largest height and width."""
    high, wide = (max(one.shape[axis] for one in images) for axis in (1, 2))
    batch = images[0].new_zeros(len(images), 3, high, wide)
    inside = torch.zeros(len(images), high // 16, wide // 16, dtype=torch.bool, device=batch.device)
    for number, one in enumerate(images):
        batch[number, :, : one.shape[1], : one.shape[2]] = one
        inside[number, : one.shape[1] // 16, : one.shape[2] // 16] = True
    keys = torch.cat([inside.new_ones(len(images), 1), inside.flatten(1)], dim=1)
    mask = keys[:, None].expand(-1, keys.shape[1], -1)
    return model.encode(batch, mask=mask).pooled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Ti/16")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="default: bench/results/packed-DEVICE.json")
    args = parser.parse_args()
    model = vt.create(args.model, classes=0).eval().to(args.device, getattr(torch, args.dtype))
    model.accept_any_size()
    sync = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    ways: dict[str, Callable[[vt.ViT, list[Tensor]], Tensor]] = {
        "packed": lambda model, images: model.encode_packed(images),
        "padded sequences": pad_tokens,
        "padded images": pad_pixels,
        "one by one": lambda model, images: torch.cat([model.encode(x[None]).pooled for x in images]),
    }
    result: dict[str, Any] = {"arguments": vars(args) | {"out": None}, "environment": environment()}
    for name, budgets in (("one budget", False), ("budgets", True)):
        like = dict(device=args.device, dtype=getattr(torch, args.dtype))
        images = [torch.randn(3, *shape, **like) for shape in shapes(args.images, budgets)]
        with torch.no_grad():
            difference = (ways["packed"](model, images) - ways["padded sequences"](model, images)).abs().max()
            jobs = {
                way: functools.partial(clock, functools.partial(run, model, images), 1, sync)
                for way, run in ways.items()
            }
            seconds = interleave(jobs, args.rounds)
        rates = {way: round(args.images / statistics.median(times), 1) for way, times in seconds.items()}
        print(f"{name}: packed and padded sequences differ by at most {difference:.1e}")
        for way, rate in rates.items():
            print(f"  {way:20} {rate:8.1f} images/s")
        result[name] = {"images_per_s": rates, "difference": float(difference)}
    save(result, args.out or Path(f"bench/results/packed-{args.device}.json"))


if __name__ == "__main__":
    main()
