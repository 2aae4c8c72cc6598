"""The peak of memory of a training step on one GPU, beside the formula of `vitrail plan`.

    python -m bench.memory --out bench/results/memory.json

Two steps each: forward, backward and fused AdamW, fp32 weights, bf16 autocast, not compiled. Shards are
those of the first of eight processes: torch's fake process group moves no bytes, but allocates as the real
one does.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.measure import environment, save
from vitrail.config import ViTConfig
from vitrail.memory import activation_bytes, state_bytes
from vitrail.model import ViT
from vitrail.presets import preset
from vitrail.recipes.settings import TrainConfig
from vitrail.training.cost import gathered_bytes
from vitrail.training.optim import build_optimizer
from vitrail.training.precision import ComputeDevice, choose_device
from vitrail.training.sharding import Parallelism

# size, images, recomputed blocks, shards
ROWS = (
    *(("B/16", 256, 0, 1), ("L/16", 128, 0, 1), ("L/16", 256, 0, 1), ("L/16", 256, 24, 1)),
    *(("H/14", 64, 0, 1), ("H/14", 128, 0, 1), ("H/14", 128, 32, 1), ("g/14", 64, 0, 1), ("g/14", 64, 40, 1)),
    *(("L/16", 128, 0, 8), ("H/14", 64, 0, 8), ("H/14", 64, 32, 8), ("g/14", 64, 0, 8), ("g/14", 16, 40, 8)),
)
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/memory.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/memory.py needs a CUDA device; there is none here.")
    compute = choose_device("bf16")
    start_fake_group()
    rows = []
    for size, images, recomputed, shards in ROWS:
        config = preset(size)
        measured, formula = peak(config, images, recomputed, shards, compute), estimate(*ROWS[len(rows)])
        rows.append(
            {
                "size": size,
                "images": images,
                "checkpoint_blocks": recomputed,
                "shards": shards,
                "peak_gib": round(measured / GIB, 2),
                "formula_gib": round(formula / GIB, 2),
                "ratio": round(formula / measured, 3),
            }
        )
        print(rows[-1], flush=True)
    save(args.out, {"rows": rows, "environment": environment()})


def start_fake_group(count: int = 8) -> None:
    """The first of so many processes that exchange nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)


def peak(config: ViTConfig, images: int, recomputed: int, shards: int, compute: ComputeDevice) -> int:
    """Bytes allocated at the most expensive moment of the second step."""
    gc.collect()
    torch.cuda.empty_cache()
    step = training_step(config, images, recomputed, shards, compute)
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def training_step(
    config: ViTConfig, images: int, recomputed: int, shards: int, compute: ComputeDevice
) -> Any:
    model = ViT(config)
    model.checkpointed_blocks = recomputed
    how = Parallelism()
    if shards > 1:
        mesh = init_device_mesh(compute.device.type, (shards,), mesh_dim_names=("shard",))
        how = Parallelism("fsdp", "", shards, mesh)
    how.apply(model, model, compute)
    optimizer = build_optimizer(model, TrainConfig())
    x = torch.rand(images, *config.input_shape, device=compute.device)
    labels = torch.zeros(images, dtype=torch.long, device=compute.device)

    def step() -> None:
        with compute.autocast():
            loss = torch.nn.functional.cross_entropy(model(x).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def estimate(size: str, images: int, recomputed: int, shards: int) -> float:
    """The formula: states, what is gathered, and activations."""
    config = preset(size)
    count = sum(config.parameter_counts.values())
    states = state_bytes(count, count, ema=False) / shards + (gathered_bytes(config) if shards > 1 else 0)
    return states + activation_bytes(config, images, 2, checkpointed=recomputed)


if __name__ == "__main__":
    main()
