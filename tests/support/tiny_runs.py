"""Tiny training runs of half a second, and helpers to compare two of them. Run as a script, this file is the
child process that a test interrupts, kills, or runs on two ranks."""

import hashlib
import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from vitrail.training import checkpoint, epoch
from vitrail.training.callbacks import NullCallback
from vitrail.training.checkpoint import CheckpointManager
from vitrail.training.clock import TIME_COLUMNS
from vitrail.training.session import TrainingSession
from vitrail.training.start import train as train_and_report
from vitrail.training.trainer import Interrupted, Trainer

train = partial(train_and_report, report=False, verbose=False)  # the report takes longer than the run

# Everything that is random or has state is switched on.
SETTINGS = dict(
    epochs=3,
    batch=16,
    accumulate=2,
    ema=0.9,
    lr=3e-3,
    smoothing=0.1,
    augment=dict(crop=0.5, flip=0.5, rotate=10, brightness=0.2, erase=0.3),
    mixing=dict(mixup=0.3, cutmix=1.0, probability=0.7),
    model=dict(
        width=16, depth=2, heads=2, patch=4, size=8, dropout=0.1, attention_dropout=0.1, drop_path=0.2
    ),
)


PLAIN = dict(mixing=dict(mixup=0.0, cutmix=0.0), accumulate=1)

# AdamW would hide a wrong size of the gradient.
WEIGHTED = {**SETTINGS, "class_weights": "balanced", "optimizer": "sgd", "momentum": 0.9, "lr": 0.1}

# Where two processes are interrupted: at the first step, within an epoch, at its end, and after it.
STOPS = [("arrays", at) for at in (1, 7, 10, "evaluate", "save")] + [("folder", at) for at in (7, "evaluate")]


def without_dropout(**more):
    """SETTINGS without dropout, whose masks depend on how a batch is split into micro-batches."""
    model = dict(width=16, depth=2, heads=2, patch=4, size=8, dropout=0.0, drop_path=0.0)
    return {**SETTINGS, "model": model, **more}


def partial_and_distilled(folder):
    """Settings of runs that train only some parameters, or distill from a teacher."""
    teacher = folder / "alone-many" / "last.safetensors"
    return {
        "lora": {**SETTINGS, "epochs": 2, "tune": "lora", "lora_rank": 2},
        "head": {**SETTINGS, "epochs": 2, "tune": "head"},
        "taught": {**SETTINGS, "epochs": 2, "teacher": teacher, "distill": "soft"},
    }


RARE = (0, 0, 0, 1, 0, 0, 0, 0, 2, 0)  # labels of a frequent class and of two rare ones


def write_arrays(file, count=80, held_out=30, cycle=(0, 1, 2)):
    """An .npz file of three separable classes, whose labels repeat a cycle: a bright bar at one of three heights."""
    rng = np.random.default_rng(0)

    def some(count):
        labels = np.resize(cycle, count)
        images = rng.integers(0, 120, (count, 8, 8), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 1 : 2 * label + 3] += 120
        return images, labels

    (x, y), (a, b) = some(count), some(held_out)
    np.savez(file, x_train=x, y_train=y, x_val=a, y_val=b)
    return file


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The path of a small data set of arrays, with a validation set."""
    return write_arrays(tmp_path_factory.mktemp("data") / "data.npz")


def write_folder(folder, each=22):
    """JPEG and PNG files in three classes, of several sizes and modes."""
    rng = np.random.default_rng(1)
    for number, name in enumerate(("ant", "bee", "cat")):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            shape = (20 + 3 * (i % 4), 24) if i % 5 == 0 else (20 + 3 * (i % 4), 24, 3)
            image = rng.integers(0, 120, shape, dtype=np.uint8)
            image[6 * number : 6 * number + 6] += 120
            Image.fromarray(image).save(folder / name / f"{i:02d}.{'png' if i % 2 else 'jpg'}")
    return folder


def fingerprints(out):
    """Hashes of what must be bit-equal: metrics, weights, and everything in the last checkpoint."""
    last = checkpoint.list_checkpoints(out / "checkpoints")[0]
    state = json.loads((last / "state.json").read_text())
    state["history"] = [without_time(row) for row in state["history"]]
    del state["seconds"]
    files = [out / name for name in ("last.safetensors", "best.safetensors")]
    files += [file for file in sorted(last.iterdir()) if file.suffix != ".json"]
    hashes = {file.name: _hash(file) for file in files}
    return {"metrics.jsonl": json.dumps(results(out)), "state.json": json.dumps(state), **hashes}


def _hash(file):
    """The hash of a file; of a shard that of its tensors, because torch writes them in any order."""
    if not file.name.startswith("shard-"):
        return hashlib.sha256(file.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def without_time(row):
    """A row of metrics without the columns that depend on the clock."""
    return {name: value for name, value in row.items() if name not in TIME_COLUMNS}


def results(out):
    """The rows of metrics.jsonl as far as they are a function of the settings."""
    return [without_time(row) for row in rows(out)]


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def file_hashes(folder, but=()):
    """The hash of every file below a folder, except for some names."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in but
    }


def partial_files(folder):
    """Temporary files below a folder."""
    return [p.name for p in folder.rglob("*") if ".part" in p.name or "tmp" in p.name]


