"""Training steps on one GPU: ours beside the peers in their best mode, and beside a hand-written loop.

    python -m bench.steps B/16 mnist --out bench/results

A size, such as B/16: forward, cross-entropy, backward and fused AdamW at batch 256, with fp32 weights under
bf16 autocast. Peers compiled, compiled and captured as a CUDA graph, and transformers eager, its fastest;
ours compiled and captured, with what `vitrail.fast.training` changes. A recipe, mnist or cifar10-small: its
steps from uint8 pixels to the metrics, as `vitrail train` takes them; and a hand-written CUDA graph of the
same compiled model without augmentation, clipping, EMA and metrics, which is what is left to gain.

Every row has a process of its own. All compile at the same time; then they take turns, round by round. All
must fit on the card: the rows of L/16 take some 45 GiB each, so leave out all but two (`--without`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bench.measure import capture, clock, environment, interleave, rates, save
from bench.peers import PEERS, make_torchvision_importable
from vitrail.fast.prepare import prepare
from vitrail.fast.training import TrainingExecution
from vitrail.images.formats.sources import Dataset, Split
from vitrail.images.loader import Batch, Reader
from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail.model.device import choose_device
from vitrail.model.presets import preset
from vitrail.training.plan.step_mode import StepMode
from vitrail.training.recipes import recipe
from vitrail.training.run_plan import RunPlan
from vitrail.training.trainer import Trainer

Step = Callable[[], object]
RECIPES = {"mnist": (60_000, 28, 1), "cifar10-small": (50_000, 32, 3)}  # images, side, channels
BATCH = 256  # of the sizes
sync = torch.cuda.synchronize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", help="sizes, such as B/16, and recipes: mnist, cifar10-small")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=10, help="steps in one timed round")
    parser.add_argument("--without", nargs="*", default=[], help="rows to leave out")
    parser.add_argument("--out", type=Path, help="a folder for the results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/steps.py needs a CUDA device; there is none here.")
    started = {
        what: {name: start(what, name) for name in row_names(what) if name not in args.without}
        for what in args.what
    }
    ready = {what: wait_for(processes) for what, processes in started.items()}
    for what, found in ready.items():
        repeats = args.repeats * (5 if what in RECIPES else 1)
        jobs = {name: functools.partial(ask, started[what][name], repeats) for name in found}
        batch = batch_of(what)
        speeds = rates(interleave(jobs, args.rounds), batch)
        rows = [{"row": name, **found[name], **speeds[name]} for name in found]
        for row in rows:
            row["ms_per_step"] = round(1000 * batch / row["images_per_s"], 3)
            print(
                f"{what:13} {row['row']:28} {row['images_per_s']:9,.0f} images/s "
                f"{row['ms_per_step']:8.2f} ms {row['peak_gib']:6.1f} GiB",
                flush=True,
            )
        if args.out:
            settings = {"what": what, "batch": batch, "rounds": args.rounds, "repeats": repeats}
            file = args.out / f"steps-{what.replace('/', '')}.json"
            save({**settings, "rows": rows, "environment": environment()}, file)


# ---- processes ------------------------------------------------------------------------------


def start(what: str, name: str) -> Connection:
    """Start the process of a row; it sends what `prepare` measures, then waits to be asked."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=answer, args=(theirs, what, name), daemon=True).start()
    theirs.close()  # so that the end of the process is noticed
    return ours


def wait_for(processes: dict[str, Connection]) -> dict[str, dict[str, float]]:
    """What the processes measured while they prepared, without those that failed."""
    found = {}
    for name, connection in processes.items():
        try:
            found[name] = connection.recv()
            print(f"{name}: ready after {found[name]['ready_s']:.0f} s", flush=True)
        except EOFError:
            print(f"{name}: its process has ended with an error", flush=True)
    return found


def answer(connection: Connection, what: str, name: str) -> None:
    make_torchvision_importable()
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    step = recipe_step(what, name) if what in RECIPES else large_step(preset(what), name)
    for _ in range(6):
        step()
    sync()
    ready, peak = time.perf_counter() - begin, torch.cuda.max_memory_allocated() / 2**30
    connection.send({"ready_s": round(ready, 1), "peak_gib": round(peak, 2)})
    with contextlib.suppress(EOFError):  # the parent has what it wants
        while True:
            connection.send(clock(step, connection.recv(), sync))


