"""`vitrail inspect` in a subprocess."""

import os

import numpy as np
import pytest
from PIL import Image

from tests.support.command import run_command
from vitrail.views.sample import SAMPLE_FILE


def inspect(*arguments, cwd):
    return run_command("inspect", *arguments, cwd=cwd)


@pytest.fixture
def digits(tmp_path):
    (tmp_path / "digits").mkdir()
    for n in range(2):
        pixels = np.zeros((28, 28), dtype=np.uint8)
        pixels[4:24, 10 + 4 * n : 14 + 4 * n] = 255
        Image.fromarray(pixels).save(tmp_path / "digits" / f"{n}.png")
    return tmp_path / "digits"


def test_some_figures(tmp_path, digits):
    done = inspect(
        SAMPLE_FILE,
        digits,
        "--only",
        "filters, attention",
        "--layer",
        0,
        "--head",
        3,
        "--target",
        7,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Saved inspection/index.html")
    names = {path.name for path in (tmp_path / "inspection").iterdir()}
    assert {"index.html", "filters.png", "attention.csv"} <= names
    assert not [name for name in names if name.startswith("rollout")]
    assert "--layer 0 --head 3" in (tmp_path / "inspection" / "index.html").read_text()


def test_an_unreadable_image_is_listed_with_exit_code_1(tmp_path, digits):
    (digits / "2.png").write_bytes(b"not an image")
    done = inspect(SAMPLE_FILE, digits, "--only", "distance", "--out", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "2.png could not be read" in done.stdout
    assert (tmp_path / "out" / "index.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SAMPLE_FILE, "nowhere.png"], "nowhere.png does not exist"),
        (["nowhere.safetensors"], "nowhere.safetensors"),
        ([SAMPLE_FILE, "empty"], "empty has no images"),
        ([SAMPLE_FILE, "digits", "--only", "atention"], "Did you mean 'attention'?"),
        ([SAMPLE_FILE, "digits", "--only", "attention", "--layer", 2], "from 0 to 1"),
        ([SAMPLE_FILE, "digits", "--only", "attention", "--head", 4], "from 0 to 3"),
        ([SAMPLE_FILE, "digits", "--target", "cat"], "no class 'cat' for --target"),
        ([SAMPLE_FILE, "--only", "rollout"], "rollout"),
        ([SAMPLE_FILE, "--out", "digits"], "--out must name a new or empty folder"),
        ([SAMPLE_FILE, "digits/0.png", "--only", "attention", "--size", "30"], ""),
    ],
)
def test_wrong_use_is_one_message(tmp_path, digits, arguments, message):
    (tmp_path / "empty").mkdir()
    done = inspect(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["digits", "empty"]
