"""Runs that take half a second, and what to compare of two of them. Started as a program, it is the
child that a test stops, kills, or has two of."""

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

from vitrail.recipes.start import train as train_and_report
from vitrail.training import checkpoint, keeper
from vitrail.training.listen import Silent
from vitrail.training.loop import Stopped, Trainer

train = partial(train_and_report, report=False)  # the page of such a run takes longer than the run

# Everything on that draws on chance or remembers something.
SETTINGS = dict(
    epochs=3,
    batch=16,
    accumulate=2,
    ema=0.9,
    lr=3e-3,
    smoothing=0.1,
    augment=dict(crop=0.5, flip=0.5, turn=10, brightness=0.2, erase=0.3),
    mixing=dict(mixup=0.3, cutmix=1.0, share=0.7),
    model=dict(
        width=16, depth=2, heads=2, patch=4, size=8, dropout=0.1, attention_dropout=0.1, drop_path=0.2
    ),
)


# Where two processes are stopped: at the first step, within an epoch, at its end, and after it.
STOPS = [("arrays", at) for at in (1, 7, 10, "judge", "save")] + [("folder", at) for at in (7, "judge")]


def calm(**more):
    """The same without dropout, which is a matter of each process."""
    model = dict(width=16, depth=2, heads=2, patch=4, size=8, dropout=0.0, drop_path=0.0)
    return {**SETTINGS, "model": model, **more}


def special(folder):
    """Runs in which less than everything learns, or from a teacher, without dropout."""
    teacher = folder / "alone-many" / "last.safetensors"
    return {
        "lora": calm(epochs=2, tune="lora", lora_rank=2),
        "head": calm(epochs=2, tune="head"),
        "taught": calm(epochs=2, teacher=teacher, distill="soft"),
    }


def write_arrays(file, count=80, held_out=30):
    """Pictures of three classes that can be told apart: a bright bar at one of three heights."""
    chance = np.random.default_rng(0)

    def some(count):
        labels = np.arange(count) % 3
        pictures = chance.integers(0, 120, (count, 8, 8), dtype=np.uint8)
        for picture, label in zip(pictures, labels, strict=True):
            picture[2 * label + 1 : 2 * label + 3] += 120
        return pictures, labels

    (x, y), (a, b) = some(count), some(held_out)
    np.savez(file, x_train=x, y_train=y, x_val=a, y_val=b)
    return file


def write_folder(folder, each=22):
    """JPEG and PNG files in three classes, of several sizes and modes."""
    chance = np.random.default_rng(1)
    for number, name in enumerate(("ant", "bee", "cat")):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            shape = (20 + 3 * (i % 4), 24) if i % 5 == 0 else (20 + 3 * (i % 4), 24, 3)
            picture = chance.integers(0, 120, shape, dtype=np.uint8)
            picture[6 * number : 6 * number + 6] += 120
            Image.fromarray(picture).save(folder / name / f"{i:02d}.{'png' if i % 2 else 'jpg'}")
    return folder


