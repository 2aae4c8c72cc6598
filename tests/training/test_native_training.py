"""Training on images in their own shape: exact resume, one path for validation and prediction, refusals."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from typer.testing import CliRunner

import vitrail as vt
from tests.support.serving import serving
from tests.support.tiny_runs import (
    SETTINGS,
    RecordingCallback,
    Signals,
    fingerprints,
    one_thread,  # noqa: F401
    results,
    train,
    write_arrays,
)
from vitrail.cli import app
from vitrail.images.augment.pipeline import Augment
from vitrail.images.formats.sources import open_dataset
from vitrail.images.loader import Reader
from vitrail.training.trainer import Interrupted
from vitrail.weights.bundle.own_shape import use_native

SHAPES = [(40, 40), (24, 60), (64, 20), (33, 51)]
HOW = {
    **SETTINGS,
    "epochs": 2,
    "batch": 8,
    "native": True,
    "mixing": {},
    "model": {**SETTINGS["model"], "size": 16, "embedding": "linear", "position": "learned"},
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Pieces of two photographs, a class each, in four shapes."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, each in (("train", 12), ("val", 6)):
        for name, image in zip(("china", "flower"), load_sample_images().images, strict=True):
            (folder / split / name).mkdir(parents=True)
            for number in range(each):
                h, w = SHAPES[number % 4]
                top, left = rng.integers(0, image.shape[0] - h), rng.integers(0, image.shape[1] - w)
                piece = Image.fromarray(image[top : top + h, left : left + w])
                piece.save(folder / split / name / f"{number:02d}.jpg")
    return folder


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("native") / "run"
    train(photos, out=out, **HOW)
    return out


@pytest.mark.parametrize("at", [2, "evaluate"])
def test_an_interrupted_run_ends_with_the_same_bits(at, run, photos, tmp_path):
    out = tmp_path / "run"
    with Signals(at), pytest.raises(Interrupted):
        train(photos, out=out, **HOW)
    train(out=out, resume=True)
    assert fingerprints(out) == fingerprints(run)


@pytest.mark.parametrize("how", [dict(workers=2), dict(accumulate=4)])
def test_workers_and_micro_batches_change_nothing_but_rounding(how, run, photos, tmp_path):
    changed = {**HOW, "epochs": 1, "model": {**HOW["model"], "dropout": 0, "attention_dropout": 0}}
    changed["model"]["drop_path"] = 0
    expected = train(photos, out=tmp_path / "one", **{**changed, "workers": 0}).metrics[-1]["loss"]
    assert train(photos, out=tmp_path / "two", **{**changed, **how}).metrics[-1]["loss"] == pytest.approx(
        expected, abs=1e-5
    )


def test_validation_evaluation_and_prediction_are_one_path(run, photos):
    best = run / "best.safetensors"
    row = max(results(run), key=lambda row: (row["val_accuracy"], -row["val_loss"]))
    assert vt.evaluate(best, photos, split="val").metrics.top1 == pytest.approx(row["val_accuracy"])
    files = sorted((photos / "val").rglob("*.jpg"))
    predictor = vt.Predictor(best)
    assert predictor.preprocess.keeps_shape
    together = predictor(files)
    accuracy = np.mean([one.label == file.parent.name for one, file in zip(together, files, strict=True)])
    assert accuracy == pytest.approx(row["val_accuracy"])
    for file, one in zip(files, together, strict=True):
        np.testing.assert_allclose(predictor(file).logits, one.logits, atol=1e-5)  # without neighbors
    squashed = vt.Predictor(best, native=False)(files)
    assert max(np.abs(a.logits - b.logits).max() for a, b in zip(squashed, together, strict=True)) > 1e-3


def test_a_file_that_cannot_be_read(photos, tmp_path):
    import shutil

    shutil.copytree(photos, tmp_path / "data")
    (tmp_path / "data" / "train" / "china" / "00.jpg").write_bytes(b"no image")
    out = tmp_path / "run"
    metrics = train(tmp_path / "data", out=out, **{**HOW, "epochs": 1, "corrupt": "skip"}).metrics
    assert metrics[-1]["corrupt_files"] == 1
    with pytest.raises(vt.VitrailError, match=r"00\.jpg"):
        train(tmp_path / "data", out=tmp_path / "other", **{**HOW, "epochs": 1})


def test_crops_of_wide_images_are_wide(photos):
    data = open_dataset(photos)
    model = vt.create("mu/4@16", classes=2)
    reading = use_native(model, vt.Preprocess(size=16))
    reader = Reader(data.train, reading, augment=Augment(crop=0.5))
    (batch,) = reader.batches([(0, torch.arange(len(data.train)))])
    ratios = []
    for image, name in zip(batch.unpack(), data.train.names, strict=True):
        c, h, w = image.shape
        assert c == 3
        assert h % 4 == w % 4 == 0
        assert h * w <= 16 * 16
        with Image.open(photos / name if (photos / name).exists() else photos / "train" / name) as file:
            ratios.append((file.width / file.height, w / h))
    assert all(ratio > 1.2 for own, ratio in ratios if own > 2)
    assert all(ratio < 0.8 for own, ratio in ratios if own < 0.5)


def test_the_server_keeps_the_shape(run, photos):
    predictor, file = vt.Predictor(run / "best.safetensors"), photos / "val" / "flower" / "01.jpg"
    with serving(predictor) as server:
        status, said = server.predict(file.read_bytes(), kind="image/jpeg")[:2]
        assert server.get("/v1/model")[1]["native"] is True
        explained = server.ask("/v1/explain", file.read_bytes(), headers={"Content-Type": "image/jpeg"})
        assert (status, explained[0]) == (200, 200)
    top = said["predictions"][0]["top"]
    assert top[0]["score"] == pytest.approx(predictor(file).score, abs=1e-5)
    assert abs(vt.Predictor(run / "best.safetensors", native=False)(file).score - top[0]["score"]) > 1e-5


def command(*arguments):
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    return f"{result.output}{result.exception or ''}"


def test_the_commands(run, photos, tmp_path):
    best, index = run / "best.safetensors", tmp_path / "index.safetensors"
    assert "in its own shape to at most 16 patches" in command("info", best)
    command("embed", best, photos / "train", "-o", index, "--native")
    query = photos / "train" / "china" / "01.jpg"
    assert command("search", index, query, "--top", 1).splitlines()[1].startswith("1.0000")
    said = command("export", best, "--out", tmp_path / "model.html", "--to", "html")
    assert "this file takes 16x16 only" in " ".join(said.split())
    plain = tmp_path / "plain.safetensors"
    vt.Bundle(model=vt.create("mu/4@16", classes=2), labels=["a", "b"]).save(plain)
    for other in (["embed", plain, photos / "val", "-o", tmp_path / "x.npy"], ["serve", plain, "--port", 0]):
        assert "trained on images of one shape, so native is not for it" in command(*other, "--native")
    assert "remove precision" in command("predict", best, photos / "val", "--precision", "fp32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(mixing=dict(mixup=0.2)), "native and mixing.mixup=0.2 exclude each other"),
        (dict(compile=True), "native and compile=True exclude each other"),
        (dict(model=dict(position="relative")), "takes one size only"),
        (dict(model=dict(patch_dropout=0.1)), "native and model.patch_dropout=0.1 exclude each other"),
        (dict(native=1), "native must be True or False"),
    ],
)
def test_what_excludes_native(change, message, photos, tmp_path):
    with pytest.raises(vt.VitrailError, match=message):
        train(photos, out=tmp_path / "run", **{**HOW, **change})
    assert not (tmp_path / "run").exists()


def test_arrays_have_one_shape_already(tmp_path):
    with pytest.raises(vt.ConfigError, match="native is for image files"):
        train(write_arrays(tmp_path / "data.npz"), out=tmp_path / "run", native=True)


def test_a_teacher_is_refused(photos, run, tmp_path):
    with pytest.raises(vt.ConfigError, match="native and distill='hard' exclude each other"):
        train(photos, out=tmp_path / "run", teacher=run / "best.safetensors", **HOW)


def test_the_recipes_own_mixing_is_off_and_that_is_said(photos, tmp_path):
    callback = RecordingCallback()
    small = dict(width=16, depth=1, heads=2, patch=4, size=16)
    how = dict(recipe="small", epochs=1, native=True, model=small)
    train(photos, out=tmp_path / "run", callback=callback, **how)
    assert any("Mixup and cutmix are off" in note for note in callback.notes)
