"""What a Python user tries first: arrays, a run as a model, results at the prompt, and mistakes."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import vitrail as vt
from tests.support.tiny_runs import Signals, train, write_arrays
from vitrail.cli import app
from vitrail.images.formats.sources import open_dataset
from vitrail.training.trainer import Interrupted

HOW = dict(batch=16, epochs=1, model=dict(width=16, depth=1, heads=2, patch=4))


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    file = np.load(write_arrays(tmp_path_factory.mktemp("data") / "data.npz"))
    return {"train": (file["x_train"], file["y_train"]), "val": (file["x_val"], file["y_val"])}


@pytest.fixture(scope="module")
def run(arrays, tmp_path_factory):
    return train(arrays, out=tmp_path_factory.mktemp("runs") / "run", **HOW)


def test_a_run_is_a_model(run, arrays, tmp_path):
    image = arrays["val"][0][0]
    expected = vt.Predictor(run.bundle)(image)
    for model in (run, run.out, str(run.out), run.out / "best.safetensors"):
        assert vt.Predictor(model)(image).score == expected.score
    result = vt.evaluate(run, arrays)
    assert (result.split, result.images) == ("val", 30)
    assert result.metrics.top1 == pytest.approx(run.best["val_accuracy"])
    np.savez(tmp_path / "x.npz", images=arrays["val"][0], labels=arrays["val"][1])
    done = CliRunner().invoke(app, ["evaluate", str(run.out), str(tmp_path / "x.npz")])
    assert "30 images" in done.output, done.exception
    tuned = train(arrays, out=tmp_path / "tuned", from_=run.out, tune="head", epochs=1, batch=16)
    assert tuned.bundle.labels == run.bundle.labels


def test_a_pair_of_arrays_or_tensors(arrays, tmp_path):
    images, labels = arrays["train"]
    pair = train((images, labels), out=tmp_path / "arrays", **HOW)
    as_tensors = torch.from_numpy(images)[:, None], torch.from_numpy(labels)
    other = train(as_tensors, out=tmp_path / "tensors", **HOW)
    assert pair.metrics[0]["loss"] == other.metrics[0]["loss"]
    names = np.array(["cat", "ant", "bee"])
    splits = {name: (images, names[labels]) for name, (images, labels) in arrays.items()}
    named = open_dataset(splits)
    assert named.classes == ["ant", "bee", "cat"]
    assert [named.classes[label] for label in named.val.labels[:3]] == ["cat", "ant", "bee"]
    as_objects = open_dataset((images, names[labels].astype(object)))
    assert as_objects.classes == ["ant", "bee", "cat"]
    with pytest.raises(vt.InputError, match="must be integers"):
        open_dataset({"train": (images, names[labels]), "val": (images, labels)})
    with pytest.raises(vt.InputError, match="not 80 images and 5 labels"):
        train((images, labels[:5]), out=tmp_path / "x", **HOW)


def test_results_have_short_texts(arrays, tmp_path):
    options = {**HOW, "verbose": False}
    folds = vt.cross_validate(write_arrays(tmp_path / "data.npz"), out=tmp_path / "folds", folds=2, **options)
    assert repr(folds).startswith("<CrossValidation folder: ")
    assert "mean accuracy" in folds._repr_html_()
    curve = vt.find_lr(tmp_path / "data.npz", out=tmp_path / "lr", steps=30, **HOW)
    assert repr(curve).startswith("<LRCurve suggested lr: ")
    assert "Predictor of 3 classes" in repr(vt.Predictor(folds.out / "fold-1"))


def test_mistakes(arrays, run, tmp_path):
    with pytest.raises(vt.InputError, match=r"callback must have the methods .* lacks on_message, on_plan"):
        vt.train(arrays, out=tmp_path / "x", callback=print)
    with pytest.raises(vt.FileError, match=r"holds a run; resume it with vt\.train\(.*resume=True\)"):
        train(arrays, out=run.out, **HOW)
    (tmp_path / "photos.zip").write_bytes(b"PK")
    with pytest.raises(vt.InputError, match=r"photos\.zip is an archive; unpack it"):
        vt.train(tmp_path / "photos.zip", out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_run_that_is_stopped_says_how_to_resume(arrays, tmp_path):
    with Signals(3), pytest.raises(Interrupted, match=r"stopped by signal 15 .* resume=True"):
        train(arrays, out=tmp_path / "run", **HOW)
    assert len(train(arrays, out=tmp_path / "run", resume=True).metrics) == 1
