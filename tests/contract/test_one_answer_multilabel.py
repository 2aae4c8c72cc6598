"""A multi-label model gives the same labels and scores in evaluation, on the command line, over HTTP, in ONNX."""

import csv
import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from tests.support.command import run_command
from tests.support.serving import serve_command
from vitrail.evaluation.forward import run_model
from vitrail.exporters.graph import build_metadata, plan_for
from vitrail.exporters.onnx import write_onnx
from vitrail.images.formats.sources import open_dataset

CLASSES = ["blue", "green", "red"]
FILES = [("model.safetensors", 1e-5), ("model.onnx", 1e-4)]


def write_image(labels, seed, path):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 120, (40, 52, 3)).astype(np.uint8)
    for label in labels:
        pixels[..., 2 - CLASSES.index(label)] += rng.integers(60, 130, dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images with none, one or several of three labels, a model trained on them, and its ONNX file."""
    root = tmp_path_factory.mktemp("many")
    rows = []
    for number in range(96):
        labels = [label for bit, label in enumerate(CLASSES) if number >> bit & 1] or ["red"]
        write_image(labels, number, root / f"{number:02}.png")
        rows.append([f"{number:02}.png", "|".join(labels), "val" if number >= 64 else "train"])
    with (root / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label", "split"], *rows])
    small = dict(width=16, depth=2, heads=2)
    run = vt.train(
        root / "data.csv", out=root / "run", epochs=20, lr=0.01, ema=None, size=32, model=small, report=False
    )
    run.bundle.save(root / "model.safetensors")
    write_onnx(run.bundle, root / "model.onnx")
    return root


@pytest.fixture(scope="module")
def expected(folder):
    """{path: ({label: score}, labels above their thresholds)} of the validation images."""
    bundle, split = vt.load(folder / "model.safetensors"), open_dataset(folder / "data.csv").val
    logits, _ = run_model(bundle.model, split, bundle.preprocess, batch=5)
    scores = logits.double().sigmoid()
    above = scores > torch.tensor(bundle.scores.thresholds)
    assert 0 < above.sum() < above.numel()
    assert (above.sum(1) > 1).any()
    return {
        str(path): (
            dict(zip(bundle.labels, row.tolist(), strict=True)),
            {label for label, is_above in zip(bundle.labels, flags, strict=True) if is_above},
        )
        for path, row, flags in zip(split.paths, scores, above, strict=True)
    }


def check(prediction, expected, limit):
    scores, labels = expected
    top = {entry["label"]: entry["score"] for entry in prediction["top"]}
    assert max(abs(top[label] - scores[label]) for label in scores) < limit
    assert {entry["label"] for entry in prediction["labels"]} == labels
    best = max(scores, key=scores.get)
    assert prediction["label"] == (best if best in labels else prediction["label"])
    assert (prediction["label"] is None) == (not labels)
    assert prediction["score"] == pytest.approx(scores[best], abs=limit)


def test_the_file_records_sigmoid_and_the_thresholds_of_the_validation_set(folder):
    bundle = vt.load(folder / "model.safetensors")
    assert bundle.scores.activation == "sigmoid"
    assert len(bundle.scores.thresholds) == 3
    assert set(bundle.scores.thresholds) != {0.5}
    last = vt.load(folder / "run" / "last.safetensors")
    assert last.scores.activation == "sigmoid"
    assert len(last.scores.thresholds) == 3


def test_thresholds_are_no_worse_than_one_half_on_the_validation_set(folder):
    from dataclasses import replace

    bundle = vt.load(folder / "model.safetensors")
    half = replace(bundle, scores=vt.Scores(activation="sigmoid", thresholds=(0.5,) * 3))
    chosen, plain = (vt.evaluate(one, folder / "data.csv", split="val").metrics for one in (bundle, half))
    assert all(a.f1 >= b.f1 for a, b in zip(chosen.per_class, plain.per_class, strict=True))
    assert chosen.macro_f1 > 0.7


@pytest.mark.parametrize(("file", "limit"), FILES)
def test_in_python(folder, expected, file, limit):
    predict = vt.Predictor(folder / file)
    for path, wanted in expected.items():
        one = predict(path)
        assert not one.unsure
        pairs = {"labels": one.labels, "top": one.top(3)}
        lists = {name: [{"label": a, "score": b} for a, b in pair] for name, pair in pairs.items()}
        check({"label": one.label, "score": one.score, **lists}, wanted, limit)


@pytest.mark.parametrize(("file", "limit"), FILES)
def test_on_the_command_line(folder, expected, file, limit):
    done = run_command("predict", folder / file, *expected, "--format", "jsonl", "--top", "3", cwd=folder)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(expected)
    for row in rows:
        check(row, expected[row["file"]], limit)


@pytest.mark.parametrize(("file", "limit"), FILES)
def test_over_http(folder, expected, file, limit):
    with serve_command(folder / file) as address:
        for path, wanted in list(expected.items())[:6]:
            body = Path(path).read_bytes()
            request = urllib.request.Request(
                f"{address}/v1/predict?top=3", body, {"Content-Type": "image/png"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                (prediction,) = json.load(response)["predictions"]
            check(prediction, wanted, limit)
        with urllib.request.urlopen(f"{address}/v1/model", timeout=60) as response:
            model = json.load(response)
        assert (model["scores"], model["multilabel"]) == ("sigmoid", True)


def test_in_evaluation(folder, expected):
    result = vt.evaluate(folder / "model.safetensors", folder / "data.csv", split="val")
    assert len(result.predictions) == len(expected)
    names = {path.rpartition("/")[2]: wanted for path, wanted in expected.items()}
    for one in result.predictions:
        scores, labels = names[one.name.rpartition("/")[2]]
        assert set(filter(None, one.predicted.split("|"))) == labels
        assert one.confidence == pytest.approx(max(scores.values()), abs=1e-6)
        assert one.correct == (one.predicted == one.label)


def test_exports_carry_it(folder):
    bundle = vt.load(folder / "model.safetensors")
    description = json.loads(build_metadata(bundle, plan_for(bundle))["vitrail"])  # of ONNX and torch.export
    assert description["scores"] == {
        "activation": "sigmoid",
        "thresholds": list(bundle.scores.thresholds),
    }
