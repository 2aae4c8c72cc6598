"""Signals: the first saves and stops with the shell's exit code, the second stops at once."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
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
from vitrail.training import start as api
from vitrail.training.session import TrainingSession
from vitrail.training.signals import Interrupted
from vitrail.training.trainer import Trainer


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


# ---- before the first step -------------------------------------------------------------------


def send_in(monkeypatch, where, name, number=signal.SIGTERM):
    """Send this process a signal, once, at the start of a function."""
    real, sent = getattr(where, name), []

    def function(*args, **kwargs):
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    monkeypatch.setattr(where, name, function)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("where", "name", "words"),
    [
        (api, "open_training_data", "had not begun, and nothing was written; start it again"),
        (TrainingSession, "prepare", "no step was taken since the start; resume with: .*resume=True"),
        (Trainer, "choose_mode", "no step was taken since the start"),  # where the step is compiled
        (Trainer, "_compute_step", "no step was taken since the start"),
    ],
)
def test_a_signal_before_the_first_step_stops_at_once_and_says_so(
    where, name, words, number, data, tmp_path, monkeypatch
):
    send_in(monkeypatch, where, name, number)
    with pytest.raises(Interrupted, match=f"Stopped by {number.name}: .*{words}") as stop:
        train(data, out=tmp_path / "run", **SETTINGS)
    assert (stop.value.signal, stop.value.saved) == (number, False)
    train(data, out=tmp_path / "run", resume=True, **SETTINGS)
    train(data, out=tmp_path / "uninterrupted", **SETTINGS)
    assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "uninterrupted")


def test_a_signal_before_the_next_step_of_a_resumed_run_loses_nothing(data, tmp_path, monkeypatch):
    with Signals(7), pytest.raises(Interrupted):
        train(data, out=tmp_path, **SETTINGS)
    before = file_hashes(tmp_path / "checkpoints")
    send_in(monkeypatch, Trainer, "_compute_step")
    with pytest.raises(Interrupted, match="no step was taken since the start; resume with"):
        train(data, out=tmp_path, resume=True, **SETTINGS)
    assert file_hashes(tmp_path / "checkpoints") == before


def test_a_signal_during_the_report_says_that_the_run_is_complete(data, tmp_path, monkeypatch):
    send_in(monkeypatch, api, "write_report")
    with pytest.raises(Interrupted, match=r"the run is complete; if its report is missing.*resume=True"):
        api.train(data, out=tmp_path / "run", verbose=False, **SETTINGS)
    assert (tmp_path / "run" / "last.safetensors").exists()


SLOW = """
    import time
    from {module} import {name} as before
    import {module}

    def slow(*args, **kwargs):
        print("READY", flush=True)
        time.sleep(60)

    {module}.{name} = slow
    from vitrail.cli import main
    main()
"""


@pytest.mark.parametrize(
    ("module", "name", "number", "code"),
    [
        ("vitrail.training.parallel", "init_process_group", signal.SIGTERM, 143),
        ("vitrail.training.open_data", "open_dataset", signal.SIGINT, 130),
    ],
)
def test_the_command_stopped_while_it_starts_says_so(module, name, number, code, data, tmp_path):
    """While torch is loaded, and while data is read."""
    program = textwrap.dedent(SLOW.format(module=module, name=name))
    child = subprocess.Popen(
        [sys.executable, "-c", program, "train", data, "--out", tmp_path / "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "READY\n"
    child.send_signal(number)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == code, errors
    assert f"Stopped by {signal.Signals(number).name}: " in output
    assert "start it again" in output
    assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()


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
