"""`--resume` needs nothing but the run directory, which knows its settings and data; more epochs extend a run."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    Signals,
    file_hashes,
    fingerprints,
    rows,
    train,
    write_arrays,
    write_folder,
)
from vitrail.base.errors import ConfigError, FileError, InputError
from vitrail.cli import app
from vitrail.images.formats.sources import open_dataset
from vitrail.training.optim import lr_at
from vitrail.training.run_directory import read_saved_run
from vitrail.training.trainer import Interrupted

HOW = {**SETTINGS, "epochs": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_folder(folder / "images")
    return write_arrays(folder / "data.npz")


@pytest.fixture(scope="module")
def complete(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("complete") / "run"
    train(data, out=out, **HOW)
    return out


def interrupted(data, out, at=7, **how):
    with Signals(at), pytest.raises(Interrupted):
        train(data, out=out, **how)
    return out


def config(out):
    return json.loads((out / "config.json").read_text())


# ---- nothing but --out -------------------------------------------------------------------------


def test_the_command_with_nothing_but_out(data, complete, tmp_path, monkeypatch):
    """The data was given by a relative path, and the run is resumed in another folder."""
    monkeypatch.chdir(data.parent)
    interrupted("data.npz", tmp_path / "run", **HOW)
    assert config(tmp_path / "run")["request"]["data"] == {"given": "data.npz", "path": str(data)}
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", "--out=run", "--resume"])
    assert done.exit_code == 0, done.output
    assert "Resuming at step 7 of 10." in done.output
    assert fingerprints(tmp_path / "run") == fingerprints(complete)
    before = file_hashes(tmp_path)
    assert CliRunner().invoke(app, ["train", "--out=run", "--resume"]).exit_code == 0  # finished
    assert file_hashes(tmp_path) == before


def test_without_a_checkpoint_the_run_starts_again(data, complete, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    shutil.copy(complete / "config.json", out)
    train(out=out, resume=True)
    assert fingerprints(out) == fingerprints(complete)


def test_settings_may_be_given_again_alone(data, complete, tmp_path):
    out = interrupted(data, tmp_path / "run", **HOW)
    train(out=out, resume=True, lr=3e-3, workers=0, augment=dict(flip=0.5), model=dict(size=(8, 8)))
    assert fingerprints(out) == fingerprints(complete)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(lr=1e-3), r"train\.lr is 0\.001, but 0\.003 in the run"),
        (dict(augment=dict(flip=0.4)), r"train\.augment is "),
        (dict(model="mu/4"), r"model\.width is 32, but 16 in the run"),
        (dict(size=16), r"model\.size is \(16, 16\), but \(8, 8\) in the run"),
        (dict(recipe="digits"), r"recipe is 'digits', but 'auto' in the run"),
        (dict(learning_rate=1.0), "here it is called 'lr'"),
    ],
)
def test_other_settings_are_refused(how, message, complete):
    before = file_hashes(complete)
    with pytest.raises(ConfigError, match=message):
        train(out=complete, resume=True, **how)
    assert file_hashes(complete) == before


def test_data_that_has_moved(data, complete, tmp_path):
    """The error names the command, which works and is remembered; other data is refused."""
    (tmp_path / "first").mkdir()
    first, second = shutil.copy(data, tmp_path / "first"), tmp_path / "second" / "data.npz"
    out = interrupted(first, tmp_path / "run", **HOW)
    (tmp_path / "first").rename(tmp_path / "second")
    with pytest.raises(
        InputError,
        match=r"first/data\.npz does not exist any more.*vt\.train\(NEWPATH, out='\S+run', resume=True\)",
    ):
        train(out=out, resume=True)
    with pytest.raises(ConfigError, match=r"data\.train_images is 90, but 80 in the run"):
        train(write_arrays(tmp_path / "other.npz", count=90), out=out, resume=True)
    with Signals(8), pytest.raises(Interrupted):
        train(second, out=out, resume=True)
    assert config(out)["request"]["data"]["path"] == str(second)
    train(out=out, resume=True)
    assert fingerprints(out) == fingerprints(complete)


def test_no_run_and_no_data(tmp_path, complete):
    with pytest.raises(InputError, match=r"no run to resume in \S+.*give data to start a run"):
        train(out=tmp_path / "none", resume=True)
    with pytest.raises(InputError, match="training needs data"):
        train(out=tmp_path / "none")
    old = shutil.copytree(complete, tmp_path / "old")
    saved = config(old)
    (old / "config.json").write_text(json.dumps({**saved, "request": None}))
    with pytest.raises(InputError, match="does not record its data"):
        train(out=old, resume=True)
    (old / "config.json").write_text(json.dumps({**saved, "train": {**saved["train"], "new": 1}}))
    with pytest.raises(FileError, match=r"settings that this version of Vitrail does not read.*'new'"):
        train(out=old, resume=True)


def test_a_data_set_of_the_callers(data, complete, tmp_path):
    open_data = open_dataset(data)
    out = interrupted(open_data, tmp_path / "run", **HOW)
    with pytest.raises(InputError, match=r"was an object in Python.*vt\.train\(data=\.\.\., out="):
        train(out=out, resume=True)
    train(open_data, out=out, resume=True)
    assert fingerprints(out) == fingerprints(complete)


# ---- the weights to start from, and the teacher ------------------------------------------------


def test_from_and_teacher_are_remembered(data, complete, tmp_path):
    start, teacher = (shutil.copy(complete / "last.safetensors", tmp_path / n) for n in ("a", "b"))
    how = dict(from_=start, teacher=teacher, epochs=2, batch=16, tune="full", lr=1e-3)
    train(data, out=tmp_path / "whole", **how)
    saved = config(tmp_path / "whole")
    assert saved["request"]["from"] == {"given": str(start), "path": str(start)}
    assert len(saved["start"]["from_digest"]) == len(saved["start"]["teacher"]) == 64

    out = interrupted(data, tmp_path / "run", **how)
    start.unlink()  # the checkpoint has its weights
    train(out=out, resume=True)
    assert fingerprints(out) == fingerprints(tmp_path / "whole")

    shutil.rmtree(out / "checkpoints")
    (out / "last.safetensors").unlink()
    with pytest.raises(InputError, match=r"from file \S+ does not exist.*vt\.train\(from_='NEWPATH', out="):
        train(out=out, resume=True)
    with pytest.raises(ConfigError, match=r"start\.from_digest is "):
        train(out=out, resume=True, from_=tmp_path / "whole" / "last.safetensors")
    train(out=out, resume=True, from_=complete / "last.safetensors")
    assert fingerprints(out) == fingerprints(tmp_path / "whole")

    teacher.unlink()
    with pytest.raises(
        InputError, match=r"teacher file \S+ does not exist.*vt\.train\(teacher='NEWPATH', out="
    ):
        train(out=out, resume=True)


# ---- more epochs -------------------------------------------------------------------------------


def test_a_finished_run_is_extended(data, complete, tmp_path):
    """It goes on from its last step, with the learning rate of the longer run; interrupted, it ends alike."""
    out, callback = shutil.copytree(complete, tmp_path / "run"), RecordingCallback()
    (out / "report.html").write_text("of two epochs")
    train(out=out, resume=True, epochs=4, callback=callback)
    notes = " ".join(callback.notes)
    assert "extended from 2 to 4 epochs" in notes
    assert "is not that of a run of 4 epochs from the start" in notes
    assert "Resuming at step 10 of 20." in callback.notes
    assert rows(out)[:2] == rows(complete)
    assert [row["step"] for row in rows(out)] == [5, 10, 15, 20]
    settings = read_saved_run(out).recipe.train
    assert rows(out)[2]["lr"] == lr_at(14, 20, settings)
    assert (settings.epochs, config(out)["extended"]) == (4, [2])
    assert not (out / "report.html").exists()
    assert fingerprints(out)["last.safetensors"] != fingerprints(complete)["last.safetensors"]

    again = shutil.copytree(complete, tmp_path / "again")
    with Signals(13), pytest.raises(Interrupted):
        train(out=again, resume=True, epochs=4)
    train(out=again, resume=True)
    assert fingerprints(again) == fingerprints(out)


def test_an_interrupted_run_is_extended(data, tmp_path):
    out = interrupted(data, tmp_path / "run", **HOW)
    done = CliRunner().invoke(app, ["train", "--out", str(out), "--resume", "--epochs=3"])
    assert done.exit_code == 0, done.output
    assert [row["step"] for row in rows(out)] == [5, 10, 15]


def test_killed_before_the_extension_was_written_the_run_is_complete_again(complete, tmp_path):
    """last.safetensors goes before config.json changes."""
    out = shutil.copytree(complete, tmp_path / "run")
    (out / "last.safetensors").unlink()
    train(out=out, resume=True)
    assert fingerprints(out) == fingerprints(complete)


def test_a_run_without_checkpoints_is_not_extended(complete, tmp_path):
    out = shutil.copytree(complete, tmp_path / "run")
    shutil.rmtree(out / "checkpoints")
    before = file_hashes(out)
    with pytest.raises(FileError, match=r"has none; start a new run .*from_='\S+last\.safetensors"):
        train(out=out, resume=True, epochs=4)
    assert file_hashes(out) == before


# ---- what was chosen automatically -------------------------------------------------------------


def test_what_auto_chose_is_used_again(data, complete, tmp_path):
    """A run that was started in bf16 on a GPU does not silently go on in fp32."""
    out, callback = interrupted(data, tmp_path / "run", **HOW), RecordingCallback()
    saved = config(out)
    assert saved["resolved"]["precision"] == "fp32"
    saved["resolved"]["precision"] = "bf16"
    (out / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match="precision='bf16' needs a GPU"):
        train(out=out, resume=True)
    train(out=out, resume=True, precision="fp32", callback=callback)
    assert any("had precision=bf16 and continues with fp32" in note for note in callback.notes)
    assert config(out)["resolved"]["precision"] == "fp32"
