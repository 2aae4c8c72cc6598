"""A run that was stopped, anywhere and by anything, ends in the same bits as one that was not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_runs import (
    SETTINGS,
    Signals,
    everything,
    left_over,
    one_thread,
    prints,
    rows,
    stopped_and_resumed,
    train,
    write_arrays,
    write_folder,
)
from tiny_runs import Notes as Listener
from tiny_runs import __file__ as program
from vitrail.errors import ConfigError, FileError
from vitrail.training.loop import Stopped

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return {"arrays": write_arrays(folder / "data.npz"), "folder": write_folder(folder / "pictures")}


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Undisturbed runs, made when first asked for."""
    folder = tmp_path_factory.mktemp("whole")

    def made(kind):
        out = folder / kind
        if not out.exists():
            train(data[kind], out=out, workers=2, **SETTINGS)
        return out

    return made


@pytest.mark.parametrize(("kind", "workers"), [("arrays", 2), ("folder", 0), ("folder", 2)])
@pytest.mark.parametrize("at", [1, 7, "end", "judge", "save"])
def test_a_stopped_run_ends_in_the_same_bits(kind, workers, at, data, whole, tmp_path):
    """At the first step, within an epoch, at the end of one, while one is judged, when it has been."""
    at = {"arrays": 10, "folder": 6}[kind] if at == "end" else at  # epochs of 5 steps, and of 3
    stopped_and_resumed(data[kind], tmp_path / "run", at, workers=workers, **SETTINGS)
    assert prints(tmp_path / "run") == prints(whole(kind))
    assert not left_over(tmp_path)


def test_stopped_after_every_step(data, whole, tmp_path):
    steps = 0
    for at in range(1, 16):
        with Signals(at), pytest.raises(Stopped):
            train(data["arrays"], out=tmp_path / "run", resume=at > 1, **SETTINGS)
        steps += 1
    train(data["arrays"], out=tmp_path / "run", resume=True, **SETTINGS)
    assert rows(tmp_path / "run")[-1]["step"] == steps == 15
    assert prints(tmp_path / "run") == prints(whole("arrays"))


def test_the_number_of_workers_changes_nothing_and_may_change_on_the_way(data, whole, tmp_path):
    train(data["folder"], out=tmp_path / "none", workers=0, **SETTINGS)
    assert prints(tmp_path / "none") == prints(whole("folder"))
    stopped_and_resumed(
        data["folder"], tmp_path / "run", 4, workers=0, resumes=dict(workers=2, keep=5), **SETTINGS
    )
    assert prints(tmp_path / "run") == prints(whole("folder"))


def test_another_seed_is_another_run(data, whole, tmp_path):
    """Or all of the above would hold for a run that does not train at all."""
    train(data["arrays"], out=tmp_path / "run", seed=1, **SETTINGS)
    mine, theirs = prints(tmp_path / "run"), prints(whole("arrays"))
    assert [name for name in mine if mine[name] == theirs[name]] == [
        "sums.safetensors"
    ]  # zero after an epoch
    first, *_, last = rows(tmp_path / "run")
    assert last["loss"] < first["loss"]


def test_sgd_and_a_schedule_without_ema_resume_too(data, tmp_path):
    settings = {**SETTINGS, "optimizer": "sgd", "momentum": 0.9, "ema": None, "schedule": "linear"}
    train(data["arrays"], out=tmp_path / "whole", **settings)
    stopped_and_resumed(data["arrays"], tmp_path / "run", 7, **settings)
    assert prints(tmp_path / "run") == prints(tmp_path / "whole")
    assert "ema.safetensors" not in prints(tmp_path / "run")


def test_fewer_checkpoints_than_epochs_resume_from_the_last_there_is(data, tmp_path):
    settings = {**SETTINGS, "save_every": 2, "evaluate_every": 2}
    train(data["arrays"], out=tmp_path / "whole", **settings)
    out = tmp_path / "run"
    stopped_and_resumed(data["arrays"], out, 12, **settings)
    assert prints(out) == prints(tmp_path / "whole")
    assert ["val_loss" in row for row in rows(out)] == [False, True, True]


# ---- kill -9 -----------------------------------------------------------------------------------


def kill(folder, kills, seed, limit):
    done = subprocess.run(
        [sys.executable, program, "kill", folder, str(kills), str(seed)],
        capture_output=True,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split()[1])