def prints(out):
    """What must be the same to the bit: metrics, weights, and all of the last checkpoint."""
    last = checkpoint.complete(out / "checkpoints")[0]
    files = [out / name for name in ("metrics.jsonl", "last.safetensors", "best.safetensors")]
    files += [file for file in sorted(last.iterdir()) if file.name != "manifest.json"]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def everything(folder, but=()):
    """Each file below a folder, but for some names, and what is in it."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in but
    }


def left_over(folder):
    return [p.name for p in folder.rglob("*") if ".part" in p.name or "tmp" in p.name]


class Notes(Silent):
    def __init__(self):
        self.notes, self.rows = [], []

    def note(self, text):
        self.notes.append(text)

    def epoch(self, metrics):
        self.rows.append(dict(metrics))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Bits are compared on one thread, as the children have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Signals:
    """Sends this process a signal after some step, while an epoch is judged, or when it is to be saved."""

    def __init__(self, at, number=signal.SIGTERM, times=1):
        self.at, self.number, self.times = at, number, times

    def __enter__(self):
        self.take_step, self.save, self.outputs_of = Trainer.take_step, Trainer.save, keeper.outputs_of

        def take_step(trainer, parts):
            self.take_step(trainer, parts)
            if trainer.step == self.at:
                self.send()

        def outputs_of(*args, **kwargs):
            if self.at == "judge":
                self.send()
            return self.outputs_of(*args, **kwargs)

        def save(trainer):
            if self.at == "save":
                self.send()
            self.save(trainer)

        Trainer.take_step, Trainer.save, keeper.outputs_of = take_step, save, outputs_of

    def send(self):
        self.at = None
        for _ in range(self.times):
            os.kill(os.getpid(), self.number)

    def __exit__(self, *_):
        Trainer.take_step, Trainer.save, keeper.outputs_of = self.take_step, self.save, self.outputs_of


def stopped_and_resumed(data, out, at, *, resumes=None, **settings):
    """A run that is stopped once and gone on with."""
    with Signals(at), pytest.raises(Stopped) as stop:
        train(data, out=out, **settings)
    assert stop.value.signal == signal.SIGTERM
    return train(data, out=out, resume=True, **{**settings, **(resumes or {})})


# ---- as a program -----------------------------------------------------------------------------


def forked(work):
    """Do some work in a fork of this process; its number."""
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
    """Start a run of 60 steps, kill it at a random moment, look, go on; until it has been killed often
    enough. Every run must end in the bits of the undisturbed one."""
    import torch._dynamo  # which torch would import at the first step of every fork

    torch.set_num_threads(1)
    settings = {**SETTINGS, "epochs": 12, "keep": 2}
    data = write_arrays(folder / "data.npz")
    chance = random.Random(seed)
    written = checkpoint.save

    def work(out):
        def save(*args):
            place = written(*args)
            with (folder / "announced").open("a") as log:
                log.write(f"{place.name}\n")
            return place

        checkpoint.save = save
        train(data, out=out, resume=True, **settings)

    start = time.perf_counter()
    assert os.waitpid(forked(lambda: work(folder / "whole")), 0)[1] == 0
    longest = time.perf_counter() - start
    wanted, killed, number = prints(folder / "whole"), 0, 0
    while killed < kills:
        number, out = number + 1, folder / f"run{number}"
        (folder / "announced").write_text("")
        while True:
            child = forked(lambda out=out: work(out))
            time.sleep(chance.uniform(0.01, longest * 0.7))
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
        assert prints(out) == wanted, out
        assert not left_over(out), left_over(out)
    print(f"killed {killed} times, {number} runs, {longest:.2f} s each")


def two_processes(folder):
    """What tests/training/test_ranks.py looks at, in one start of torchrun."""
    import torch.distributed as dist

    from vitrail.training.parallel import join, leave

    torch.set_num_threads(1)
    ranks = join()
    files = {"arrays": folder / "data.npz", "folder": folder / "pictures"}
    corrupt = dict(corrupt="skip")
    for name, data in files.items():
        for workers in (0, 2):
            train(data, out=folder / f"{name}-{workers}", workers=workers, **SETTINGS, **corrupt)
    for name, at in STOPS:
        data, out = files[name], folder / f"{name}-at-{at}"
        alone = at == 7 and ranks.rank == 0  # the signal reaches one of the two
        with Signals(None if alone else at), pytest.raises(Stopped):
            train(data, out=out, workers=2, **SETTINGS, **corrupt)
        train(data, out=out, workers=0, resume=True, **SETTINGS, **corrupt)
    train(files["arrays"], out=folder / "calm", **calm())
    train(files["arrays"], out=folder / "plain", **calm(mixing=dict(mixup=0.0, cutmix=0.0), accumulate=1))
    for name, how in special(folder).items():
        train(files["arrays"], out=folder / name, **how)
        with Signals(7), pytest.raises(Stopped):
            train(files["arrays"], out=folder / f"{name}-stopped", **how)
        train(files["arrays"], out=folder / f"{name}-stopped", resume=True, **how)
    restore = Trainer.restore
    Trainer.restore = lambda trainer, saved: (restore(trainer, saved), setattr(trainer, "pending", True))
    for name in ("many", "few"):  # weights that one process has made are judged again
        train(folder / f"{name}.npz", out=folder / f"judged-{name}", resume=True, **calm(epochs=1))
    dist.barrier()
    leave()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["kill", folder, kills, seed]:
            kill_again_and_again(Path(folder), int(kills), int(seed))
        case ["two", folder]:
            two_processes(Path(folder))
