"""Where a run goes without --out: a new folder that no other run takes."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.command import run_command
from tests.support.tiny_runs import write_arrays
from vitrail.base.safe_files import run_folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("photos/", "photos"),
        (Path("/data/pets.v2.csv"), "pets-v2"),
        ("train-{000..127}.tar", "train-000-127"),
        (object(), "run"),
        (None, "run"),
        ("..", None),
    ],
)
def test_the_name_is_that_of_the_data(here, data, name):
    with run_folder(None, data) as folder:
        assert folder.parent == Path("runs")
        assert folder.is_dir()
        assert name in (None, folder.name)
    with run_folder("given", data) as folder:
        assert folder == Path("given")


def test_runs_at_once_get_folders_of_their_own(here):
    def start(number):
        with run_folder(None, "photos") as folder:
            (folder / "config.json").touch()
            return folder.name

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(start, range(24)))
    assert sorted(names) == sorted(["photos", *(f"photos-{number}" for number in range(2, 25))])


def test_a_run_that_wrote_nothing_leaves_nothing(here):
    with pytest.raises(ZeroDivisionError), run_folder(None, "photos"):
        raise ZeroDivisionError
    assert not os.listdir(here)
    (here / "runs").mkdir()
    with run_folder(None, "photos"):
        pass
    assert os.listdir(here) == ["runs"]


def test_processes_agree_and_create_nothing(here, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    (here / "runs" / "photos").mkdir(parents=True)
    for _ in range(2):
        with run_folder(None, "photos") as folder:
            assert folder == Path("runs/photos-2")
    assert os.listdir(here / "runs") == ["photos"]


def test_the_command_numbers_its_runs(tmp_path):
    write_arrays(tmp_path / "bars.npz")
    options = ["bars.npz", "--recipe=digits", "--epochs=1", "--set=model.depth=1", "--set=model.width=16"]
    failed = run_command("train", "bars.npz", "--epochs=1", "--recipe=nothing", cwd=tmp_path)
    assert failed.returncode == 2
    assert not (tmp_path / "runs").exists()
    dry = run_command("train", *options, "--dry-run", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    assert not (tmp_path / "runs").exists()
    for name in ("bars", "bars-2"):
        done = run_command("train", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"The run directory is runs/{name}." in done.stdout
        assert (tmp_path / "runs" / name / "best.safetensors").exists()
    lost = run_command("train", *options, "--resume", cwd=tmp_path)
    assert lost.returncode == 2
    assert "--resume needs --out" in lost.stderr
