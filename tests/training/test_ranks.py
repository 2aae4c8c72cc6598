"""Two processes (gloo, torchrun) against one: the same loss, the same evaluation, and exact resume."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.support.shard_files import shard_folder
from tests.support.tiny_runs import (
    PLAIN,
    RARE,
    SETTINGS,
    STOPS,
    WEIGHTED,
    fingerprints,
    partial_and_distilled,
    partial_files,
    results,
    rows,
    train,
    without_dropout,
    write_arrays,
    write_folder,
)
from tests.support.tiny_runs import __file__ as program

pytestmark = pytest.mark.slow  # two minutes of two processes

TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of two processes, in one start of torchrun, beside runs of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    write_arrays(folder / "data.npz")
    write_arrays(folder / "rare.npz", cycle=RARE)
    write_arrays(folder / "many.npz", held_out=300)  # batches of 128: two for one process, one for the other
    write_arrays(folder / "few.npz", held_out=20)  # one batch: none for the second process
    write_folder(folder / "images")
    (folder / "images" / "bee" / "05.png").write_bytes(b"no image")
    (folder / "images" / "cat" / "08.jpg").write_bytes(b"\xff\xd8\xff")
    shard_folder(folder / "images", folder / "tars" / "images")
    for name in ("many", "few"):
        train(folder / f"{name}.npz", out=folder / f"alone-{name}", **without_dropout(epochs=1))
        again = shutil.copytree(folder / f"alone-{name}", folder / f"again-{name}")
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
def test_the_number_of_workers_changes_nothing(runs, kind):
    assert fingerprints(runs / f"{kind}-0") == fingerprints(runs / f"{kind}-2")


@pytest.mark.parametrize(("kind", "at"), STOPS)
def test_two_interrupted_processes_end_with_the_same_bits(runs, kind, at):
    """At step 7 the signal reaches only the second process; both stop after step 8. The sums of both are restored."""
    assert fingerprints(runs / f"{kind}-at-{at}") == fingerprints(runs / f"{kind}-2")
    assert not partial_files(runs)


def test_two_processes_on_shards_end_with_the_bits_of_the_folder(runs):
    """Interrupted and resumed; the unreadable images, whose reasons name their shard, are the same ones."""
    shards, folder = fingerprints(runs / "shards"), fingerprints(runs / "folder-2")
    assert {name: shards[name] for name in shards if name != "state.json"} == {
        name: folder[name] for name in folder if name != "state.json"
    }


def assert_close(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["val_loss"] == pytest.approx(b["val_loss"], rel=1e-5)
        assert {k: a[k] for k in ("step", "lr", "skipped_steps", "val_images")} == {
            k: b[k] for k in ("step", "lr", "skipped_steps", "val_images")
        }


def test_two_processes_have_the_loss_of_one(runs, tmp_path):
    """With mixing and accumulation, and with neither; both with dropout."""
    train(runs / "data.npz", out=tmp_path / "mixed", **SETTINGS)
    assert_close(rows(runs / "arrays-0"), rows(tmp_path / "mixed"))
    train(runs / "data.npz", out=tmp_path / "plain", **{**SETTINGS, **PLAIN})
    assert_close(rows(runs / "plain"), rows(tmp_path / "plain"))
    assert rows(tmp_path / "plain")[0]["loss"] != pytest.approx(rows(tmp_path / "mixed")[0]["loss"], rel=1e-4)


def test_two_processes_have_the_weighted_loss_of_one(runs, tmp_path):
    """Whose images differ in the sum of their class weights."""
    train(runs / "rare.npz", out=tmp_path / "one", **WEIGHTED)
    assert_close(rows(runs / "weighted"), rows(tmp_path / "one"))
    train(runs / "rare.npz", out=tmp_path / "equal", **{**WEIGHTED, "class_weights": "none"})
    assert rows(tmp_path / "equal")[0]["loss"] != pytest.approx(rows(tmp_path / "one")[0]["loss"], rel=1e-2)


@pytest.mark.parametrize("name", ["lora", "head", "taught"])
def test_two_processes_fine_tune_and_distill_as_one(runs, name, tmp_path):
    train(runs / "data.npz", out=tmp_path / name, **partial_and_distilled(runs)[name])
    assert_close(rows(runs / name), rows(tmp_path / name))
    assert fingerprints(runs / f"{name}-stopped") == fingerprints(runs / name)


def test_only_one_process_writes_the_log(runs):
    text = (runs / "arrays-0" / "log.txt").read_text()
    assert [text.count(words) for words in ("Computing on", " epoch   1 ", " steps: ")] == [1, 1, 1]


@pytest.mark.parametrize("name", ["many", "few"])
def test_two_processes_evaluate_to_the_last_digit_as_one(runs, name):
    one, two = results(runs / f"alone-{name}")[-1], results(runs / f"again-{name}")[-1]
    assert one == two
    assert one["val_images"] == {"many": 300, "few": 20}[name]


def test_corrupt_files_of_both_processes_are_counted(runs):
    alone = runs / "alone-images"
    train(runs / "images", out=alone, corrupt="skip", **SETTINGS)
    two, one = (
        [(r["corrupt_files"], r["val_images"]) for r in rows(out)] for out in (runs / "folder-2", alone)
    )
    assert two == one
    assert two[-1][0] >= 1


def test_stopped_by_the_terminal_and_resumed(runs, tmp_path):
    """Ctrl-C and SLURM signal every process, and torchrun passes the signal on as well."""
    out = tmp_path / "run"
    options = [f"--set={p}.{k}={v}" for p in ("model", "augment", "mixing") for k, v in SETTINGS[p].items()]
    start = [*TWO, "-m", "vitrail", "train", runs / "data.npz", "--out", out, "--epochs=2000", *options]
    output, took = stopped([*start, "--batch=16"], out / "metrics.jsonl")
    stop = [line for line in output.splitlines() if line.startswith("Stopped at step")]
    assert len(stop) == 1, output
    step = stop[0].split()[3]
    assert (out / "checkpoints" / f"step-{int(step.replace(',', '')):08d}").is_dir()
    assert took < 20
    assert not partial_files(out)
    (out / "metrics.jsonl").unlink()  # the checkpoint has its rows, too
    output, _ = stopped([*start, "--batch=16", "--resume"], out / "metrics.jsonl")
    assert f"Resuming at step {step} of 10,000." in output
    assert len(output.split("Stopped at step")) == 2
    assert [row["epoch"] for row in rows(out)] == list(range(1, len(rows(out)) + 1))


def stopped(command, file, limit=90):
    """Start a command, wait for a file, stop all its processes; return the output and how long stopping took."""
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
        output, _ = child.communicate(timeout=limit)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    return output, time.monotonic() - sent
