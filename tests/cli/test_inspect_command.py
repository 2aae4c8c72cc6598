"""`vitrail inspect` as a user runs it."""

import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from vitrail.inspect.sample import FILE


def inspect(*arguments, cwd):
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "vitrail", "inspect", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def digits(tmp_path):
    (tmp_path / "digits").mkdir()
    for n in range(2):
        ink = np.zeros((28, 28), dtype=np.uint8)
        ink[4:24, 10 + 4 * n : 14 + 4 * n] = 255
        Image.fromarray(ink).save(tmp_path / "digits" / f"{n}.png")
    return tmp_path / "digits"


def test_a_page_of_some_figures(tmp_path, digits):
    done = inspect(
        FILE, digits, "--only", "filters, attention", "--layer", 0, "--head", 3, "--target", 7, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Written: inspection, with index.html and every figure as .png, .svg and .csv.\n"
    found = {path.name for path in (tmp_path / "inspection").iterdir()}
    assert {"index.html", "filters.png", "attention.csv"} <= found
    assert not [name for name in found if name.startswith("rollout")]
    assert "--layer 0 --head 3" in (tmp_path / "inspection" / "index.html").read_text()


def test_a_picture_that_cannot_be_read_is_named_with_exit_code_1(tmp_path, digits):
    (digits / "2.png").write_bytes(b"not one")
    done = inspect(FILE, digits, "--only", "distance", "--out", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "2.png could not be read" in done.stdout
    assert (tmp_path / "out" / "index.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([FILE, "nowhere.png"], "A picture must be there. Got nowhere.png, which is not."),
        (["nowhere.safetensors"], "nowhere.safetensors"),
        ([FILE, "empty"], "A folder must hold pictures. Got empty with none."),
        ([FILE, "digits", "--only", "atention"], "Did you mean 'attention'?"),
        ([FILE, "digits", "--only", "attention", "--layer", 2], "from 0 to 1. Got 2."),
        ([FILE, "digits", "--only", "attention", "--head", 4], "from 0 to 3. Got 4."),
        ([FILE, "digits", "--target", "cat"], "--target must be one of the model's classes. Got cat."),
        ([FILE, "--only", "rollout"], "The figure rollout needs pictures."),
        ([FILE, "--out", "digits"], "--out must be a new or an empty folder"),
        ([FILE, "digits/0.png", "--only", "attention", "--size", "30"], ""),
    ],
)
def test_what_is_wrong_is_a_sentence(tmp_path, digits, arguments, said):
    (tmp_path / "empty").mkdir()
    done = inspect(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["digits", "empty"]
