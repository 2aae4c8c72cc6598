"""A run interrupted anywhere and resumed ends with the same bits as an uninterrupted one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    Signals,
    file_hashes,
    fingerprints,
    partial_files,
    rows,
    stopped_and_resumed,
    train,
    write_arrays,
    write_folder,
)
from tests.support.tiny_runs import __file__ as program
from vitrail.base.errors import ConfigError, FileError, InputError
from vitrail.images import content
from vitrail.training.trainer import Interrupted


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return {"arrays": write_arrays(folder / "data.npz"), "folder": write_folder(folder / "images")}


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """Uninterrupted runs by kind of data, made on first use."""
    folder = tmp_path_factory.mktemp("uninterrupted")

    def run(kind):
        out = folder / kind
        if not out.exists():
            train(data[kind], out=out, workers=2, **SETTINGS)
        return out

    return run


@pytest.mark.parametrize(("kind", "workers"), [("arrays", 2), ("folder", 0), ("folder", 2)])
@pytest.mark.parametrize("at", [1, 7, "end", "evaluate", "save"])
def test_an_interrupted_run_ends_with_the_same_bits(kind, workers, at, data, uninterrupted, tmp_path):
    """At the first step, within an epoch, at its end, during its evaluation, and before it is saved."""
    at = {"arrays": 10, "folder": 6}[kind] if at == "end" else at  # epochs of 5 steps, and of 3
    stopped_and_resumed(data[kind], tmp_path / "run", at, workers=workers, **SETTINGS)
    assert fingerprints(tmp_path / "run") == fingerprints(uninterrupted(kind))
    assert not partial_files(tmp_path)


def test_interrupted_after_every_step(data, uninterrupted, tmp_path):
    steps = 0
    for at in range(1, 16):
        with Signals(at), pytest.raises(Interrupted):
            train(data["arrays"], out=tmp_path / "run", resume=at > 1, **SETTINGS)
        steps += 1
    train(data["arrays"], out=tmp_path / "run", resume=True, **SETTINGS)
    assert rows(tmp_path / "run")[-1]["step"] == steps == 15
    assert fingerprints(tmp_path / "run") == fingerprints(uninterrupted("arrays"))


def test_the_number_of_workers_changes_nothing_and_may_change_on_resume(data, uninterrupted, tmp_path):
    train(data["folder"], out=tmp_path / "none", workers=0, **SETTINGS)
    assert fingerprints(tmp_path / "none") == fingerprints(uninterrupted("folder"))
    stopped_and_resumed(
        data["folder"], tmp_path / "run", 4, workers=0, resumes=dict(workers=2, keep=5), **SETTINGS
    )
    assert fingerprints(tmp_path / "run") == fingerprints(uninterrupted("folder"))


def test_another_seed_gives_another_run(data, uninterrupted, tmp_path):
    """Otherwise all of the above would hold for a run that does not train at all."""
    train(data["arrays"], out=tmp_path / "run", seed=1, **SETTINGS)
    one, other = fingerprints(tmp_path / "run"), fingerprints(uninterrupted("arrays"))
    assert [name for name in one if one[name] == other[name]] == ["sums.safetensors"]  # zero after an epoch
    first, *_, last = rows(tmp_path / "run")
    assert last["loss"] < first["loss"]


def test_muon_resumes_exactly(data, tmp_path):
    settings = {**SETTINGS, "optimizer": "muon"}
    train(data["arrays"], out=tmp_path / "uninterrupted", **settings)
    stopped_and_resumed(data["arrays"], tmp_path / "run", 7, **settings)
    assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "uninterrupted")


def test_sgd_with_a_linear_schedule_and_no_ema_resumes_exactly(data, tmp_path):
    settings = {**SETTINGS, "optimizer": "sgd", "momentum": 0.9, "ema": None, "schedule": "linear"}
    train(data["arrays"], out=tmp_path / "uninterrupted", **settings)
    stopped_and_resumed(data["arrays"], tmp_path / "run", 7, **settings)
    assert fingerprints(tmp_path / "run") == fingerprints(tmp_path / "uninterrupted")
    assert "ema.safetensors" not in fingerprints(tmp_path / "run")


def test_with_fewer_checkpoints_than_epochs_the_newest_is_resumed(data, tmp_path):
    settings = {**SETTINGS, "save_every": 2, "evaluate_every": 2}
    train(data["arrays"], out=tmp_path / "uninterrupted", **settings)
    out = tmp_path / "run"
    stopped_and_resumed(data["arrays"], out, 12, **settings)
    assert fingerprints(out) == fingerprints(tmp_path / "uninterrupted")
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


@pytest.mark.slow
def test_killed_at_ten_random_moments(tmp_path):
    assert kill(tmp_path, 10, seed=1, limit=120) >= 10


@pytest.mark.slow
def test_killed_at_two_hundred_random_moments(tmp_path):
    assert kill(tmp_path, 200, seed=2, limit=1800) >= 200


# ---- the run directory -------------------------------------------------------------------------


def test_resuming_a_finished_run_changes_nothing(data, uninterrupted, tmp_path):
    before = file_hashes(uninterrupted("arrays"))
    callback = RecordingCallback()
    done = train(data["arrays"], out=uninterrupted("arrays"), resume=True, callback=callback, **SETTINGS)
    assert file_hashes(uninterrupted("arrays")) == before
    assert done.metrics == rows(uninterrupted("arrays"))
    assert callback.rows == []


def test_a_folder_that_is_not_empty_is_refused(data, uninterrupted, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    before = file_hashes(tmp_path)
    with pytest.raises(FileError, match=r"out= must be a new or empty folder.* resume=True"):
        train(data["arrays"], out=tmp_path, **SETTINGS)
    with pytest.raises(FileError, match="out= must be a new or empty folder"):
        train(data["arrays"], out=tmp_path, resume=True, **SETTINGS)
    with pytest.raises(FileError, match="out= must be a new or empty folder"):
        train(data["arrays"], out=tmp_path / "thesis.tex", **SETTINGS)
    with pytest.raises(FileError, match=r"new or empty folder.* holds a run; resume it with vt\.train"):
        train(data["arrays"], out=uninterrupted("arrays"), **SETTINGS)
    assert file_hashes(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(lr=1e-3), r"train\.lr is 0\.001, but 0\.003 in the run"),
        (dict(epochs=2), r"train\.epochs is 2, but 3 in the run.* only be added"),
        (dict(seed=3), r"train\.seed is 3, but 0 in the run"),
        (dict(model=dict(SETTINGS["model"], depth=1)), r"model\.depth is 1, but 2 in the run"),
        (dict(mixing=dict(mixup=0.0)), r"train\.mixing is "),
    ],
)
def test_resuming_with_other_settings_is_refused(change, message, data, uninterrupted):
    before = file_hashes(uninterrupted("arrays"))
    with pytest.raises(ConfigError, match=message):
        train(data["arrays"], out=uninterrupted("arrays"), resume=True, **{**SETTINGS, **change})
    assert file_hashes(uninterrupted("arrays")) == before


def test_resuming_with_other_data_is_refused(data, uninterrupted, tmp_path):
    other = write_arrays(tmp_path / "data.npz", count=90)
    with pytest.raises(ConfigError, match=r"data\.train_images is 90, but 80 in the run"):
        train(other, out=uninterrupted("arrays"), resume=True, **SETTINGS)
    images = shutil.copytree(data["folder"], tmp_path / "images")
    (images / "ant" / "00.jpg").rename(images / "ant" / "zz.jpg")
    with pytest.raises(ConfigError, match=r"data\.digest is "):
        train(images, out=uninterrupted("folder"), resume=True, **SETTINGS)


@pytest.fixture
def split_folder(tmp_path):
    """Image files with a validation set of their own, so that contents do not decide what is held out."""
    write_folder(tmp_path / "images" / "train")
    write_folder(tmp_path / "images" / "val", each=3)
    return tmp_path / "images"


@pytest.mark.parametrize("records_order", [True, False])
def test_images_with_other_contents_under_the_same_names_are_refused(split_folder, records_order, tmp_path):
    out, ants = tmp_path / "run", split_folder / "train" / "ant"
    with Signals(7), pytest.raises(Interrupted):
        train(split_folder, out=out, **SETTINGS)
    if not records_order:  # as Vitrail wrote the file before
        with np.load(out / "fingerprint.npz") as file:
            arrays = {name: file[name] for name in file.files if name != "contents"}
        np.savez(out / "fingerprint.npz", **arrays)
    before, original = file_hashes(out), (ants / "01.png").read_bytes()
    Image.new("L", (20, 20), 3).save(ants / "01.png")
    for epochs in (SETTINGS["epochs"], 9):
        with pytest.raises(InputError, match=r"contents of train/ant/01.png have changed.*Restore") as error:
            train(split_folder, out=out, resume=True, **{**SETTINGS, "epochs": epochs})
        assert "more" not in str(error.value)
    (ants / "03.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"train/ant/01.png and 1 more have changed"):
        train(split_folder, out=out, resume=True, **SETTINGS)
    assert file_hashes(out) == before
    shutil.copy(ants / "05.png", ants / "03.png")
    (ants / "01.png").write_bytes(original)
    if records_order:
        with pytest.raises(InputError, match="have exchanged their names or were copied"):
            train(split_folder, out=out, resume=True, **SETTINGS)


def test_arrays_with_other_contents_are_refused_and_a_finished_run_is_not_read(tmp_path):
    data, out = write_arrays(tmp_path / "data.npz"), tmp_path / "run"
    train(data, out=out, **SETTINGS)
    with np.load(data) as file:
        arrays = dict(file)
    arrays["x_train"][[3, 4]] = 1
    np.savez(data, **arrays)
    train(data, out=out, resume=True, **SETTINGS)
    with pytest.raises(InputError, match=r"contents of .*3 and 1 more have changed"):
        train(data, out=out, resume=True, **{**SETTINGS, "epochs": 4})


def test_files_that_are_unchanged_are_not_read_again(split_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(content, "_SLOW", 0.0)  # seconds that are worth a cache
    monkeypatch.setattr(content, "_FRESH", -3600.0)
    read, real = [], content.file_key
    monkeypatch.setattr(content, "file_key", lambda path: read.append(path.name) or real(path))
    with Signals(7), pytest.raises(Interrupted):
        train(split_folder, out=tmp_path / "run", **SETTINGS)
    assert len(read) == 66
    read.clear()
    Image.new("L", (20, 20), 3).save(split_folder / "train" / "ant" / "01.png")
    with pytest.raises(InputError, match="have changed"):
        train(split_folder, out=tmp_path / "run", resume=True, **SETTINGS)
    assert read == ["01.png"]


def test_resume_without_a_run_or_a_checkpoint_starts_at_zero_with_a_message(data, uninterrupted, tmp_path):
    callback = RecordingCallback()
    train(data["arrays"], out=tmp_path / "new", resume=True, callback=callback, **SETTINGS)
    assert sum("no complete checkpoint" in note and "step 0" in note for note in callback.notes) == 1
    assert fingerprints(tmp_path / "new") == fingerprints(uninterrupted("arrays"))

    out, callback = tmp_path / "started", RecordingCallback()
    out.mkdir()
    shutil.copy(uninterrupted("arrays") / "config.json", out)
    train(data["arrays"], out=out, resume=True, callback=callback, **SETTINGS)
    assert any("no complete checkpoint" in note and "step 0" in note for note in callback.notes)
    assert fingerprints(out) == fingerprints(uninterrupted("arrays"))


def test_a_run_killed_while_its_folder_was_created_can_be_resumed(data, uninterrupted, tmp_path):
    for name in ("environment.json", ".0123456789abcdef.part"):
        (tmp_path / name).write_text("{")
    train(data["arrays"], out=tmp_path, resume=True, **SETTINGS)
    assert fingerprints(tmp_path) == fingerprints(uninterrupted("arrays"))
    assert not partial_files(tmp_path)


def test_an_invalid_config_is_an_error(data, tmp_path):
    (tmp_path / "config.json").write_text('{"model": {')
    with pytest.raises(FileError, match=r"config\.json is not the config\.json of a run"):
        train(data["arrays"], out=tmp_path, resume=True, **SETTINGS)
    assert Path(tmp_path / "config.json").read_text() == '{"model": {'


def test_a_run_directory_of_version_0_1_is_refused_with_advice(data, uninterrupted, tmp_path):
    """0.1 wrote no version, and other names of fields. Its weights load and can be started from."""
    out = shutil.copytree(uninterrupted("arrays"), tmp_path / "old")
    config = json.loads((out / "config.json").read_text())
    assert config.pop("version") == 3
    config["train"]["calm"] = config["train"].pop("mixing_off")
    config["data"] = {"images": 80, "held_out": 30, "classes": ["0", "1", "2"], "names": "0" * 16}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    before = file_hashes(out)
    with pytest.raises(
        FileError, match=r"0\.1.* cannot resume.* weights still load.*from_='\S*last\.safetensors"
    ):
        train(data["arrays"], out=out, resume=True, **SETTINGS)
    with pytest.raises(FileError, match="out= must be a new or empty folder"):
        train(data["arrays"], out=out, **SETTINGS)
    assert file_hashes(out) == before
    run = train(data["arrays"], out=tmp_path / "new", from_=out / "last.safetensors", epochs=1, batch=16)
    assert run.metrics[-1]["val_images"] == 30


def test_a_run_directory_of_a_later_version_is_refused(data, uninterrupted, tmp_path):
    out = shutil.copytree(uninterrupted("arrays"), tmp_path / "later")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "version": 99}))
    with pytest.raises(FileError, match=r"another version of Vitrail \(format 99\)"):
        train(data["arrays"], out=out, resume=True, **SETTINGS)
