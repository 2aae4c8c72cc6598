"""`vitrail train --from` a file of prompts: before the first step, the logits are those of the file."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import vitrail as vt
from tests.support.command import run_command
from tests.support.digit_clip import DIGITS, FILE, save_scenes
from vitrail.cli import app
from vitrail.training.trainer import Trainer

SETTINGS = ["--epochs", "1", "--batch", "32", "--set", "workers=0"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return save_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def files(tmp_path_factory, photos):
    """The zero-shot head, the model fine-tuned from it, and one between them."""
    folder = tmp_path_factory.mktemp("files")
    vt.load(FILE).zero_shot(DIGITS, ["a {}", "a small {}"]).save(folder / "zero.safetensors")
    run = vt.train(photos, from_=folder / "zero.safetensors", out=folder / "run", epochs=1, batch=32)
    run.bundle.save(folder / "tuned.safetensors")
    way = ["--toward", "tuned.safetensors", "--interpolate", 0.3]
    done = run_command("convert", "zero.safetensors", "between.safetensors", *way, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def logits_of(bundle, photos):
    """The logits of each image, by class name: (N, 10), in the order of DIGITS."""
    found = vt.Predictor(bundle, workers=0)(sorted(photos.rglob("*.png")))
    rows = np.stack([one.logits for one in found])
    names = bundle.labels if isinstance(bundle, vt.Bundle) else vt.load(bundle).labels
    return rows[:, [names.index(digit) for digit in DIGITS]]


@pytest.mark.parametrize("name", ["zero", "between"])
def test_logits_before_the_first_step(files, photos, tmp_path, monkeypatch, name):
    """Training takes the order of the classes from the data, so rows of the head move; no logit changes."""
    start, found = files / f"{name}.safetensors", []
    take_steps = Trainer.run

    def look_first(self, *args, **kwargs):
        assert self.step == 0
        bundle = vt.Bundle(model=self.model, preprocess=self.preprocess, labels=list(self.data.classes))
        found.append(logits_of(bundle, photos))
        self.model.train()
        return take_steps(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "run", look_first)
    arguments = ["train", str(photos), "--from", str(start), "--out", str(tmp_path / "run"), *SETTINGS]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, f"{done.output} {done.exception!r}"
    expected = logits_of(start, photos)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5)
    trained = logits_of(tmp_path / "run" / "last.safetensors", photos)
    assert np.abs(trained - expected).max() > 0.01  # and then it learns


@pytest.mark.parametrize("name", ["zero", "between"])
def test_the_command_starts_at_the_file(files, photos, tmp_path, name):
    """With a learning rate that changes no float, the model that is saved is the one that was given."""
    start = files / f"{name}.safetensors"
    settings = [*SETTINGS, "--set", "lr=1e-30", "--set", "ema=none"]
    done = run_command("train", photos, "--from", start, "--out", "run", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = tmp_path / "run" / "last.safetensors"
    np.testing.assert_allclose(logits_of(saved, photos), logits_of(start, photos), rtol=0, atol=1e-5)
    ours, given = (vt.load(path).model.state_dict() for path in (saved, start))
    assert all(torch.equal(ours[key], given[key]) for key in given if not key.startswith("head.fc2"))


def test_the_ends_of_the_way(files, photos, tmp_path):
    """t = 0 has the logits of the zero-shot file, t = 1 those of the fine-tuned one."""
    for t, name in ((0, "zero"), (1, "tuned")):
        way = ["--toward", files / "tuned.safetensors", "--interpolate", t]
        done = run_command("convert", files / "zero.safetensors", f"{name}.safetensors", *way, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found, expected = (logits_of(folder / f"{name}.safetensors", photos) for folder in (tmp_path, files))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
