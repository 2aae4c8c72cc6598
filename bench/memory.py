"""The peak of memory of a training step on one GPU, beside the formula of `vitrail plan`.

    python -m bench.memory --out bench/results/memory.json
    python -m bench.memory --time        # one row at a time, and how long a step takes

Each row has a process of its own, two at a time, and a minute and a half; rows that the file has are not
measured again. A step is forward, backward and fused AdamW, fp32 weights and residual stream, bf16 autocast,
not compiled, without fused kernels; the peak is that of the second one. Shards are
those of the first of eight processes: torch's fake process group moves no bytes, but allocates as the real
one does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.measure import environment, save
from vitrail.fast.parallelism import Parallelism
from vitrail.fast.prepare import prepare
from vitrail.fast.training import TrainingExecution
from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail.model.device import ComputeDevice, choose_device
from vitrail.model.presets import preset
from vitrail.training.optim import build_optimizer
from vitrail.training.plan.cost import StepMemory
from vitrail.training.recipes.settings import TrainConfig

# size, images, recomputed blocks, shards
ROWS = (
    *(("B/16", 256, 0, 1), ("L/16", 128, 0, 1), ("L/16", 256, 0, 1), ("L/16", 256, 24, 1)),
    *(("H/14", 128, 0, 1), ("H/14", 128, 32, 1), ("g/14", 64, 0, 1), ("g/14", 64, 40, 1)),
    *(("L/16", 128, 0, 8), ("L/16", 128, 24, 8), ("H/14", 64, 0, 8), ("H/14", 64, 32, 8)),
    *(("g/14", 64, 0, 8), ("g/14", 16, 40, 8)),
)
GIB = 2**30
SECONDS = 90  # for a row
STEPS = 8  # of which the time is the mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/memory.json"))
    parser.add_argument("--time", action="store_true", help="measure also the time of a step on one GPU")
    parser.add_argument("--row", type=int, help="measure this row only, in this process")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/memory.py needs a CUDA device; there is none here.")
    if args.row is not None:
        print(json.dumps(measure(*ROWS[args.row])))
        return
    before = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows = {key(row): row for row in before if "peak_gib" in row}
    missing = [
        number
        for number, row in enumerate(ROWS)
        if row not in rows or (args.time and row[-1] == 1 and "step_ms" not in rows[row])
    ]
    with ThreadPoolExecutor(1 if args.time else 2) as pool:
        for row in pool.map(measure_apart, missing):
            if not args.time:
                row.pop("step_ms", None)  # another row was measured beside it
            print(row, flush=True)
            rows[key(row)] = row
            found = [rows[one] for one in ROWS if one in rows]
            save({"rows": found, "environment": environment()}, args.out)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["size"], row["images"], row["checkpoint_blocks"], row["shards"]


def measure_apart(number: int) -> dict[str, Any]:
    """A row, measured in a process of its own; with the error, if it has one."""
    size, images, recomputed, shards = ROWS[number]
    row = {"size": size, "images": images, "checkpoint_blocks": recomputed, "shards": shards}
    command = [sys.executable, "-m", "bench.memory", "--row", str(number)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        return row | json.loads(done.stdout) if done.returncode == 0 else row | {"error": done.stderr[-500:]}
    except subprocess.TimeoutExpired:
        return row | {"error": f"not done after {SECONDS} s"}


def measure(size: str, images: int, recomputed: int, shards: int) -> dict[str, float]:
    if shards > 1:
        start_fake_group(shards)
    step = training_step(preset(size), images, recomputed, shards, choose_device("bf16"))
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / STEPS
    measured, formula = torch.cuda.max_memory_allocated(), estimate(size, images, recomputed, shards)
    return {
        "peak_gib": round(measured / GIB, 2),
        "formula_gib": round(formula / GIB, 2),
        "ratio": round(formula / measured, 3),
        "states_gib": round(torch.cuda.memory_allocated() / GIB, 2),
        **({"step_ms": round(1000 * seconds, 1)} if shards == 1 else {}),  # shards exchange nothing here
    }


def start_fake_group(count: int) -> None:
    """The first of so many processes that exchange nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)


def training_step(
    config: ViTConfig, images: int, recomputed: int, shards: int, compute: ComputeDevice
) -> Callable[[], None]:
    with compute.device:
        model = ViT(config)
    how = Parallelism()
    if shards > 1:
        mesh = init_device_mesh(compute.device.type, (shards,), mesh_dim_names=("shard",))
        how = Parallelism("fsdp", "", shards, mesh)
    executable = prepare(model, TrainingExecution(parallel=how, dtype=compute.dtype))
    executable.use(recomputed=recomputed)
    executable.set_mode()
    optimizer = build_optimizer(model, TrainConfig())
    x = torch.rand(images, *config.input_shape, device=compute.device)
    labels = torch.zeros(images, dtype=torch.long, device=compute.device)

    def step() -> None:
        with compute.attention():
            with compute.autocast():
                loss = torch.nn.functional.cross_entropy(executable(x).float(), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def estimate(size: str, images: int, recomputed: int, shards: int) -> float:
    """The formula: states, what is gathered, and activations."""
    config = preset(size)
    count = sum(config.parameter_counts.values())
    step = StepMemory(
        config=config, parameters=count, trained=count, images=images, residual=4, checkpointed=recomputed
    )
    return step.total(shards)


if __name__ == "__main__":
    main()
