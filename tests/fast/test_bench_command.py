"""`vitrail bench`: a table of speed and agreement, as text and JSON."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitrail as vt
from vitrail.cli import app
from vitrail.evaluation import speed
from vitrail.fast.accelerate import read_calibration
from vitrail.fast.choices import choices_path
from vitrail.fast.gate import split_images


@pytest.fixture(autouse=True)
def _fast(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(speed, "_SECONDS", 0.05)


def run(*arguments):
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "80"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    vit = vt.ViT(vt.ViTConfig(width=16, depth=1, heads=2, patch=4, size=8, classes=2))
    torch.nn.init.normal_(vit.head.weight)
    vt.Bundle(model=vit, labels=["dark", "light"]).save(tmp_path / "two.safetensors")
    return tmp_path / "two.safetensors"


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for name, low in (("dark", 0), ("light", 128)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(low, low + 128, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


@pytest.mark.slow
def test_a_model_with_images(model, photos, tmp_path):
    out = tmp_path / "out.json"
    done = run(model, photos, "--batch", "1,4", "--min-agreement", 0, "--json", out)
    assert done.exit_code == 0, done.output
    table = [line for line in done.stdout.splitlines() if line.startswith(("PyTorch", "ONNX", "timm", " "))]
    assert len(table) > 4
    assert all(len(line) <= 80 for line in table)
    result = json.loads(out.read_text())
    assert result["images"] == 8
    rows = [row for row in result["rows"] if not row["error"]]
    assert {row["batch"] for row in rows} == {1, 4}
    assert {"PyTorch, as it is"} < {row["name"] for row in rows}
    assert all(row["images_per_second"] > 0 and row["p99_ms"] >= row["p50_ms"] for row in rows)
    plain = next(row for row in rows if row["name"] == "PyTorch, as it is")
    assert plain["agreement"] == 1.0
    assert 0 <= plain["top1"] <= 1


def test_images_of_calibration_and_comparison_are_disjoint(model, photos):
    calibration, images, labels = split_images(*read_calibration(vt.load(model), photos))
    assert len(calibration) == len(images) == len(labels) == 8
    distances = (calibration[:, None] - images[None]).abs().amax((2, 3, 4))
    assert (distances > 0).all()


def test_a_size_is_measured_without_a_file(monkeypatch):
    monkeypatch.setattr("vitrail.fast.inference_routes.find_spec", lambda name: None)  # PyTorch alone
    done = run("mu/4", "--batch", "2")
    assert done.exit_code == 0
    assert "PyTorch, as it is" in done.stdout


def test_forget():
    choices_path().parent.mkdir(parents=True)
    choices_path().write_text("{}")
    assert "Forgotten" in run("--forget").stdout
    assert not choices_path().exists()
    assert "Nothing" in run("--forget").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "No model given"),
        (["mu/4", "no-such-folder"], "must be a folder"),
        (["mu/4", "--precision", "int9"], "Unknown precision 'int9'"),
        (["mu/4", "--batch", "0"], "--batch takes numbers"),
    ],
)
def test_bad_arguments_are_explained(arguments, words):
    with pytest.raises(vt.InputError, match=words):
        run(*arguments)
