"""Evaluation says how many of the images the model was trained on, and its score on the others."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import vitrail as vt
from tests.support.tiny_runs import train, write_folder
from vitrail.cli import app
from vitrail.evaluation.evaluate_model import evaluate
from vitrail.images.formats.sources import open_dataset
from vitrail.training.open_data import FILE_NAME

SMALL = dict(epochs=2, batch=16, lr=3e-3, workers=0, model=dict(width=16, depth=1, heads=2, patch=4, size=8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "photos", each=22)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    return train(folder, out=tmp_path_factory.mktemp("runs") / "seed-1", seed=1, **SMALL)


def vitrail(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "80"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_the_same_folder_is_no_new_data(run, folder, tmp_path):
    """The issue: a run with another seed ended at 70.0 %, and evaluating it on its folder said 87.5 %."""
    data = open_dataset(folder)
    result = evaluate(run.out / "best.safetensors", folder)
    seen = result.trained_on
    assert (result.images, seen.images, seen.others) == (66, len(data.train), len(data.val))
    assert seen.top1 == pytest.approx(run.best["val_accuracy"])
    assert seen.loss == pytest.approx(run.best["val_loss"], rel=1e-4)
    sentence = (
        f"All 66 images of photos. The model was trained on {len(data.train)} of them; on the other "
        f"{len(data.val)}, its accuracy is {100 * seen.top1:.2f} %."
    )
    assert result.first_line() == sentence
    report = tmp_path / "report.html"
    arguments = ["--json", tmp_path / "r.json", "--html", report]
    output = vitrail("evaluate", run.out / "best.safetensors", folder, *arguments).output
    assert " ".join(output.split()).startswith(sentence)
    assert max(map(len, output.splitlines()[:2])) <= 80
    assert json.loads((tmp_path / "r.json").read_text())["trained_on"] == {
        **{"images": len(data.train), "others": len(data.val), "top1": seen.top1},
        **{"loss": seen.loss, "mean_ap": None, "is_exact": True},
    }
    assert f"The model was trained on {len(data.train)} of them" in report.read_text()


def test_the_held_out_images_are_the_same_for_every_seed(run, folder):
    result = evaluate(run.bundle, folder, split="val")
    assert result.trained_on.images == 0
    assert result.metrics.top1 == pytest.approx(run.best["val_accuracy"])
    assert result.first_line().endswith("The model was trained on none of them.")
    assert (
        "trained on all of them: this is no estimate"
        in evaluate(run.bundle, folder, split="train").first_line()
    )


def test_copies_are_recognized_and_images_saved_again_are_not(run, folder, tmp_path):
    data = open_dataset(folder)
    pngs = [path for path in data.train.paths if path.suffix == ".png"][:6]
    for number, path in enumerate(pngs):
        (tmp_path / "new" / path.parent.name).mkdir(parents=True, exist_ok=True)
        target = tmp_path / "new" / path.parent.name / f"renamed-{number}.png"
        if number < 4:
            shutil.copy(path, target)
        else:
            Image.open(path).save(target, compress_level=1)
    result = evaluate(run.bundle, tmp_path / "new")
    assert (result.trained_on.images, result.trained_on.others) == (4, 2)
    unknown = vt.Bundle(model=run.bundle.model, labels=run.bundle.labels)
    result = evaluate(unknown, tmp_path / "new")
    assert result.trained_on is None
    assert result.first_line() == "All 6 images of new."


def test_without_a_fingerprint(folder, tmp_path):
    done = train(folder, out=tmp_path / "run", fingerprint=False, **SMALL)
    assert done.bundle.fingerprint is None
    assert not (done.out / FILE_NAME).exists()
    assert evaluate(done.bundle, folder).trained_on is None


def test_fine_tuning_remembers_what_the_weights_were_trained_on(run, folder, tmp_path):
    """Also arrays, and also if the run directory is resumed, where the weights it started from are not read."""
    rng = np.random.default_rng(5)
    x, y = rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8), np.arange(40) % 3
    np.savez(tmp_path / "a.npz", x_train=x[:30], y_train=y[:30], x_test=x[25:], y_test=y[25:])
    settings = {name: SMALL[name] for name in ("batch", "workers")}
    tuned = train(
        tmp_path / "a.npz", out=tmp_path / "run", from_=run.out / "last.safetensors", epochs=1, **settings
    )
    count = len(open_dataset(folder).train)
    assert tuned.bundle.fingerprint.describe() == [count + 30]
    assert tuned.bundle.fingerprint.contains(open_dataset(folder).train.keys).all()
    tested = evaluate(tuned.bundle, tmp_path / "a.npz")
    assert (tested.split, tested.trained_on.images, tested.trained_on.others) == ("test", 5, 10)
    again = train(out=tmp_path / "run", resume=True, epochs=2)
    assert again.bundle.fingerprint.describe() == [count + 30]
    with np.load(tmp_path / "run" / FILE_NAME) as stored:
        assert len(stored["fingerprint/0"]) == count + 30


def test_doctor(run, folder, tmp_path):
    model, count = run.out / "last.safetensors", len(open_dataset(folder).train)
    output = vitrail("doctor", folder, "--model", model).output
    assert output.startswith(f"The model was trained on {count} of these 66 images.\n")
    assert json.loads(vitrail("doctor", folder, "--model", model, "--json").output)["trained_on"] == {
        "train": count
    }
    for split in ("train", "test"):
        shutil.copytree(folder / "ant", tmp_path / "two" / split / "ant")
    output = " ".join(vitrail("doctor", tmp_path / "two", "--model", model).output.split())
    ants = sum(name.startswith("ant") for name in open_dataset(folder).train.names)
    assert output.startswith(
        f"The model was trained on {2 * ants} of these 44 images: {ants} of 22 in train, {ants} of 22 in test."
    )
    shutil.rmtree(tmp_path / "two" / "train")
    done = vitrail("doctor", tmp_path / "two", "--model", model)
    assert done.output.startswith(f"The model was trained on {ants} of these 22 images.")
    assert done.exit_code == 0
    vt.Bundle(model=run.bundle.model).save(tmp_path / "bare.safetensors")
    output = " ".join(vitrail("doctor", folder, "--model", tmp_path / "bare.safetensors").output.split())
    assert "bare.safetensors does not record which images it was trained on" in output
    assert "trained" not in vitrail("doctor", folder).output.splitlines()[0]


def test_inspect(run, folder, tmp_path):
    data = open_dataset(folder)
    images = [*data.train.paths[:2], data.val.paths[0]]
    arguments = ["inspect", run.out / "best.safetensors", *images, "--only", "attention"]
    done = vitrail(*arguments, "--out", tmp_path / "out")
    assert done.output.splitlines()[0] == "The model was trained on 2 of these 3 images."
    assert "The model was trained on 2 of these 3 images." in (tmp_path / "out" / "index.html").read_text()
    done = vitrail(*arguments[:2], images[-1], *arguments[-2:], "--out", tmp_path / "one")
    assert done.output.splitlines()[0] == "The model was not trained on this image."


def test_the_closing_line_is_of_the_best_epoch(folder, tmp_path, monkeypatch):
    """One number for a run: closing line, best.safetensors and report are of the same epoch."""
    scores = iter([0.5, 0.75, 0.6])
    monkeypatch.setattr(
        "vitrail.training.session.evaluate_epoch",
        lambda *args, **kwargs: {"val_loss": 1.0, "val_accuracy": next(scores), "val_images": 12},
    )
    monkeypatch.setattr("vitrail.training.start.write_report", lambda *args: None)
    sets = ["--set", "model.width=16", "--set", "model.depth=1", "--set", "model.heads=2", "--size", "16"]
    out = tmp_path / "run"
    done = vitrail("train", folder, "--out", out, "--epochs", 3, "--set", "workers=0", *sets)
    line = "Accuracy 75.00% on 12 held-out images, after epoch 2 of 3: best.safetensors."
    assert line in done.output
    metrics = vt.load(out / "best.safetensors").card.metrics
    assert (metrics["accuracy"], metrics["epoch"]) == (0.75, 2)
    metrics = vt.load(out / "last.safetensors").card.metrics
    assert (metrics["accuracy"], metrics["epoch"]) == (0.6, 3)
    assert line in vitrail("train", "--out", out, "--resume").output
