"""Two processes (gloo, torchrun) are one run: the same loss, the same judgement, and it resumes."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tiny_runs import (
    SETTINGS,
    STOPS,
    calm,
    left_over,
    one_thread,
    prints,
    rows,
    special,
    train,
    write_arrays,
    write_folder,
)
from tiny_runs import __file__ as program

__all__ = ["one_thread"]

TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Everything two processes are asked here, in one start of torchrun, beside runs of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    write_arrays(folder / "data.npz")
    write_arrays(folder / "many.npz", held_out=300)  # batches of 128: two for one process, one for the other
    write_arrays(folder / "few.npz", held_out=20)  # one batch: nothing to judge for the second process
    write_folder(folder / "pictures")
    (folder / "pictures" / "bee" / "05.png").write_bytes(b"no picture")
    (folder / "pictures" / "cat" / "08.jpg").write_bytes(b"\xff\xd8\xff")
    for name in ("many", "few"):
        train(folder / f"{name}.npz", out=folder / f"alone-{name}", **calm(epochs=1))
        again = shutil.copytree(folder / f"alone-{name}", folder / f"judged-{name}")
        (again / "last.safetensors").unlink()
        (again / "metrics.jsonl").unlink()
    done = subprocess.run(
        [*TWO, program, "two", folder],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("kind", ["arrays", "folder"])
def test_workers_change_nothing(made, kind):
    assert prints(made / f"{kind}-0") == prints(made / f"{kind}-2")


@pytest.mark.parametrize(("kind", "at"), STOPS)
def test_two_stopped_processes_end_in_the_same_bits(made, kind, at):
    """Step 7: the signal reaches only the second. Sums of both are carried on."""
    assert prints(made / f"{kind}-at-{at}") == prints(made / f"{kind}-2")
    assert not left_over(made)


def close(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["val_loss"] == pytest.approx(b["val_loss"], rel=1e-5)
        assert {k: a[k] for k in ("step", "rate", "left_out", "val_seen")} == {
            k: b[k] for k in ("step", "rate", "left_out", "val_seen")
        }


def test_the_loss_of_two_is_the_loss_of_one(made, tmp_path):
    """With mixing and accumulation, and with neither; without dropout, which each draws for itself."""
    train(made / "data.npz", out=tmp_path / "calm", **calm())
    close(rows(made / "calm"), rows(tmp_path / "calm"))
    plain = calm(mixing=dict(mixup=0.0, cutmix=0.0), accumulate=1)
    train(made / "data.npz", out=tmp_path / "plain", **plain)
    close(rows(made / "plain"), rows(tmp_path / "plain"))
    assert rows(tmp_path / "plain")[0]["loss"] != pytest.approx(rows(tmp_path / "calm")[0]["loss"], rel=1e-4)


@pytest.mark.parametrize("name", ["lora", "head", "taught"])
def test_two_tune_and_are_taught_as_one(made, name, tmp_path):
    train(made / "data.npz", out=tmp_path / name, **special(made)[name])
    close(rows(made / name), rows(tmp_path / name))
    assert prints(made / f"{name}-stopped") == prints(made / name)


def test_one_of_two_writes_the_log(made):
    text = (made / "calm" / "log.txt").read_text()
    assert [text.count(words) for words in ("Computing on", " epoch    1 ", " steps: ")] == [1, 1, 1]


@pytest.mark.parametrize("name", ["many", "few"])
def test_two_judge_to_the_last_digit_as_one(made, name):
    one, two = rows(made / f"alone-{name}")[-1], rows(made / f"judged-{name}")[-1]
    assert one == two
    assert one["val_seen"] == {"many": 300, "few": 20}[name]


def test_corrupt_files_of_both_are_counted(made):
    """Whichever process met them."""
    alone = made / "alone-pictures"
    train(made / "pictures", out=alone, corrupt="skip", **SETTINGS)
    two, one = ([(r["corrupt"], r["val_seen"]) for r in rows(out)] for out in (made / "folder-2", alone))
    assert two == one
    assert two[-1][0] >= 1


def test_stopped_by_the_terminal_and_gone_on_with(made, tmp_path):
    """Ctrl-C and SLURM signal every process, and torchrun passes the signal on besides."""
    out = tmp_path / "run"
    given = [f"--set={p}.{k}={v}" for p in ("model", "augment", "mixing") for k, v in SETTINGS[p].items()]
    start = [*TWO, "-m", "vitrail", "train", made / "data.npz", "--out", out, "--epochs=2000", *given]
    said, took = stopped([*start, "--batch=16"], out / "metrics.jsonl")
    stop = [line for line in said.splitlines() if line.startswith("Stopped at step")]
    assert len(stop) == 1, said
    step = stop[0].split()[3]
    assert (out / "checkpoints" / f"step-{int(step.replace(',', '')):08d}").is_dir()
    assert took < 20
    assert not left_over(out)
    (out / "metrics.jsonl").unlink()  # the checkpoint has its rows too
    said, _ = stopped([*start, "--batch=16", "--resume"], out / "metrics.jsonl")
    assert f"Going on at step {step} of 10,000." in said
    assert len(said.split("Stopped at step")) == 2
    assert [row["epoch"] for row in rows(out)] == list(range(1, len(rows(out)) + 1))


def stopped(command, file, limit=90):
    """Start it, wait for a file, stop it and all its children; what it said, and how long stopping took."""
    child = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + limit
        while not file.exists():
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < end, "it took too long"
            time.sleep(0.02)
        sent = time.monotonic()
        os.killpg(child.pid, signal.SIGTERM)
        said, _ = child.communicate(timeout=limit)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    return said, time.monotonic() - sent
