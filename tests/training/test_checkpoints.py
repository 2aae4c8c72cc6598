"""Checkpoints: whole or passed over; kept as many as asked; and what a full disk does to them."""

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

from tiny_runs import (
    SETTINGS,
    Notes,
    Signals,
    everything,
    left_over,
    one_thread,
    prints,
    train,
    write_arrays,
)
from vitrail.errors import FileError
from vitrail.training import checkpoint as files
from vitrail.training.loop import Stopped

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_arrays(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    train(data, out=out, **SETTINGS)
    return out


@pytest.fixture(scope="module")
def halfway(data, tmp_path_factory):
    """A run that was stopped at step 12 of 15, with checkpoints at 10 and 12."""
    out = tmp_path_factory.mktemp("halfway") / "run"
    with Signals(12), pytest.raises(Stopped):
        train(data, out=out, **SETTINGS)
    assert names(out) == ["step-00000012", "step-00000010"]
    return out


def names(out):
    return [place.name for place in files.complete(out / "checkpoints")]


def one(step, value=0.0):
    return files.Checkpoint(step, {"model": {"w": torch.full((4,), value)}}, {"history": [value]})


# ---- damage ------------------------------------------------------------------------------------


def shortened(place):
    file = place / "model.safetensors"
    os.truncate(file, file.stat().st_size - 10)


def emptied(place):
    os.truncate(place / "optimizer.safetensors", 0)


def changed(place):
    data = bytearray((place / "ema.safetensors").read_bytes())
    data[-3] ^= 1
    (place / "ema.safetensors").write_bytes(data)


def changed_state(place):
    text = (place / "state.json").read_text()
    (place / "state.json").write_text(text.replace('"step": 12', '"step": 13'))


DAMAGE = [
    (shortened, "model.safetensors has changed"),
    (emptied, "optimizer.safetensors has changed"),
    (changed, "ema.safetensors has changed"),
    (changed_state, "state.json has changed"),
    (lambda place: (place / "manifest.json").unlink(), "it has no manifest"),
    (lambda place: (place / "manifest.json").write_text('{"mod'), "its manifest cannot be read"),
    (lambda place: (place / "manifest.json").write_text("[]"), "its files are not those of its manifest"),
    (lambda place: (place / "sums.safetensors").unlink(), "its files are not those of its manifest"),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(damage, why, data, halfway, whole, tmp_path):
    out, listener = shutil.copytree(halfway, tmp_path / "run"), Notes()
    damage(out / "checkpoints" / "step-00000012")
    train(data, out=out, resume=True, listener=listener, **SETTINGS)
    warnings = [note for note in listener.notes if "step-0" in note]
    assert warnings == [f"step-00000012 is not whole ({why}); the one before it is used."]
    assert "Going on at step 10 of 15." in listener.notes
    assert prints(out) == prints(whole)
    assert names(out) == ["step-00000015", "step-00000010"]  # and the damaged one takes no room


def test_with_all_damaged_it_starts_at_zero(data, halfway, whole, tmp_path):
    out, listener = shutil.copytree(halfway, tmp_path / "run"), Notes()
    for place in files.complete(out / "checkpoints"):
        shortened(place)
    train(data, out=out, resume=True, listener=listener, **SETTINGS)
    assert sum("is not whole" in note for note in listener.notes) == 2
    assert "There is no whole checkpoint: it starts at step 0." in listener.notes
    assert prints(out) == prints(whole)


def test_what_a_killed_run_had_begun_to_write_goes_at_the_next_start(data, halfway, whole, tmp_path):
    out = shutil.copytree(halfway, tmp_path / "run")
    shutil.copytree(out / "checkpoints" / "step-00000012", out / "checkpoints" / ".step-00000013.part")
    (out / ".0123456789abcdef.part").write_bytes(b"half of best.safetensors")
    (out / ".metrics.jsonl.part").write_text("{")
    with Signals(13), pytest.raises(Stopped):
        train(data, out=out, resume=True, **SETTINGS)
    assert not left_over(out)
    train(data, out=out, resume=True, **SETTINGS)
    assert prints(out) == prints(whole)


def test_a_half_renamed_folder_counts_for_nothing(tmp_path):
    files.save(tmp_path, one(1), keep=2)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000002.part")
    (tmp_path / "step-00000003").write_text("a file")
    found, warnings = files.load_newest(tmp_path)
    assert (found.step, warnings) == (1, {})


# ---- how many stay -----------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_stay(keep, tmp_path):
    for step in range(1, 7):
        files.save(tmp_path, one(step), keep)
    assert [int(p.name[5:]) for p in files.complete(tmp_path)] == list(range(6, 6 - keep, -1))


def test_what_the_run_did_not_write_stays(tmp_path):
    kept = [tmp_path / name for name in ("notes.txt", "step-1", "best", "step-00000001.bak", ".part")]
    for place in kept:
        place.mkdir() if place.suffix != ".txt" else place.write_text("mine")
    (tmp_path / "best" / "model.part").write_text("mine")
    before = everything(tmp_path)
    for step in range(1, 5):
        files.save(tmp_path, one(step), keep=1)
    assert all(place.exists() for place in kept)
    assert before.items() <= everything(tmp_path).items()


def test_the_one_just_written_is_never_removed(tmp_path):
    """With a damaged one of a later step before it in the order, and room for one."""
    files.save(tmp_path, one(4), keep=1)
    files.save(tmp_path, one(9), keep=2)
    os.truncate(tmp_path / "step-00000009" / "model.safetensors", 3)
    files.save(tmp_path, one(6), keep=1)
    assert [p.name for p in files.complete(tmp_path)] == ["step-00000006"]
    assert files.load_newest(tmp_path)[0].step == 6


def test_the_same_step_again_does_not_touch_the_first(tmp_path):
    """Stopped while an epoch is judged, and saved again when it is judged: at no moment is there none."""
    for number in range(12):
        before = everything(tmp_path)
        files.save(tmp_path, one(7, float(number)), keep=2)
        assert files.load_newest(tmp_path)[0].state["history"] == [float(number)]
        kept = {name: data for name, data in before.items() if name in everything(tmp_path)}
        assert kept.items() <= everything(tmp_path).items()
        assert len(kept) == (3 if number else 0)  # the one before is there still, with its three files
    assert len(files.complete(tmp_path)) == 2


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path):
    files.save(tmp_path, one(7, 1.0), keep=2)
    (tmp_path / "step-00000007" / "manifest.json").unlink()
    _, warnings = files.load_newest(tmp_path)
    files.save(tmp_path, one(7, 2.0), 2, list(warnings))
    found, warnings = files.load_newest(tmp_path)
    assert (found.state["history"], warnings) == ([2.0], {})
    assert len(files.complete(tmp_path)) == 1


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
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
    files.save(tmp_path, files.Checkpoint(3, tensors, state), keep=2)
    found, _ = files.load_newest(tmp_path)
    assert (found.step, found.state) == (3, state)
    other = torch.optim.AdamW(model.parameters(), fused=True)
    files.restore_optimizer(other, found.tensors["optimizer"], by_name)
    for parameter, kinds in optimizer.state.items():
        for kind, value in kinds.items():
            assert torch.equal(value, other.state[parameter][kind])


# ---- disks -------------------------------------------------------------------------------------


def limited(most):
    """In a child: files may not grow beyond this, and writing more is an error, as on a full disk."""

    def apply():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    return apply


def command(data, out, **how):
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


def test_a_full_disk_is_loud_and_leaves_the_old_checkpoint(data, halfway, whole, tmp_path):
    out = shutil.copytree(halfway, tmp_path / "run")
    before = {name: everything(out / "checkpoints" / name) for name in names(out)}
    most = (out / "checkpoints" / "step-00000012" / "model.safetensors").stat().st_size
    done = command(data, out, preexec_fn=limited(most + 2000))  # the optimizer is twice as large
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("vitrail: ")
    assert "must be written whole" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert {name: everything(out / "checkpoints" / name) for name in names(out)} == before
    assert not left_over(out)
    train(data, out=out, resume=True, **SETTINGS)  # there is room again
    assert prints(out) == prints(whole)


@contextmanager
def read_only(folder):
    """A folder that this process may not write to, also where tests run as root."""
    places = [folder, *(p for p in folder.rglob("*") if p.is_dir())]
    user = os.geteuid()
    for place in places:
        place.chmod(0o555)
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        if user == 0:
            os.seteuid(0)
        for place in places:
            place.chmod(0o755)


def test_a_folder_that_cannot_be_written_to(data, halfway, whole):
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        out, file = shutil.copytree(halfway, Path(place) / "run"), shutil.copy(data, place)
        before = everything(out)
        words = r"write its log.*log\.txt: Permission denied"
        with read_only(out), pytest.raises(FileError, match=words):
            train(file, out=out, resume=True, **SETTINGS)
        assert everything(out) == before
        (out / "log.txt").chmod(0o666)
        with read_only(out):
            with (
                Signals(13),
                pytest.raises(FileError, match=r"the one before it is as it was.* Permission denied"),
            ):
                train(file, out=out, resume=True, **SETTINGS)
            with pytest.raises(PermissionError):  # it gets as far as the metrics of the epoch
                train(file, out=out, resume=True, **SETTINGS)
            with pytest.raises(PermissionError):
                train(file, out=out / "new", **SETTINGS)
        assert everything(out, but=["log.txt"]) == {n: v for n, v in before.items() if n != "log.txt"}
        train(file, out=out, resume=True, **SETTINGS)
        assert prints(out) == prints(whole)


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json"])
def test_an_error_at_any_file_of_a_checkpoint_leaves_the_one_before(file, tmp_path, monkeypatch):
    """As on a disk that becomes full or read-only on the way."""
    files.save(tmp_path, one(1), keep=1)
    before = everything(tmp_path)
    real_text, real_tensors = files.write_text, files.write_safetensors

    def refuse(real):
        def write(place, *rest):
            real(place, *rest)
            if place.name == file:
                raise OSError(30, "Read-only file system")

        return write

    monkeypatch.setattr(files, "write_text", refuse(real_text))
    monkeypatch.setattr(files, "write_safetensors", refuse(real_tensors))
    with pytest.raises(FileError, match=r"step-00000002: Read-only file system"):
        files.save(tmp_path, one(2), keep=1)
    assert everything(tmp_path) == before
    assert not left_over(tmp_path)


def test_the_manifest_names_every_file(halfway):
    place = halfway / "checkpoints" / "step-00000012"
    listed = json.loads((place / "manifest.json").read_text())
    assert set(listed) | {"manifest.json"} == {p.name for p in place.iterdir()}
    assert listed["state.json"][0] == (place / "state.json").stat().st_size
