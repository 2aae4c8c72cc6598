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
from safetensors.torch import load_file

import vitrail as vt
from tests.support.sharded_runs import (
    ALL_RANDOM,
    MODES,
    RESUMED,
    TO_COMPILE,
    OneBadLoss,
    recorded,
    run_variant,
    variants,
)
from tests.support.tiny_runs import Signals, fingerprints, partial_files, rows, train, write_arrays
from vitrail.training import checkpoint
from vitrail.training.sharded_checkpoint import read_shards
from vitrail.training.trainer import Interrupted
from vitrail.views.run_page import row_score

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
    recorded(folder, "one", **ALL_RANDOM)
    for name, settings in variants(folder).items():
        run_variant(folder, folder / f"{name}-one", name, settings, 0)
    with Signals(7), pytest.raises(Interrupted):
        train(folder / "data.npz", out=folder / "alone-to-two", **ALL_RANDOM)
    processes(4, "four", folder)
    processes(2, "two", folder)
    processes(4, "four-again", folder)
    return folder


def losses(out, column="loss"):
    return [row[column] for row in rows(out)]


def best_weights(out):
    """The weights of best.safetensors: an EMA. Those of the biases of k are apart: their gradient is zero but for
    rounding, which AdamW makes as large as any other, and they change no output."""
    weights = vt.load(out / "best.safetensors").model.state_dict()
    biases = [name for name in weights if name.endswith("qkv.bias")]
    of_k = {name: weights[name].view(3, -1)[1].clone() for name in biases}
    for name in biases:
        weights[name].view(3, -1)[1] = 0
    return weights, of_k


def largest_difference(some, others):
    assert some.keys() == others.keys()
    return max((weight - others[name]).abs().max().item() for name, weight in some.items())


WHOLE_RUNS = [*(f"{mode}-4" for mode in MODES), "fsdp-2"]


@pytest.mark.parametrize("run", WHOLE_RUNS)
def test_the_mode_is_the_one_asked_for(runs, run):
    mode, count = run.split("-")
    resolved = json.loads((runs / run / "config.json").read_text())["resolved"]
    assert (resolved["parallel"], resolved["processes"]) == (mode, int(count))
    shared = {"ddp": f"{count} copies of the model", "fsdp": f"{count} shards", "hsdp": "2 x 2 shards"}[mode]
    assert f"parallel: {mode}, as requested; {shared}\n" in (runs / run / "log.txt").read_text()


@pytest.mark.parametrize("run", WHOLE_RUNS)
def test_every_step_has_the_loss_and_the_gradient_norm_of_one_process(runs, run):
    one, found = (json.loads((runs / f"{name}.steps.json").read_text()) for name in ("one", run))
    assert [*found] == [*one] == [str(step) for step in range(1, 21)]
    for step, values in one.items():
        assert found[step]["loss"] == pytest.approx(values["loss"], rel=1e-6)
        assert found[step]["norm"] == pytest.approx(values["norm"], rel=1e-6)


@pytest.mark.parametrize("run", WHOLE_RUNS)
def test_the_ema_and_its_loss_are_those_of_one_process(runs, run):
    """The EMA takes no part in training: only what is evaluated shows it."""
    assert losses(runs / run, "val_loss") == pytest.approx(losses(runs / "one", "val_loss"), rel=1e-6)
    (found, of_k), (one, one_of_k) = best_weights(runs / run), best_weights(runs / "one")
    assert largest_difference(found, one) < 2e-6
    assert largest_difference(of_k, one_of_k) < 1e-3  # rounding that AdamW enlarges


@pytest.mark.parametrize("mode", ["fsdp", "hsdp"])
def test_the_ema_of_sgd_is_that_of_one_process(runs, mode):
    """Which does not divide by the size of a gradient, so that all weights can be compared."""
    found, one = (
        vt.load(runs / f"clipped-{of}" / "best.safetensors").model.state_dict() for of in (mode, "one")
    )
    assert largest_difference(found, one) < 1e-7


@pytest.mark.parametrize("run", WHOLE_RUNS)
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


@pytest.mark.parametrize("name", RESUMED)
def test_interrupted_fine_tuning_distillation_and_muon_end_with_the_same_bits(runs, name):
    """In shards of two processes; the distilled one computes a block again for the gradient."""
    assert fingerprints(runs / f"{name}-stopped") == fingerprints(runs / f"{name}-fsdp")
    assert "Resuming at step 8 of 10." in (runs / f"{name}-stopped" / "log.txt").read_text()


@pytest.mark.parametrize("name", ["lora", "head"])
def test_frozen_weights_in_shards_keep_their_bits(runs, name):
    start = load_file(runs / f"{name}-start.safetensors")
    found = {"model": {key.partition("/")[2]: torch.zeros_like(weight) for key, weight in start.items()}}
    read_shards(checkpoint.list_checkpoints(runs / f"{name}-fsdp" / "checkpoints")[0], found)
    same = {key: torch.equal(found["model"][key.partition("/")[2]], weight) for key, weight in start.items()}
    assert same == {key: key.startswith("frozen/") for key in start}
    assert 0 < sum(same.values()) < len(same)


@pytest.mark.parametrize(
    "to",
    ["to-one", "to-two-fsdp", "to-two-ddp", "alone-to-two", "four-ddp-to-two-fsdp", "two-to-four-to-one"],
)
def test_a_run_goes_on_with_another_number_of_processes_or_mode(runs, to):
    """Stopped in its second epoch by four processes with shards or with copies, or by one; or by two in the second,
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
