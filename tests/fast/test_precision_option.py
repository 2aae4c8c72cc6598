"""--precision in predict, evaluate, serve and export: what it does, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner

import vitrail as vt
from tests.support.evaluation_models import train_digits_bundle
from vitrail.cli import app
from vitrail.cli.outputs import saving_gate_report
from vitrail.fast.accelerate import read_calibration
from vitrail.fast.gate import GateError, compare
from vitrail.images.formats.sources import open_dataset


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def bundle():
    return train_digits_bundle(open_dataset("digits"))


@pytest.fixture(scope="module")
def file(bundle, tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "digits.safetensors"
    bundle.save(file)
    return file


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Forty digits as PNG files, in a folder for each class."""
    folder, digits = tmp_path_factory.mktemp("photos"), load_digits()
    for index in range(1200, 1240):
        name = folder / str(digits.target[index])
        name.mkdir(exist_ok=True)
        Image.fromarray((digits.images[index] * 15.9).astype(np.uint8)).save(name / f"{index}.png")
    return folder


def run(*arguments):
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "80"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_calibration_images_are_those_of_the_model(bundle, photos):
    images, labels = read_calibration(bundle, photos)
    assert images.shape == (40, *bundle.model.config.input_shape)
    assert labels.tolist() == [int(path.parent.name) for path in sorted(photos.rglob("*.png"))]
    images, labels = read_calibration(bundle, sorted(photos.rglob("*.png"))[:3])
    assert images.shape[0] == 3


@pytest.mark.slow
def test_an_int8_file_is_smaller_proven_and_predicts(file, bundle, photos, tmp_path):
    exact, small = tmp_path / "exact.onnx", tmp_path / "small.onnx"
    assert run("export", file, "--to", "onnx", "--out", exact).exit_code == 0
    done = run("export", file, "--to", "onnx", "--precision", "int8", "--calibration", photos,
               "--min-agreement", 0.9, "--out", small)  # fmt: skip
    assert done.exit_code == 0
    assert "agreement" in done.output
    proof = json.loads((tmp_path / "small.onnx.proof.json").read_text())
    assert proof["precision"] == "int8"
    assert proof["gate"]["passed"]
    assert proof["gate"]["agreement"] >= 0.9
    assert proof["gate"]["images"] == 20
    assert proof["checks"][0]["same_class"] == 4
    assert small.stat().st_size < 0.8 * exact.stat().st_size
    paths = sorted(photos.rglob("*.png"))
    found, expected = vt.Predictor(small)(paths), vt.Predictor(file)(paths)
    pairs = list(zip(found, expected, strict=True))[1::2]  # the others set the ranges
    same = [one.label == two.label for one, two in pairs]
    assert np.mean(same) == pytest.approx(proof["gate"]["agreement"])
    assert any(one.score != two.score for one, two in zip(found, expected, strict=True))


def test_an_older_report_of_the_gate_stays_and_is_named(tmp_path):
    older = tmp_path / "x.onnx.gate.json"
    older.write_text("mine")
    logits = torch.eye(2)
    gate = compare(logits, -logits, precision="int8", min_agreement=1.0)
    named = pytest.raises(vt.InputError, match=r"x.onnx.gate.json exists already.*remove it")
    with named, saving_gate_report(tmp_path / "x.onnx"):
        raise GateError(gate)
    assert older.read_text() == "mine"


@pytest.mark.slow
def test_a_gate_that_fails_writes_only_its_report(file, photos, tmp_path):
    arguments = ["--to", "onnx", "--precision", "int8", "--calibration", photos, "--out", tmp_path / "x.onnx"]
    noise = tmp_path / "noise"
    noise.mkdir()
    rng = np.random.default_rng(0)
    for index in range(200):
        Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(noise / f"{index}.png")
    arguments[arguments.index(photos)] = noise
    with pytest.raises(vt.InputError, match="The layers that hurt most: blocks"):
        run("export", file, *arguments, "--min-agreement", 1.0)
    assert [file.name for file in tmp_path.glob("x.onnx*")] == ["x.onnx.gate.json"]
    report = json.loads((tmp_path / "x.onnx.gate.json").read_text())
    assert not report["passed"]
    assert report["images"] == 100
    assert next(iter(report["layers"])).startswith("blocks.")


@pytest.mark.slow
def test_predict_and_evaluate_say_what_they_did(file, photos):
    how = ["--precision", "int8", "--calibration", photos, "--min-agreement", 0.9]
    done = run("predict", file, photos / "3", "--format", "csv", *how)
    assert done.exit_code == 0
    assert "held-out images" in done.stderr
    assert len(done.stdout.splitlines()) == 1 + len(list((photos / "3").iterdir()))
    done = run("evaluate", file, photos, *how, "--json", "-")
    result = json.loads(done.stdout)
    assert any("held-out images" in note for note in result["notes"])
    plain = vt.evaluate(file, photos)
    assert abs(result["metrics"]["top1"] - plain.metrics.top1) <= 0.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "MODEL", "x.png", "--precision", "int4"], "Unknown precision 'int4'"),
        (["predict", "MODEL", "x.png", "--calibration", "photos"], "--calibration is for --precision"),
        (["predict", "MODEL", "x.png", "--keep", "auto"], "--keep is for --precision"),
        (["predict", "MODEL", "x.png", "--precision", "int8"], "--calibration"),
        (["predict", "MODEL", "x.png", "--precision", "int8", "--calibration", "none"], "in a folder"),
        (["predict", "MODEL", "x.png", "--precision", "bf16"], "GPUs only"),
        (["predict", "MODEL", "x.png", "--out", "parts/", "--precision", "int8"], "folder of parts"),
        (["evaluate", "MODEL", "digits", "--precision", "fp32", "--probe", "knn"], "Probes"),
        (["export", "MODEL", "--to", "onnx", "--precision", "int8"], "--calibration"),
        (["export", "MODEL", "--to", "onnx", "--precision", "bf16"], "fp32 or int8"),
        (
            ["export", "MODEL", "--to", "torch-export", "--precision", "int8"],
            "--precision is not for --to torch-export",
        ),
    ],
)
def test_what_cannot_be_done_is_said(file, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(vt.InputError, match=words):
        run(*[str(file) if argument == "MODEL" else argument for argument in arguments])
