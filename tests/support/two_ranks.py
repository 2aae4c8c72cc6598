"""One of two processes of a gloo group: `two_ranks.py WHAT FOLDER RANK PORT`, started by test_stop_together.py."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiny_runs import PLAIN, SETTINGS, Signals, train
from vitrail.training.parallel import SharedSignal, init_process_group
from vitrail.training.signals import Interrupted
from vitrail.training.trainer import Trainer

# 20 steps in an epoch
STEPS = {**SETTINGS, **PLAIN, "batch": 4, "workers": 0}


class Waits(TorchDispatchMode):
    """Counts by step what makes a process wait: values read from tensors, and collectives."""

    def __init__(self):
        super().__init__()
        self.trainer, self.steps, self.all_reduce = None, {}, dist.all_reduce

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.add("read")
        return func(*args, **(kwargs or {}))

    def reduce(self, tensor, *args, **kwargs):
        self.add("background" if kwargs.get("async_op") else "blocking")
        return self.all_reduce(tensor, *args, **kwargs)

    def add(self, what):
        step = self.steps.setdefault(self.trainer.step, {})
        step[what] = step.get(what, 0) + 1

    def __call__(self, run):
        def counted(trainer, *args, **kwargs):
            self.trainer, dist.all_reduce = trainer, self.reduce
            try:
                with self:
                    run(trainer, *args, **kwargs)
            finally:
                dist.all_reduce = self.all_reduce

        return counted


def stopped_run(folder, rank):
    """A run of which one process gets a signal after step 7: where it stops, and what each step waits for."""
    waits = Waits()
    Trainer.run = waits(Trainer.run)
    try:
        with Signals(7 if rank == 1 else None):
            train(folder / "data.npz", out=folder / "run", **STEPS)
    except Interrupted as stop:
        return {"signal": stop.signal, "step": waits.trainer.step, "waits": waits.steps}


def group_for_gpus(folder, rank):
    """A group of the caller's that cannot exchange a CPU's tensors."""
    dist.init_process_group("cuda:gloo")
    ranks = init_process_group()
    shared = SharedSignal(ranks)
    signals = [shared.exchange(number) for number in (0, signal.SIGTERM if rank == 1 else 0, 0)]
    return {"signals": signals, "any": ranks.any(rank == 1), "sum": int(ranks.sum(torch.tensor(rank + 1)))}


if __name__ == "__main__":
    what, folder, rank, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    found = {"run": stopped_run, "gpus": group_for_gpus}[what](folder, rank)
    (folder / f"{what}-{rank}.json").write_text(json.dumps(found))
    if what == "run":
        dist.barrier()
    dist.destroy_process_group()
