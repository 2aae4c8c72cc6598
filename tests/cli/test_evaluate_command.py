"""`vitrail evaluate`: its output, files and errors. tests/evaluation tests vt.evaluate."""

import csv
import json
import re

import pytest
from typer.testing import CliRunner

import vitrail as vt
from tests.support.command import run_command
from tests.support.evaluation_models import equal_results, train_digits_bundle, write_two_classes
from vitrail.base.errors import InputError
from vitrail.cli import app
from vitrail.evaluation.evaluate_model import evaluate
from vitrail.images.formats.sources import open_dataset


@pytest.fixture(scope="module")
def digits():
    return open_dataset("digits")


@pytest.fixture(scope="module")
def bundle(digits):
    return train_digits_bundle(digits)


@pytest.fixture(scope="module")
def file(bundle, tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "digits.safetensors"
    bundle.save(file)
    return file


@pytest.fixture
def folder(tmp_path):
    return write_two_classes(tmp_path)


def run(*arguments):
    done = CliRunner().invoke(app, ["evaluate", *map(str, arguments)], env={"COLUMNS": "80"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_digits(file, bundle, digits, tmp_path):
    out, new = tmp_path / "out.json", tmp_path / "calibrated.safetensors"
    done = run(file, "digits", "--probe", "knn,fewshot", "--layers", "0,1", "--json", out, "--calibrate", new)
    output = done.stdout
    assert done.exit_code == 0
    assert max(len(line) for line in output.splitlines() if str(new) not in line) <= 80
    result = evaluate(bundle, digits, probe=["knn", "fewshot"], layers=[0, 1])
    correct = round(360 * result.metrics.top1)
    assert f"{100 * result.metrics.top1:.2f} %, {correct} of 360 correct" in output
    for text in (
        "digits, val split: 360 images",
        "Classes",
        "Most confident mistakes",
        "Most often confused",
        "Probes: top-1 accuracy in %",
        "k=200",
        "10-shot",
        "threshold",
    ):
        assert text in output, text
    assert f"with temperature {result.calibration.temperature:.3f}, fitted on val" in " ".join(output.split())
    written = json.loads(out.read_text())
    assert written.pop("model") == str(file)
    assert equal_results(written, json.loads(json.dumps(result.as_dict())))
    metrics = vt.load(new).card.metrics
    assert metrics["temperature"] == pytest.approx(result.calibration.temperature)
    assert metrics["threshold"] == pytest.approx(result.calibration.threshold.confidence)
    again = run(new, "digits").stdout
    assert re.search(r"stored +ECE ", again)
    assert "Probes" not in again


def test_json_to_standard_output_is_all_there_is(file, bundle, digits, tmp_path):
    table = tmp_path / "rows.csv"
    done = run(file, "digits", "--json", "-", "--csv", table)
    assert done.exit_code == 0
    assert json.loads(done.stdout)["images"] == 360
    assert "Saved" in done.stderr  # not among the results
    assert table.exists()


def test_a_row_per_image_in_csv_and_json(file, bundle, digits, tmp_path):
    table, out = tmp_path / "rows.csv", tmp_path / "out.json"
    done = run(file, "digits", "--csv", table, "--json", out)
    assert done.exit_code == 0
    assert f"Saved {table}" in done.stdout.replace("\n", "")
    result = evaluate(bundle, digits)
    assert f"macro-F1        {100 * result.metrics.macro_f1:.2f} %" in done.stdout
    with table.open(newline="") as file_:
        rows = list(csv.DictReader(file_))
    written = json.loads(out.read_text())["predictions"]
    assert len(rows) == len(written) == len(digits.val) == 360
    predictor = vt.Predictor(bundle)
    expected = predictor(list(digits.val.images))
    for row, entry, label, one in zip(rows, written, digits.val.labels, expected, strict=True):
        assert row["file"] == entry["name"]
        assert row["label"] == entry["label"] == digits.classes[label]
        assert row["predicted"] == entry["predicted"] == one.label
        assert row["correct"] == ("yes" if entry["correct"] else "no")
        assert entry["correct"] == (one.label == digits.classes[label])
        assert float(row["confidence"]) == entry["confidence"] == pytest.approx(one.score, abs=1e-5)
        assert [guess["label"] for guess in entry["top"]] == [row[f"label_{n}"] for n in range(1, 6)]
        assert next(guess["label"] for guess in entry["top"]) == one.label
    assert sum(entry["correct"] for entry in written) == round(360 * result.metrics.top1)


def test_corrupt_images_are_listed_with_exit_code_1(folder):
    done = run(folder / "two.safetensors", folder / "data")
    assert done.exit_code == 1
    assert "could not be read: val/light/1.png: " in done.stdout
    assert re.search(r"evaluated +5 images; 1 could not be read", done.stdout)


def test_wrong_use(file, tmp_path):
    (tmp_path / "old.json").write_text("mine")
    for arguments, message in (
        (["--json", tmp_path / "old.json"], "old.json already exists"),
        (["--calibrate", tmp_path / "x.bin"], "--calibrate must name a .safetensors file"),
        (["--layers", "0,x"], "--layers must be all, or block numbers"),
        (
            ["--probe", "knn", "--layers", "0,7"],
            "block numbers from 0 to 1",
        ),
        (["--probe", "svm"], "Unknown probe 'svm'"),
        (["--set", "classes=0"], "A model without a head can only be probed"),
        (
            ["--set", "classes=0", "--probe", "knn", "--calibrate", tmp_path / "y.safetensors"],
            "--calibrate needs a model with a head",
        ),
    ):
        with pytest.raises(InputError) as caught:
            run(file, "digits", *arguments)
        assert message in str(caught.value)
    assert (tmp_path / "old.json").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.json"]


def test_missing_data_in_a_subprocess(file, tmp_path):
    done = run_command("evaluate", file, "no-data", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("vitrail: no-data does not exist")
    assert done.stdout == ""
