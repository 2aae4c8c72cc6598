"""The promise of the house: a picture gets the same answer in training, on the command line, over HTTP and in ONNX."""

import json
import re
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from vitrail.data.loader import Reader
from vitrail.data.sources import open_data
from vitrail.evaluation.forward import outputs_of
from vitrail.export.onnx import write_onnx
from vitrail.predict.sources import levels

SIDES = [(61, 97), (97, 61), (40, 40), (128, 30)]
SAME, OTHER_RUNTIME = 1e-5, 1e-4


def draw(kind, number, path):
    """A picture of one of two kinds; every third is turned by its EXIF tag alone, as telephones do it."""
    high, wide = SIDES[number % len(SIDES)]
    chance = np.random.default_rng(1000 * kind + number)
    noise = chance.integers(0, 256, (high, wide, 3)).astype(np.uint8)
    noise[..., kind] = np.linspace(0, 255, wide).astype(np.uint8)
    exif = Image.Exif()
    if number % 3 == 0:
        exif[0x0112] = 6
    Image.fromarray(noise).save(path, quality=90, exif=exif)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Photographs, a model trained on them, and what it was exported to."""
    place = tmp_path_factory.mktemp("one")
    for kind, name in enumerate(["reds", "greens"]):
        for split, count in (("train", 12), ("val", 6)):
            folder = place / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                draw(kind, number + 100 * (split == "val"), folder / f"{number}.jpg")
    small = dict(width=16, depth=2, heads=2)
    run = vt.train(
        place / "photos", out=place / "run", epochs=30, lr=0.01, ema=None, size=32, model=small, report=False
    )
    run.bundle.save(place / "model.safetensors")
    write_onnx(run.bundle, place / "model.onnx")
    return place


@pytest.fixture(scope="module")
def expected(place):
    """Levels, scores and labels of every held-out picture, as training judges them."""
    bundle, data = vt.load(place / "model.safetensors"), open_data(place / "photos")
    split = data.held_out
    logits, kept = outputs_of(bundle.model, split, bundle.preprocess, batch=5)
    assert kept.all()
    assert logits.softmax(dim=1).std() > 0.01, "a model that says the same to all would hide a mix-up"
    reader = Reader(split, bundle.preprocess)
    pixels = [reader.read(number, [0.0] * 4) for number in range(len(split))]
    return split.paths, pixels, logits, bundle.labels


def differences(scores, expected):
    """Between the scores of each picture, given as {label: score}, and training's."""
    paths, _, logits, labels = expected
    theirs = torch.tensor([[scores[str(path)][label] for label in labels] for path in paths])
    return (theirs - logits.double().softmax(dim=1)).abs().max().item()


def test_the_pixels_are_the_same_to_the_bit(place, expected):
    paths, pixels, _, _ = expected
    spec = vt.load(place / "model.safetensors").preprocess
    for path, seen in zip(paths, pixels, strict=True):
        assert np.array_equal(levels(path, spec), np.asarray(seen).reshape(*spec.target, 3))


@pytest.mark.parametrize(("file", "limit"), [("model.safetensors", SAME), ("model.onnx", OTHER_RUNTIME)])
def test_on_the_command_line(place, expected, file, limit):
    command = [sys.executable, "-m", "vitrail", "predict", place / file, place / "photos" / "val"]
    done = subprocess.run(
        [*command, "--format", "jsonl", "--top", "2"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    scores = {row["file"]: {one["label"]: one["score"] for one in row["top"]} for row in rows}
    assert differences(scores, expected) < limit


@pytest.mark.parametrize(("file", "limit"), [("model.safetensors", SAME), ("model.onnx", OTHER_RUNTIME)])
def test_over_http(place, expected, file, limit):
    scores = {}
    with serving(place / file) as address:
        for path in expected[0]:
            asked = urllib.request.Request(
                f"{address}/v1/predict?top=2", path.read_bytes(), {"Content-Type": "image/jpeg"}
            )
            with urllib.request.urlopen(asked, timeout=60) as answer:
                (found,) = json.load(answer)["predictions"]
            scores[str(path)] = {one["label"]: one["score"] for one in found["top"]}
    assert differences(scores, expected) < limit


@contextmanager
def serving(model):
    """`vitrail serve`, as a user starts it; its address."""
    command = [sys.executable, "-m", "vitrail", "serve", str(model), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        for line in process.stdout:
            if found := re.search(r"http://[\d.:]+", line):
                yield found[0]
                break
        else:
            raise AssertionError("the server said no address")
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
