"""Signals: the first saves and stops with the shell's exit code, the second stops at once."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    Signals,
    file_hashes,
    fingerprints,
    partial_files,
    rows,
    train,
    write_folder,
)
from vitrail.training import checkpoint as files
from vitrail.training.trainer import Interrupted


def start(data, out, *more):
    return subprocess.Popen(
        [sys.executable, "-m", "vitrail", "train", data, "--out", out, "--batch=16", *more]
        + [f"--set=model.{name}={value}" for name, value in SETTINGS["model"].items()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(condition, child, limit=60):
    end = time.monotonic() + limit
    while not condition():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command_saves_and_exits_with_the_signals_code(number, code, data, tmp_path):
    out = tmp_path / "run"
    child = start(data, out, "--epochs=2000")
    wait_until(lambda: (out / "metrics.jsonl").exists(), child)
    sent = time.monotonic()
    child.send_signal(number)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == code, errors
    assert time.monotonic() - sent < 5
    assert "Traceback" not in errors
    stop = next(line for line in output.splitlines() if line.startswith("Stopped at step"))
    assert "of 10,000" in stop
    assert f"vitrail train --out {out} --resume" in stop
    found, warnings = files.load_newest(out / "checkpoints")
    assert (f"{found.step:,}", warnings) == (stop.split()[3], {})
    assert not partial_files(out)
    assert not (out / "last.safetensors").exists()


@pytest.mark.slow
def test_a_command_stopped_and_resumed_ends_as_an_uninterrupted_one(tmp_path):
    """With image files, decoded by threads; the signal comes at an arbitrary moment."""
    data = write_folder(tmp_path / "images")
    how = dict(batch=16, epochs=12, model=SETTINGS["model"])
    train(data, out=tmp_path / "uninterrupted", **how)
    out = tmp_path / "run"
    child = start(data, out, "--epochs=12")
    wait_until(lambda: (out / "metrics.jsonl").exists(), child)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == 143
    assert len(rows(out)) < 12
    train(data, out=out, resume=True, **how)
    assert fingerprints(out) == fingerprints(tmp_path / "uninterrupted")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_second_signal_stops_at_once(number, code, data, tmp_path):
    with Signals(7, number, times=2), pytest.raises(SystemExit) as stop:
        train(data, out=tmp_path, **SETTINGS)
    assert stop.value.code == code
    assert [p.name for p in files.list_checkpoints(tmp_path / "checkpoints")] == [
        "step-00000005"
    ]  # not of step 7
    assert files.load_newest(tmp_path / "checkpoints")[1] == {}


def test_a_second_signal_while_saving_leaves_the_old_checkpoint_complete(data, tmp_path, monkeypatch):
    out, write = tmp_path / "run", files.write_text

    def interrupted(path, text):
        if path.name == "state.json" and '"step": 7' in text:
            os.kill(os.getpid(), signal.SIGTERM)
        write(path, text)

    monkeypatch.setattr(files, "write_text", interrupted)
    with Signals(7), pytest.raises(SystemExit):
        train(data, out=out, **SETTINGS)
    assert not partial_files(out)
    assert files.load_newest(out / "checkpoints")[0].step == 5
    monkeypatch.undo()
    train(data, out=out, resume=True, **SETTINGS)
    train(data, out=tmp_path / "uninterrupted", **SETTINGS)
    assert fingerprints(out) == fingerprints(tmp_path / "uninterrupted")
    assert not partial_files(out)


def test_interrupted_during_evaluation_the_epoch_is_evaluated_on_resume(data, tmp_path):
    """The epoch's row is neither lost nor duplicated, and its last step is not taken again."""
    with Signals("evaluate"), pytest.raises(Interrupted):
        train(data, out=tmp_path, **SETTINGS)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert files.load_newest(tmp_path / "checkpoints")[0].state["pending"] is True
    callback = RecordingCallback()
    with Signals(6), pytest.raises(Interrupted):
        train(data, out=tmp_path, resume=True, callback=callback, **SETTINGS)
    assert [row["epoch"] for row in callback.rows] == [1]
    assert rows(tmp_path)[0]["val_images"] == 30


def test_interrupted_again_and_again_during_evaluation(data, tmp_path):
    before = None
    for number in range(3):
        with Signals("evaluate"), pytest.raises(Interrupted):
            train(data, out=tmp_path, resume=number > 0, **SETTINGS)
        found = file_hashes(tmp_path / "checkpoints")
        assert before in (None, found)  # it is already saved
        before = found
    train(data, out=tmp_path, resume=True, **SETTINGS)
    assert [row["step"] for row in rows(tmp_path)] == [5, 10, 15]


def test_the_callers_signal_handlers_are_restored(data, tmp_path):
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
    try:
        train(data, out=tmp_path / "run", **{**SETTINGS, "epochs": 1})
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == [1]
    finally:
        signal.signal(signal.SIGTERM, before)
    shutil.rmtree(tmp_path / "run")
