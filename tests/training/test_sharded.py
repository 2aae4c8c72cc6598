"""FSDP and HSDP (gloo, two and four processes) against DDP and one process: loss, files and resume."""

import json
import os
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

import vitrail as vt
from tests.support.sharded_runs import ALL_RANDOM, MODES, TO_COMPILE, OneBadLoss, run_variant, variants
from tests.support.tiny_runs import Signals, fingerprints, partial_files, rows, train, write_arrays
from vitrail.report.run import row_score
from vitrail.training import checkpoint
from vitrail.training.sharded_checkpoint import read_shards
from vitrail.training.trainer import Interrupted

pytestmark = pytest.mark.slow  # processes that import torch, on two cores


def processes(count, what, folder, *options):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    done = subprocess.Popen(
        [*torchrun, *options, "-m", "tests.support.sharded_runs", what, folder],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = done.communicate(timeout=300)
    finally:
        done.terminate()  # torchrun then ends its processes; killed, it would leave them
    assert done.returncode == 0, output


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of four processes, then of two that go on with theirs, beside runs of one process."""
    folder = tmp_path_factory.mktemp("sharded")
    write_arrays(folder / "data.npz")
    train(folder / "data.npz", out=folder / "teacher", **{**ALL_RANDOM, "epochs": 1})
    train(folder / "data.npz", out=folder / "one", **ALL_RANDOM)
    for name, settings in variants(folder).items():
        run_variant(folder, folder / f"{name}-one", name, settings, 0)
    with Signals(7), pytest.raises(Interrupted):
        train(folder / "data.npz", out=folder / "alone-to-two", **ALL_RANDOM)
    processes(4, "four", folder)
    processes(2, "two", folder)
    processes(4, "four-again", folder)
    return folder


def losses(out):
    return [row["loss"] for row in rows(out)]


@pytest.mark.parametrize("run", [*(f"{mode}-4" for mode in MODES), "fsdp-2"])
def test_every_way_of_sharing_has_the_loss_of_one_process(runs, run):
    """Over 20 steps with all that is random: augmentation, mixing and four kinds of dropout; with
    accumulation and EMA."""
    assert losses(runs / run) == pytest.approx(losses(runs / "one"), rel=1e-6)
    assert rows(runs / "one")[-1]["step"] == 20


@pytest.mark.parametrize("mode", ["fsdp", "hsdp"])
@pytest.mark.parametrize("name", ["clipped", "muon", "lora", "head", "taught"])
def test_shards_clip_fine_tune_and_distill_as_one_process(runs, name, mode):
    """The distilled one computes a block again for the gradient (checkpoint_blocks)."""
    assert losses(runs / f"{name}-{mode}") == pytest.approx(losses(runs / f"{name}-one"), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_on_one_process_skips_the_step_on_all(runs, mode):
    assert [row["skipped_steps"] for row in rows(runs / f"nan-{mode}")] == [0, 1]
    assert losses(runs / f"nan-{mode}") == pytest.approx(losses(runs / "nan-one"), rel=1e-6)


@pytest.mark.parametrize(("mode", "count"), [("fsdp", 2), ("hsdp", 4)])
def test_interrupted_shards_end_with_the_same_bits(runs, mode, count):
    assert fingerprints(runs / f"stopped-{mode}") == fingerprints(runs / f"{mode}-{count}")
    assert not partial_files(runs)


@pytest.mark.parametrize("to", ["to-one", "to-two-fsdp", "to-two-ddp", "alone-to-two", "two-to-four-to-one"])
def test_a_run_goes_on_with_another_number_of_processes_or_mode(runs, to):
    """Stopped in its second epoch by four processes with shards, or by one without; or by two in the second,
    and by four in the third."""
    if to.endswith("to-one"):
        train(runs / "data.npz", out=runs / to, resume=True, **ALL_RANDOM)
    assert losses(runs / to) == pytest.approx(losses(runs / "one"), rel=1e-6)
    assert [row["step"] for row in rows(runs / to)] == [5, 10, 15, 20]


def test_the_shards_of_a_checkpoint_are_the_files_of_the_weights(runs):
    """Put together from the shards of four processes, the weights and their EMA are last and best."""
    out, best = runs / "fsdp-4", max(rows(runs / "fsdp-4"), key=row_score)
    saved = {path.name: path for path in checkpoint.list_checkpoints(out / "checkpoints")}
    for part, file, step in (("model", "last", 20), ("ema", "best", best["step"])):
        shards = saved[f"step-{step:08d}"]
        assert len(list(shards.glob("shard-*.safetensors"))) == 4
        weights = vt.load(out / f"{file}.safetensors").model.state_dict()
        found = {part: {name: torch.zeros_like(weight) for name, weight in weights.items()}}
        read_shards(shards, found)
        assert all(torch.equal(found[part][name], weight) for name, weight in weights.items())


def test_a_checkpoint_without_all_shards_is_not_chosen(runs, tmp_path):
    """One is missing, one is cut short, the manifest was not written yet: the one before is used."""
    for damage in ("missing", "cut", "manifest"):
        out = shutil.copytree(runs / "fsdp-4" / "checkpoints", tmp_path / damage)
        paths = checkpoint.list_checkpoints(out)
        assert len(paths) == 2
        shard = sorted(paths[0].glob("shard-*.safetensors"))[2]
        if damage == "manifest":
            (paths[0] / "manifest.json").unlink()
        elif damage == "missing":
            shard.unlink()
        else:
            shard.write_bytes(shard.read_bytes()[:-4])
        found, warnings = checkpoint.load_newest(out)
        assert found.step == 15
        assert list(warnings) == [paths[0]]


def test_a_killed_process_comes_back_and_ends_with_the_same_bits(runs):
    """kill -9 of one of two under torchrun --max-restarts: both start again from the last checkpoint."""
    processes(2, "restarted", runs, "--max-restarts=3")
    assert fingerprints(runs / "restarted") == fingerprints(runs / "fsdp-2")
    assert not partial_files(runs / "restarted")
    log = (runs / "restarted" / "log.txt").read_text()
    assert "Resuming at step 10 of 20." in log
    ended = datetime.fromisoformat(rows(runs / "restarted")[2]["time"])  # the epoch in which it was killed
    assert -1 < ended.timestamp() - float((runs / "killed").read_text()) < 60


def test_compiled_shards_have_the_loss_of_one_process(tmp_path):
    """Blocks that are recomputed, compiled and sharded, by the C++ compiler, against none of it."""
    write_arrays(tmp_path / "data.npz")
    train(tmp_path / "data.npz", out=tmp_path / "one", **{**TO_COMPILE, "checkpoint_blocks": 0})
    processes(2, "compiled", tmp_path)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    assert json.loads((tmp_path / "compiled" / "config.json").read_text())["resolved"]["compile"] is True


def test_the_loss_of_one_bad_process_is_seen(tmp_path):
    """The helper works: without it, no step is skipped."""
    write_arrays(tmp_path / "data.npz")
    settings = {**ALL_RANDOM, "epochs": 2}
    with OneBadLoss(1):  # there is no such process
        train(tmp_path / "data.npz", out=tmp_path / "run", **settings)
    assert [row["skipped_steps"] for row in rows(tmp_path / "run")] == [0, 0]
