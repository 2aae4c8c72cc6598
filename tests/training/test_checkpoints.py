"""Checkpoints: complete or ignored, how many are kept, and what a full disk does to them."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    Signals,
    file_hashes,
    fingerprints,
    partial_files,
    train,
)
from vitrail.base.errors import FileError
from vitrail.training import checkpoint as files
from vitrail.training.trainer import Interrupted


@pytest.fixture(scope="module")
def complete(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("complete") / "run"
    train(data, out=out, **SETTINGS)
    return out


@pytest.fixture(scope="module")
def halfway(data, tmp_path_factory):
    """A run interrupted at step 12 of 15, with checkpoints at 10 and 12."""
    out = tmp_path_factory.mktemp("halfway") / "run"
    with Signals(12), pytest.raises(Interrupted):
        train(data, out=out, **SETTINGS)
    assert names(out) == ["step-00000012", "step-00000010"]
    return out


def names(out):
    return [path.name for path in files.list_checkpoints(out / "checkpoints")]


def checkpoint(step, value=0.0):
    return files.Checkpoint(step, {"model": {"w": torch.full((4,), value)}}, {"history": [value]})


# ---- damage ------------------------------------------------------------------------------------


def truncate_model(path):
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 10)


def empty_optimizer(path):
    os.truncate(path / "optimizer.safetensors", 0)


def flip_a_bit(path):
    data = bytearray((path / "ema.safetensors").read_bytes())
    data[-3] ^= 1
    (path / "ema.safetensors").write_bytes(data)


def change_state(path):
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"step": 12', '"step": 13'))


DAMAGE = [
    (truncate_model, "model.safetensors has changed"),
    (empty_optimizer, "optimizer.safetensors has changed"),
    (flip_a_bit, "ema.safetensors has changed"),
    (change_state, "state.json has changed"),
    (lambda path: (path / "manifest.json").unlink(), "it has no manifest"),
    (lambda path: (path / "manifest.json").write_text('{"mod'), "its manifest cannot be read"),
    (lambda path: (path / "manifest.json").write_text("[]"), "its files do not match its manifest"),
    (lambda path: (path / "sums.safetensors").unlink(), "its files do not match its manifest"),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGE)
def test_a_damaged_checkpoint_is_ignored(damage, why, data, halfway, complete, tmp_path):
    out, callback = shutil.copytree(halfway, tmp_path / "run"), RecordingCallback()
    damage(out / "checkpoints" / "step-00000012")
    train(data, out=out, resume=True, callback=callback, **SETTINGS)
    warnings = [note for note in callback.notes if "step-0" in note]
    assert len(warnings) == 1
    assert f"step-00000012 is damaged ({why})" in warnings[0]
    assert "Resuming at step 10 of 15." in callback.notes
    assert fingerprints(out) == fingerprints(complete)
    assert names(out) == ["step-00000015", "step-00000010"]  # the damaged one is gone


def test_with_all_checkpoints_damaged_training_starts_at_zero(data, halfway, complete, tmp_path):
    out, callback = shutil.copytree(halfway, tmp_path / "run"), RecordingCallback()
    for path in files.list_checkpoints(out / "checkpoints"):
        truncate_model(path)
    train(data, out=out, resume=True, callback=callback, **SETTINGS)
    assert sum("is damaged" in note for note in callback.notes) == 2
    assert any("no complete checkpoint" in note and "step 0" in note for note in callback.notes)
    assert fingerprints(out) == fingerprints(complete)


def test_partial_files_of_a_killed_run_are_removed_on_resume(data, halfway, complete, tmp_path):
    out = shutil.copytree(halfway, tmp_path / "run")
    shutil.copytree(out / "checkpoints" / "step-00000012", out / "checkpoints" / ".fedcba9876543210.part")
    (out / ".0123456789abcdef.part").write_bytes(b"half of best.safetensors")
    (out / ".00112233445566aa.part").write_text("{")
    with Signals(13), pytest.raises(Interrupted):
        train(data, out=out, resume=True, **SETTINGS)
    assert not partial_files(out)
    train(data, out=out, resume=True, **SETTINGS)
    assert fingerprints(out) == fingerprints(complete)


def test_partial_folders_are_not_checkpoints(tmp_path):
    files.save_checkpoint(tmp_path, checkpoint(1), keep=2)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".0123456789abcdef.part")
    (tmp_path / "step-00000003").write_text("a file")
    found, warnings = files.load_newest(tmp_path)
    assert (found.step, warnings) == (1, {})


# ---- how many are kept -------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(keep, tmp_path):
    for step in range(1, 7):
        files.save_checkpoint(tmp_path, checkpoint(step), keep)
    assert [int(p.name[5:]) for p in files.list_checkpoints(tmp_path)] == list(range(6, 6 - keep, -1))


def test_foreign_files_are_kept(tmp_path):
    kept = [tmp_path / name for name in ("notes.txt", "step-1", "best", "step-00000001.bak", ".part")]
    for path in kept:
        path.mkdir() if path.suffix != ".txt" else path.write_text("mine")
    (tmp_path / "best" / "model.part").write_text("mine")
    before = file_hashes(tmp_path)
    for step in range(1, 5):
        files.save_checkpoint(tmp_path, checkpoint(step), keep=1)
    assert all(path.exists() for path in kept)
    assert before.items() <= file_hashes(tmp_path).items()


def test_the_one_just_written_is_never_removed(tmp_path):
    """With keep=1 and a damaged checkpoint of a later step, which sorts before it."""
    files.save_checkpoint(tmp_path, checkpoint(4), keep=1)
    files.save_checkpoint(tmp_path, checkpoint(9), keep=2)
    os.truncate(tmp_path / "step-00000009" / "model.safetensors", 3)
    files.save_checkpoint(tmp_path, checkpoint(6), keep=1)
    assert [p.name for p in files.list_checkpoints(tmp_path)] == ["step-00000006"]
    assert files.load_newest(tmp_path)[0].step == 6


def test_saving_a_step_again_does_not_touch_the_first(tmp_path):
    """Interrupted during evaluation, and saved again after it: a complete checkpoint exists at any time."""
    for number in range(12):
        before = file_hashes(tmp_path)
        files.save_checkpoint(tmp_path, checkpoint(7, float(number)), keep=2)
        assert files.load_newest(tmp_path)[0].state["history"] == [float(number)]
        kept = {name: data for name, data in before.items() if name in file_hashes(tmp_path)}
        assert kept.items() <= file_hashes(tmp_path).items()
        assert len(kept) == (3 if number else 0)  # the one before still has its three files
    assert len(files.list_checkpoints(tmp_path)) == 2


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path):
    files.save_checkpoint(tmp_path, checkpoint(7, 1.0), keep=2)
    (tmp_path / "step-00000007" / "manifest.json").unlink()
    _, warnings = files.load_newest(tmp_path)
    files.save_checkpoint(tmp_path, checkpoint(7, 2.0), 2, list(warnings))
    found, warnings = files.load_newest(tmp_path)
    assert (found.state["history"], warnings) == ([2.0], {})
    assert len(files.list_checkpoints(tmp_path)) == 1


def test_a_checkpoint_is_restored_exactly(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    by_name = {p: name for name, p in model.named_parameters()}
    tensors = {"model": model.state_dict(), "optimizer": files.optimizer_tensors(optimizer, by_name)}
    assert set(tensors["optimizer"]) == {
        f"{kind}/{name}" for kind in ("step", "exp_avg", "exp_avg_sq") for name in ("weight", "bias")
    }
    state = {"history": [{"loss": 0.1 + 0.2}], "pending": True}
    files.save_checkpoint(tmp_path, files.Checkpoint(3, tensors, state), keep=2)
    found, _ = files.load_newest(tmp_path)
    assert (found.step, found.state) == (3, state)
    zeros = {file: {name: torch.zeros_like(t) for name, t in part.items()} for file, part in tensors.items()}
    found.copy_into(zeros)
    for file, part in tensors.items():
        for name, value in part.items():
            assert torch.equal(value, zeros[file][name])


# ---- disk errors -------------------------------------------------------------------------------


def limited(most):
    """In a child process: limit the size of files; writing more is an error, as on a full disk."""

    def apply():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    return apply


def resume_command(data, out, **how):
    given = [
        f"--set={part}.{name}={value}"
        for part in ("model", "augment", "mixing")
        for name, value in SETTINGS[part].items()
    ]
    given += [f"--set={name}={SETTINGS[name]}" for name in ("accumulate", "ema", "smoothing")]
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "vitrail",
            "train",
            data,
            "--out",
            out,
            "--epochs=3",
            "--batch=16",
            "--lr=3e-3",
            *given,
            "--resume",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        **how,
    )


def test_a_full_disk_is_an_error_and_leaves_the_old_checkpoint(data, halfway, complete, tmp_path):
    out = shutil.copytree(halfway, tmp_path / "run")
    before = {name: file_hashes(out / "checkpoints" / name) for name in names(out)}
    checkpoint = out / "checkpoints" / "step-00000012"
    most = (out / "best.safetensors").stat().st_size + 2000  # the optimizer is larger
    assert most < (checkpoint / "optimizer.safetensors").stat().st_size
    done = resume_command(data, out, preexec_fn=limited(most))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("vitrail: ")
    assert "could not be written" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert {name: file_hashes(out / "checkpoints" / name) for name in names(out)} == before
    assert not partial_files(out)
    train(data, out=out, resume=True, **SETTINGS)  # with space again
    assert fingerprints(out) == fingerprints(complete)


@contextmanager
def read_only(folder):
    """Make a folder read-only for this process, also where tests run as root."""
    folders = [folder, *(p for p in folder.rglob("*") if p.is_dir())]
    user = os.geteuid()
    for path in folders:
        path.chmod(0o555)
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        if user == 0:
            os.seteuid(0)
        for path in folders:
            path.chmod(0o755)


def test_a_read_only_run_directory(data, halfway, complete):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        out, file = shutil.copytree(halfway, Path(folder) / "run"), shutil.copy(data, folder)
        config = json.loads((out / "config.json").read_text())
        config["request"]["data"] = {"given": str(file), "path": str(file)}  # else it would be updated
        (out / "config.json").write_text(json.dumps(config))
        before = file_hashes(out)
        elsewhere = shutil.copy(file, Path(folder) / "moved.npz")
        with read_only(out), pytest.raises(FileError, match=r"run directory .* cannot be used: Permission"):
            train(elsewhere, out=out, resume=True, **SETTINGS)  # its new path cannot be recorded
        assert file_hashes(out) == before
        message = r"log\.txt could not be written: Permission denied"
        with read_only(out), pytest.raises(FileError, match=message):
            train(file, out=out, resume=True, **SETTINGS)
        assert file_hashes(out) == before
        (out / "log.txt").chmod(0o666)
        with read_only(out):
            with (
                Signals(13),
                pytest.raises(FileError, match=r"could not be written: Permission denied.* is unchanged"),
            ):
                train(file, out=out, resume=True, **SETTINGS)
            with pytest.raises(FileError, match="cannot be used: Permission denied"):  # the metrics
                train(file, out=out, resume=True, **SETTINGS)
            with pytest.raises(FileError, match="cannot be used: Permission denied"):
                train(file, out=out / "new", **SETTINGS)
        assert file_hashes(out, but=["log.txt"]) == {n: v for n, v in before.items() if n != "log.txt"}
        train(file, out=out, resume=True, **SETTINGS)
        assert fingerprints(out) == fingerprints(complete)


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json"])
def test_an_error_at_any_file_of_a_checkpoint_leaves_the_one_before(file, tmp_path, monkeypatch):
    """As on a disk that becomes full or read-only halfway."""
    files.save_checkpoint(tmp_path, checkpoint(1), keep=1)
    before = file_hashes(tmp_path)
    real_text, real_tensors = files.write_text, files.write_safetensors

    def refuse(real):
        def write(path, *rest):
            real(path, *rest)
            if path.name == file:
                raise OSError(30, "Read-only file system")

        return write

    monkeypatch.setattr(files, "write_text", refuse(real_text))
    monkeypatch.setattr(files, "write_safetensors", refuse(real_tensors))
    with pytest.raises(FileError, match=r"step-00000002 could not be written: Read-only file system"):
        files.save_checkpoint(tmp_path, checkpoint(2), keep=1)
    assert file_hashes(tmp_path) == before
    assert not partial_files(tmp_path)


def test_the_manifest_lists_every_file(halfway):
    path = halfway / "checkpoints" / "step-00000012"
    listed = json.loads((path / "manifest.json").read_text())
    assert set(listed) | {"manifest.json"} == {p.name for p in path.iterdir()}
    assert listed["state.json"][0] == (path / "state.json").stat().st_size