def ask(connection: Connection, repeats: int) -> float:
    connection.send(repeats)
    return connection.recv()


def row_names(what: str) -> list[str]:
    if what in RECIPES:
        return [*_RECIPE_ROWS, "by hand"]
    return list(_LARGE_ROWS)


def batch_of(what: str) -> int:
    return recipe(what, random_images(what)).train.batch if what in RECIPES else BATCH


# ---- large models ---------------------------------------------------------------------------


_LARGE_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "vitrail, fp32 residual": ("vitrail", {"compiled": True, "graph": True}),
    "vitrail, bf16 residual": ("vitrail", {"compiled": True, "graph": True}),
    "timm, compiled": ("timm", {"compiled": True, "graph": False}),
    "timm, compiled and captured": ("timm", {"compiled": True, "graph": True}),
    "transformers, eager": ("transformers", {"compiled": False, "graph": False}),
}


def large_step(config: ViTConfig, name: str) -> Step:
    """The step of a row; ours in the precision, with the kernels and changes of `vitrail train`."""
    library, how = _LARGE_ROWS[name]
    images = torch.randn(BATCH, config.channels, *config.pixels, device="cuda")
    labels = torch.randint(config.classes, (BATCH,), device="cuda")
    model = PEERS[library](config)
    if not isinstance(model, ViT):
        cast = functools.partial(torch.autocast, "cuda", torch.bfloat16)
        return training_step(model, images, labels, cast, **how)
    executable = prepare(model.cuda(), TrainingExecution())
    executable.use(kernels=True, compiled=True, bf16_residual="bf16" in name)
    executable.set_mode()
    cast = choose_device("bf16").autocast
    return training_step(model, images, labels, cast, compiled=False, graph=how["graph"], run=executable)


def training_step(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    cast: Any,
    compiled: bool,
    graph: bool,
    run: Any = None,
) -> Step:
    """Forward, cross-entropy, backward and AdamW; with `graph`, a replay of them."""
    model = model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    run = run or (torch.compile(model) if compiled else model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with cast():
            loss = F.cross_entropy(run(images), labels)
        loss.backward()
        optimizer.step()

    return capture(step) if graph else step


# ---- recipes --------------------------------------------------------------------------------


_RECIPE_ROWS = {
    "plain": StepMode(compile=False, cuda_graph=False),
    "captured": StepMode(compile=False, cuda_graph=True),
    "fused kernels, captured": StepMode(compile=False, cuda_graph=True, kernels=True),
    "compiled": StepMode(compile=True, cuda_graph=False, kernels=True),
    "compiled and captured": StepMode(compile=True, cuda_graph=True, kernels=True),
}


def recipe_step(what: str, name: str) -> Step:
    """The step of a row, on random images of the data set's size."""
    data = random_images(what)
    plan = recipe(what, data)
    if name == "by hand":
        images = torch.randn(plan.train.batch, plan.model.channels, *plan.model.pixels, device="cuda")
        labels = torch.randint(plan.model.classes, (plan.train.batch,), device="cuda")
        cast = choose_device("auto").autocast
        return training_step(ViT(plan.model), images, labels, cast, compiled=True, graph=True)
    trainer = Trainer(RunPlan(data, plan, choose_device("auto")))
    trainer.use_mode(_RECIPE_ROWS[name])
    return functools.partial(trainer.take_step, endless_batches(trainer))


@functools.cache
def random_images(what: str) -> Dataset:
    """As many images of the same size as the recipe's data set has."""
    count, side, channels = RECIPES[what]
    rng = np.random.default_rng(0)

    def split(count: int) -> Split:
        images = rng.integers(0, 256, (count, side, side, channels), dtype=np.uint8)
        return Split(rng.integers(0, 10, count), [str(i) for i in range(count)], images=images)

    return Dataset(what, [str(i) for i in range(10)], train=split(count), val=split(100))


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