def test_killed_at_ten_random_moments(tmp_path):
    assert kill(tmp_path, 10, seed=1, limit=120) >= 10


@pytest.mark.slow
def test_killed_at_two_hundred_random_moments(tmp_path):
    assert kill(tmp_path, 200, seed=2, limit=1800) >= 200


# ---- the run's folder --------------------------------------------------------------------------


def test_a_finished_run_is_left_as_it_is(data, whole, tmp_path):
    before = everything(whole("arrays"))
    listener = Listener()
    done = train(data["arrays"], out=whole("arrays"), resume=True, listener=listener, **SETTINGS)
    assert everything(whole("arrays")) == before
    assert done.metrics == rows(whole("arrays"))
    assert listener.rows == []


def test_a_folder_that_is_not_empty_is_refused(data, whole, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    before = everything(tmp_path)
    with pytest.raises(FileError, match=r"--out must be a new or empty folder.* go on with --resume"):
        train(data["arrays"], out=tmp_path, **SETTINGS)
    with pytest.raises(FileError, match="--out must be a new or empty folder"):
        train(data["arrays"], out=tmp_path, resume=True, **SETTINGS)
    with pytest.raises(FileError, match="--out must be a new or empty folder"):
        train(data["arrays"], out=tmp_path / "thesis.tex", **SETTINGS)
    with pytest.raises(FileError, match="--out must be a new or empty folder"):
        train(data["arrays"], out=whole("arrays"), **SETTINGS)
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(lr=1e-3), r"train\.lr=0\.001, and 0\.003 in the run"),
        (dict(epochs=4), r"train\.epochs=4, and 3 in the run"),
        (dict(seed=3), r"train\.seed=3, and 0 in the run"),
        (dict(model=dict(SETTINGS["model"], depth=1)), r"model\.depth=1, and 2 in the run"),
        (dict(mixing=dict(mixup=0.0)), r"train\.mixing="),
    ],
)
def test_other_settings_are_refused(change, words, data, whole):
    before = everything(whole("arrays"))
    with pytest.raises(ConfigError, match=words):
        train(data["arrays"], out=whole("arrays"), resume=True, **{**SETTINGS, **change})
    assert everything(whole("arrays")) == before


def test_other_data_is_refused(data, whole, tmp_path):
    other = write_arrays(tmp_path / "data.npz", count=90)
    with pytest.raises(ConfigError, match=r"data\.pictures=90, and 80 in the run"):
        train(other, out=whole("arrays"), resume=True, **SETTINGS)
    pictures = shutil.copytree(data["folder"], tmp_path / "pictures")
    (pictures / "ant" / "00.jpg").rename(pictures / "ant" / "zz.jpg")
    with pytest.raises(ConfigError, match=r"data\.names="):
        train(pictures, out=whole("folder"), resume=True, **SETTINGS)


def test_resume_without_a_run_or_a_checkpoint_starts_at_zero_and_says_so(data, whole, tmp_path):
    listener = Listener()
    train(data["arrays"], out=tmp_path / "new", resume=True, listener=listener, **SETTINGS)
    assert "There is no run to go on with: it starts at step 0." in listener.notes
    assert prints(tmp_path / "new") == prints(whole("arrays"))

    out, listener = tmp_path / "begun", Listener()
    out.mkdir()
    shutil.copy(whole("arrays") / "config.json", out)
    train(data["arrays"], out=out, resume=True, listener=listener, **SETTINGS)
    assert "There is no whole checkpoint: it starts at step 0." in listener.notes
    assert prints(out) == prints(whole("arrays"))


def test_a_run_that_was_killed_while_its_folder_was_made_can_be_begun_again(data, whole, tmp_path):
    for name in ("environment.json", ".config.json.part"):
        (tmp_path / name).write_text("{")
    train(data["arrays"], out=tmp_path, resume=True, **SETTINGS)
    assert prints(tmp_path) == prints(whole("arrays"))
    assert not left_over(tmp_path)


def test_a_config_that_is_none_is_named(data, tmp_path):
    (tmp_path / "config.json").write_text('{"model": {')
    with pytest.raises(FileError, match=r"config\.json, which is not one"):
        train(data["arrays"], out=tmp_path, resume=True, **SETTINGS)
    assert Path(tmp_path / "config.json").read_text() == '{"model": {'
