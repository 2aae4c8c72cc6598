"""Runs of several processes that share a model in every way. As a script, it is what torchrun starts."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.tiny_runs import SETTINGS, Signals, train
from vitrail.fast.parallelism import gather
from vitrail.training.trainer import Interrupted, Trainer

MODES = ("ddp", "fsdp", "hsdp")
RESUMED = ("muon", "lora", "head", "taught")  # variants that are also stopped and resumed in shards
STEPS = dict(epochs=4)  # of 5 steps: 20
MU = dict(
    width=32, depth=2, heads=2, mlp_width=128, patch=4, size=8
)  # big_vision's test size, with two blocks
DROPOUT = dict(dropout=0.1, attention_dropout=0.1, drop_path=0.2, patch_dropout=0.25)
ALL_RANDOM = {**SETTINGS, **STEPS, "model": {**MU, **DROPOUT}}

# A compiler draws dropout by a generator of its own, and takes long for augmentation.
TO_COMPILE = {
    **SETTINGS,
    **dict(epochs=2, accumulate=1, augment={}, mixing=dict(mixup=0.0, cutmix=0.0), checkpoint_blocks=1),
    "model": {**MU, "dropout": 0.0, "drop_path": 0.0},
}


def variants(folder):
    """Settings that must give the loss of one process in every mode."""
    teacher = folder / "teacher" / "last.safetensors"
    short = {**ALL_RANDOM, "epochs": 2}
    return {
        # AdamW would hide a wrong norm, because it divides by the size of the gradient.
        "clipped": {**short, "optimizer": "sgd", "momentum": 0.9, "lr": 0.3, "clip": 0.05},
        "muon": {**short, "optimizer": "muon"},
        "lora": {**short, "tune": "lora", "lora_rank": 2},
        "head": {**short, "tune": "head"},
        "taught": {**short, "teacher": teacher, "distill": "soft", "checkpoint_blocks": 1},
        "nan": short,
    }


class OneBadLoss:
    """The loss of the seventh step is NaN, on the last process only."""

    def __init__(self, rank):
        self.rank = rank

    def __enter__(self):
        self.loss = Trainer._loss

        def loss(trainer, batch):
            here = trainer.ranks.rank == self.rank and trainer.step == 6
            return self.loss(trainer, batch) * (float("nan") if here else 1.0)

        Trainer._loss = loss

    def __exit__(self, *_):
        Trainer._loss = self.loss


class StepRecorder:
    """Writes the loss and the gradient norm of every step, those of all processes together, to a file."""

    def __init__(self, file):
        self.file, self.steps, self.parts = file, {}, []

    def __enter__(self):
        self.loss, self.take_step, self.clip = (
            Trainer._loss,
            Trainer.take_step,
            nn.utils.clip_grads_with_norm_,
        )

        def loss(trainer, batch):
            value = self.loss(trainer, batch)
            self.parts.append(value.detach().double())
            return value

        def clip(parameters, most, norm, **how):
            self.norm = norm.item()
            self.clip(parameters, most, norm, **how)

        def take_step(trainer, batches):
            self.parts.clear()  # of the step by which the time of a run is estimated
            self.take_step(trainer, batches)
            mean = trainer.ranks.sum(torch.stack(self.parts).mean()).item() / trainer.ranks.count
            self.steps[trainer.step] = {"loss": mean, "norm": self.norm}
            if trainer.ranks.is_main:
                self.file.write_text(json.dumps(self.steps))

        Trainer._loss, Trainer.take_step, nn.utils.clip_grads_with_norm_ = loss, take_step, clip

    def __exit__(self, *_):
        Trainer._loss, Trainer.take_step, nn.utils.clip_grads_with_norm_ = (
            self.loss,
            self.take_step,
            self.clip,
        )


class StartRecorder:
    """Writes the weights with which a run starts to a file: frozen/..., and trained/..."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        self.init = Trainer.__init__

        def init(trainer, plan):
            self.init(trainer, plan)
            kinds = {name: "trained" if p.requires_grad else "frozen" for p, name in trainer.names.items()}
            weights = {f"{kinds[name]}/{name}": gather(p.detach()) for p, name in trainer.names.items()}
            if trainer.ranks.is_main:
                save_file(weights, self.file)

        Trainer.__init__ = init

    def __exit__(self, *_):
        Trainer.__init__ = self.init