class RecordingCallback(NullCallback):
    """A callback that records messages and metrics."""

    def __init__(self):
        self.notes, self.rows = [], []

    def on_message(self, text):
        self.notes.append(text)

    def on_epoch(self, metrics):
        self.rows.append(dict(metrics))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Bits are compared on one thread, as in the child processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Signals:
    """Sends this process a signal after a step, during evaluation, or before a checkpoint is saved."""

    def __init__(self, at, number=signal.SIGTERM, times=1):
        self.at, self.number, self.times = at, number, times

    def __enter__(self):
        self.take_step, self.save, self.run_model = Trainer.take_step, CheckpointManager.save, epoch.run_model

        def take_step(trainer, batches):
            self.take_step(trainer, batches)
            if trainer.step == self.at:
                self.send()

        def run_model(*args, **kwargs):
            if self.at == "evaluate":
                self.send()
            return self.run_model(*args, **kwargs)

        def save(manager, state):
            if self.at == "save":
                self.send()
            self.save(manager, state)

        Trainer.take_step, CheckpointManager.save, epoch.run_model = take_step, save, run_model

    def send(self):
        self.at = None
        for _ in range(self.times):
            os.kill(os.getpid(), self.number)

    def __exit__(self, *_):
        Trainer.take_step, CheckpointManager.save = self.take_step, self.save
        epoch.run_model = self.run_model


def stopped_and_resumed(data, out, at, *, resumes=None, **settings):
    """A run that is interrupted once and resumed."""
    with Signals(at), pytest.raises(Interrupted) as stop:
        train(data, out=out, **settings)
    assert stop.value.signal == signal.SIGTERM
    return train(data, out=out, resume=True, **{**settings, **(resumes or {})})


# ---- as a script ------------------------------------------------------------------------------


def forked(work):
    """Do some work in a fork of this process; return its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def kill_again_and_again(folder, kills, seed):
    """Start a run of 60 steps, kill it at a random moment, check its checkpoints and resume, until it has been
    killed often enough. Every run must end with the bits of the uninterrupted one."""
    import torch._dynamo  # which torch would import at the first step of every fork

    torch.set_num_threads(1)
    settings = {**SETTINGS, "epochs": 12, "keep": 2}
    data = write_arrays(folder / "data.npz")
    rng = random.Random(seed)
    real_save = checkpoint.save_checkpoint

    def work(out):
        def save(*args):
            path = real_save(*args)
            with (folder / "announced").open("a") as log:
                log.write(f"{path.name}\n")
            return path

        checkpoint.save_checkpoint = save
        train(data, out=out, resume=True, **settings)

    start = time.perf_counter()
    assert os.waitpid(forked(lambda: work(folder / "whole")), 0)[1] == 0
    longest = time.perf_counter() - start
    expected, killed, number = fingerprints(folder / "whole"), 0, 0
    while killed < kills:
        number, out = number + 1, folder / f"run{number}"
        (folder / "announced").write_text("")
        while True:
            child = forked(lambda out=out: work(out))
            time.sleep(rng.uniform(0.01, longest * 0.7))
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0, "the run ended by itself, with an error"
                break
            killed += 1
            announced = (folder / "announced").read_text().split()
            newest, _ = checkpoint.load_newest(out / "checkpoints")
            assert not announced or newest is not None
            assert not announced or newest.step >= int(announced[-1][5:13])
        assert fingerprints(out) == expected, out
        assert not partial_files(out), partial_files(out)
    print(f"killed {killed} times, {number} runs, {longest:.2f} s each")


def two_processes(folder):
    """All runs that tests/training/test_ranks.py checks, in one start of torchrun."""
    import torch.distributed as dist

    from vitrail.training.parallel import destroy_process_group, init_process_group

    torch.set_num_threads(1)
    ranks = init_process_group()
    files = {"arrays": folder / "data.npz", "folder": folder / "images"}
    corrupt = dict(corrupt="skip")
    for name, data in files.items():
        for workers in (0, 2):
            train(data, out=folder / f"{name}-{workers}", workers=workers, **SETTINGS, **corrupt)
    for name, at in STOPS:
        data, out = files[name], folder / f"{name}-at-{at}"
        spared = at == 7 and ranks.rank == 0  # the signal reaches only one of the two
        with Signals(None if spared else at), pytest.raises(Interrupted):
            train(data, out=out, workers=2, **SETTINGS, **corrupt)
        train(data, out=out, workers=0, resume=True, **SETTINGS, **corrupt)
    with Signals(7), pytest.raises(Interrupted):  # shards without an index, which both processes write
        train(folder / "tars" / "images", out=folder / "shards", workers=0, **SETTINGS, **corrupt)
    train(folder / "tars" / "images", out=folder / "shards", workers=2, resume=True, **SETTINGS, **corrupt)
    train(files["arrays"], out=folder / "plain", **{**SETTINGS, **PLAIN})
    train(folder / "rare.npz", out=folder / "weighted", **WEIGHTED)
    for name, how in partial_and_distilled(folder).items():
        train(files["arrays"], out=folder / name, **how)
        with Signals(7), pytest.raises(Interrupted):
            train(files["arrays"], out=folder / f"{name}-stopped", **how)
        train(files["arrays"], out=folder / f"{name}-stopped", resume=True, **how)
    resume = TrainingSession.resume
    TrainingSession.resume = lambda session: (resume(session), setattr(session, "pending", True))
    for name in ("many", "few"):  # weights trained by one process are evaluated again
        train(folder / f"{name}.npz", out=folder / f"again-{name}", resume=True, **without_dropout(epochs=1))
    dist.barrier()
    destroy_process_group()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["kill", folder, kills, seed]:
            kill_again_and_again(Path(folder), int(kills), int(seed))
        case ["two", folder]:
            two_processes(Path(folder))
