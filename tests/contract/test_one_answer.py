"""An image gets the same prediction in training, on the command line, over HTTP and in ONNX."""

import json
import urllib.request

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from tests.support.command import run_command
from tests.support.serving import serve_command
from vitrail.evaluation.forward import run_model
from vitrail.exporters.onnx import write_onnx
from vitrail.images.formats.sources import open_dataset
from vitrail.images.loader import Reader
from vitrail.predict.image_sources import read_pixels

SIDES = [(61, 97), (97, 61), (40, 40), (128, 30)]
SAME, OTHER_RUNTIME = 1e-5, 1e-4


def write_image(kind, number, path):
    """An image of one of two classes; every third is rotated by an EXIF tag, as in photos of phones."""
    high, wide = SIDES[number % len(SIDES)]
    rng = np.random.default_rng(1000 * kind + number)
    noise = rng.integers(0, 256, (high, wide, 3)).astype(np.uint8)
    noise[..., kind] = np.linspace(0, 255, wide).astype(np.uint8)
    exif = Image.Exif()
    if number % 3 == 0:
        exif[0x0112] = 6
    Image.fromarray(noise).save(path, quality=90, exif=exif)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Photos, a model trained on them, and the model exported to ONNX."""
    root = tmp_path_factory.mktemp("one")
    for kind, name in enumerate(["reds", "greens"]):
        for split, count in (("train", 12), ("val", 6)):
            images = root / "photos" / split / name
            images.mkdir(parents=True)
            for number in range(count):
                write_image(kind, number + 100 * (split == "val"), images / f"{number}.jpg")
    small = dict(recipe="small", model=dict(width=16, depth=2, heads=2))
    run = vt.train(
        root / "photos", out=root / "run", epochs=30, lr=0.01, ema=None, size=32, report=False, **small
    )
    run.bundle.save(root / "model.safetensors")
    write_onnx(run.bundle, root / "model.onnx")
    return root


@pytest.fixture(scope="module")
def expected(folder):
    """Paths, pixels, logits and labels of the validation images, as evaluated in training."""
    bundle, data = vt.load(folder / "model.safetensors"), open_dataset(folder / "photos")
    split = data.eval_split
    logits, valid = run_model(bundle.model, split, bundle.preprocess, batch=5)
    assert valid.all()
    assert logits.softmax(dim=1).std() > 0.01, "equal predictions would hide a mix-up"
    (batch,) = Reader(split, bundle.preprocess).batches([(0, torch.arange(len(split)))])
    pixels = list(batch.images.permute(0, 2, 3, 1).numpy())
    return split.paths, pixels, logits, bundle.labels


def differences(scores, expected):
    """The largest difference between {path: {label: score}} and the expected scores."""
    paths, _, logits, labels = expected
    theirs = torch.tensor([[scores[str(path)][label] for label in labels] for path in paths])
    return (theirs - logits.double().softmax(dim=1)).abs().max().item()


def check_ood(said, folder):
    """Check {path: (ood, ood_score)} against the statistics in the file and the embeddings in PyTorch."""
    statistics = vt.load(folder / "model.safetensors").statistics
    for one in vt.Predictor(folder / "model.safetensors")([*said]):
        (expected,) = statistics.scores(one.embedding[None])
        ood, score = said[one.name]
        assert score == pytest.approx(expected, rel=1e-3)
        assert ood == (score > 1)


def test_pixels_are_bit_equal(folder, expected):
    paths, pixels, _, _ = expected
    preprocess = vt.load(folder / "model.safetensors").preprocess
    for path, image in zip(paths, pixels, strict=True):
        actual = read_pixels(path, preprocess)
        assert np.array_equal(actual, np.asarray(image).reshape(*preprocess.target, 3))


@pytest.mark.parametrize(("file", "limit"), [("model.safetensors", SAME), ("model.onnx", OTHER_RUNTIME)])
def test_on_the_command_line(folder, expected, file, limit):
    images, options = folder / "photos" / "val", ("--format", "jsonl", "--top", "2")
    done = run_command("predict", folder / file, images, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    scores = {row["file"]: {entry["label"]: entry["score"] for entry in row["top"]} for row in rows}
    assert differences(scores, expected) < limit
    check_ood({row["file"]: (row["ood"], row["ood_score"]) for row in rows}, folder)


@pytest.mark.parametrize(("file", "limit"), [("model.safetensors", SAME), ("model.onnx", OTHER_RUNTIME)])
def test_over_http(folder, expected, file, limit):
    scores, ood = {}, {}
    with serve_command(folder / file) as address:
        for path in expected[0]:
            request = urllib.request.Request(
                f"{address}/v1/predict?top=2", path.read_bytes(), {"Content-Type": "image/jpeg"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                (prediction,) = json.load(response)["predictions"]
            scores[str(path)] = {entry["label"]: entry["score"] for entry in prediction["top"]}
            ood[str(path)] = prediction["ood"], prediction["ood_score"]
    assert differences(scores, expected) < limit
    check_ood(ood, folder)


def test_at_most_five_percent_of_the_validation_images_are_out_of_distribution(folder, expected):
    predict = vt.Predictor(folder / "model.safetensors")
    flagged = [one.ood for one in predict([str(path) for path in expected[0]])]
    assert flagged.count(True) <= 0.05 * len(flagged)
    path = folder / "run" / "best.safetensors"
    assert 0 < vt.load(path).statistics.bytes <= 0.05 * path.stat().st_size
    blank = predict(np.full((64, 64, 3), 255, np.uint8))
    assert blank.ood_score > max(one.ood_score for one in predict([str(path) for path in expected[0]]))