def recorded(folder, name, **settings):
    """A whole run, with a file of its steps beside it."""
    with StepRecorder(folder / f"{name}.steps.json"):
        train(folder / "data.npz", out=folder / name, **settings)


def run_variant(folder, out, name, settings, rank, **more):
    if name == "nan":
        with OneBadLoss(rank):
            return train(folder / "data.npz", out=out, **settings, **more)
    return train(folder / "data.npz", out=out, **settings, **more)


def stop_and_resume(folder, mode):
    """A whole run, and one that is stopped in its second epoch and resumed."""
    data, out, count = folder / "data.npz", folder / f"stopped-{mode}", torch.distributed.get_world_size()
    recorded(folder, f"{mode}-{count}", parallel=mode, **ALL_RANDOM)
    with Signals(7), pytest.raises(Interrupted):
        train(data, out=out, parallel=mode, **ALL_RANDOM)
    train(data, out=out, resume=True, parallel=mode, **ALL_RANDOM)


def four_processes(folder):
    """The runs of four processes that tests/training/test_sharded.py checks."""
    data = folder / "data.npz"
    for mode in ("ddp", "fsdp"):
        recorded(folder, f"{mode}-4", parallel=mode, **ALL_RANDOM)
    stop_and_resume(folder, "hsdp")
    for name, settings in variants(folder).items():
        run_variant(folder, folder / f"{name}-hsdp", name, settings, 3, parallel="hsdp")
    with Signals(7), pytest.raises(Interrupted):
        train(data, out=folder / "begun", parallel="fsdp", **ALL_RANDOM)
    with Signals(7), pytest.raises(Interrupted):
        train(data, out=folder / "four-ddp-to-two-fsdp", parallel="ddp", **ALL_RANDOM)
    if torch.distributed.get_rank() == 0:
        for name in ("to-one", "to-two-fsdp", "to-two-ddp"):
            shutil.copytree(folder / "begun", folder / name)


def two_processes(folder):
    """The runs of two: some have been begun by four, and one by a single process, without shards."""
    data = folder / "data.npz"
    stop_and_resume(folder, "fsdp")
    for name, settings in variants(folder).items():
        with StartRecorder(folder / f"{name}-start.safetensors"):
            run_variant(folder, folder / f"{name}-fsdp", name, settings, 1, parallel="fsdp")
    for name in RESUMED:
        how = {**variants(folder)[name], "out": folder / f"{name}-stopped", "parallel": "fsdp"}
        with Signals(7), pytest.raises(Interrupted):
            train(data, **how)
        train(data, resume=True, **how)
    run_variant(folder, folder / "nan-ddp", "nan", variants(folder)["nan"], 1, parallel="ddp")
    for mode in ("fsdp", "ddp"):
        train(data, out=folder / f"to-two-{mode}", resume=True, parallel=mode, **ALL_RANDOM)
    for name in ("alone-to-two", "four-ddp-to-two-fsdp"):
        train(data, out=folder / name, resume=True, parallel="fsdp", **ALL_RANDOM)
    with Signals(7), pytest.raises(Interrupted):
        train(data, out=folder / "two-to-four-to-one", parallel="fsdp", **ALL_RANDOM)


def four_again(folder):
    """A run that two processes have begun; it is stopped a second time."""
    out = folder / "two-to-four-to-one"
    with Signals(12), pytest.raises(Interrupted):
        train(folder / "data.npz", out=out, resume=True, parallel="hsdp", **ALL_RANDOM)


def restarted(folder):
    """The whole run of two processes again; in the first attempt, the second one is killed at step 12."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and torch.distributed.get_rank() == 1:
        take_step = Trainer.take_step

        def killed(trainer, batches):
            take_step(trainer, batches)
            if trainer.step == 12:
                (folder / "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        Trainer.take_step = killed
    train(folder / "data.npz", out=folder / "restarted", resume=True, parallel="fsdp", **ALL_RANDOM)


def compiled(folder):
    """Two blocks, compiled and sharded; the first is also computed again for the gradient."""
    train(folder / "data.npz", out=folder / "compiled", parallel="fsdp", compile=True, **TO_COMPILE)


if __name__ == "__main__":
    from vitrail.training.parallel import destroy_process_group, init_process_group

    torch.set_num_threads(1)
    init_process_group()
    works = {"four": four_processes, "two": two_processes, "four-again": four_again}
    works |= {"restarted": restarted, "compiled": compiled}
    works[sys.argv[1]](Path(sys.argv[2]))
    torch.distributed.barrier()
    destroy_process_group()
