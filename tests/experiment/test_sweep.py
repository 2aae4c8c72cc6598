"""`vitrail sweep`: successive halving, resuming, the command that it ends with; the learning rate range test."""

import json
import math
import shlex
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.tiny_runs import file_hashes, one_thread, write_arrays
from vitrail.base.errors import ConfigError, FileError, InputError
from vitrail.cli import app
from vitrail.cli.option_values import apply_setting
from vitrail.experiment import halving_sweep as module
from vitrail.experiment.halving_sweep import draw_candidates, scale_augmentation, sweep
from vitrail.experiment.lr_finder import find_lr, suggest_lr
from vitrail.images.augment.mixing import Mixing
from vitrail.images.augment.pipeline import Augment
from vitrail.images.formats.sources import open_dataset
from vitrail.training.recipes.settings import TrainConfig
from vitrail.training.resolve import resolve_recipe

__all__ = ["one_thread"]

TINY = dict(batch=16, ema=None, epochs=9, model=dict(width=16, depth=1, heads=2, patch=4))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_arrays(tmp_path_factory.mktemp("data") / "data.npz", count=48)


@pytest.fixture(scope="module")
def complete(data, tmp_path_factory):
    return sweep(data, out=tmp_path_factory.mktemp("sweep") / "whole", **TINY)


def test_nine_three_one(complete):
    assert [(len(one.scores), one.epochs) for one in complete.rounds] == [(9, 1), (3, 3), (1, 9)]
    first, second, third = (one.scores for one in complete.rounds)
    assert min(first[name] for name in second) >= max(
        score for name, score in first.items() if name not in second
    )
    assert second[complete.best.name] == max(second.values())
    assert list(third) == [complete.best.name]
    assert complete.candidates[0].name == "recipe"
    saved = json.loads((complete.out / "sweep.json").read_text())
    assert saved["score"] == complete.score == third[complete.best.name]
    assert saved["environment"]["torch"]
    assert (complete.out / complete.model).exists()


@pytest.mark.parametrize("trials", [2, 3, 5, 9, 10, 27, 40])
def test_every_number_of_trials_ends_with_one_run_of_all_epochs(trials):
    rounds = module._rounds(trials, 50)
    assert rounds[0][0] == trials
    assert rounds[-1] == (1, 50)
    numbers, epochs = zip(*rounds, strict=True)
    assert list(numbers) == sorted(numbers, reverse=True)
    assert list(epochs) == sorted(set(epochs))


def test_candidates_are_around_the_recipe_and_depend_on_the_seed():
    base = TrainConfig(lr=1e-3, weight_decay=0.05)
    found = draw_candidates(base, 200, 0)
    logs = np.log([one.lr / base.lr for one in found[1:]]) / math.log(4)
    assert -1.01 <= logs.min() < -0.9
    assert 0.9 < logs.max() <= 1.01
    assert {one.strength for one in found} == {0.5, 1.0, 1.5}
    assert draw_candidates(base, 200, 0) == found != draw_candidates(base, 200, 1)


def test_the_strength_of_augmentation():
    augment, mixing = Augment(crop=0.3, flip=0.5, rotate=150, brightness=0.4, zoom=1.2), Mixing(mixup=0.2)
    assert scale_augmentation(augment, mixing, 1.0) == (augment, mixing)
    stronger, _ = scale_augmentation(augment, mixing, 1.5)
    assert (stronger.crop, stronger.flip, stronger.rotate, stronger.brightness) == (0.05, 0.5, 180, 0.6)
    weaker, mixed = scale_augmentation(augment, replace(mixing, probability=0.6), 0.5)
    assert (weaker.crop, weaker.zoom, mixed.probability) == (0.65, 1.1, 0.3)


def test_the_command_trains_the_best_candidate(complete, data):
    words = shlex.split(complete.command)
    assert words[:3] == ["vitrail", "train", str(data)]
    changes = {}
    for option, value in zip(words[3::2], words[4::2], strict=True):
        if option == "--set":
            apply_setting(changes, value)
        elif option != "--out":
            apply_setting(changes, f"{option[2:]}={value}")
    again, _ = resolve_recipe("auto", open_dataset(data), None, changes)
    used = json.loads((complete.out / complete.model).with_name("config.json").read_text())
    assert json.loads(json.dumps(vars(again.model))) == used["model"]
    for name in ("lr", "weight_decay", "epochs", "batch", "ema", "seed"):
        assert getattr(again.train, name) == used["train"][name], name
    assert json.loads(json.dumps(vars(again.train.augment))) == used["train"]["augment"]


def test_an_interrupted_sweep_runs_only_what_is_missing(complete, data, tmp_path, monkeypatch):
    count, real = 0, module.StudyPool.run

    def run(pool, tasks):
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return real(pool, tasks)

    out = tmp_path / "sweep"
    monkeypatch.setattr(module.StudyPool, "run", run)
    with pytest.raises(KeyboardInterrupt):
        sweep(data, out=out, **TINY)
    monkeypatch.undo()
    before = file_hashes(out)
    result = sweep(data, out=out, **TINY)
    after = file_hashes(out)
    assert {name: after[name] for name in before} == before
    assert result.rounds == complete.rounds
    assert result.best == complete.best
    with pytest.raises(ConfigError, match="resumes with the settings"):
        sweep(data, out=out, **{**TINY, "batch": 8})


def test_a_sweep_can_start_from_weights(complete, data, tmp_path):
    weights = complete.out / complete.model
    result = sweep(data, out=tmp_path / "sweep", trials=3, from_=weights, epochs=2, batch=16, ema=None)
    assert f"--from {shlex.quote(str(weights))}" in result.command
    again = sweep(data, out=tmp_path / "sweep", trials=3, from_=weights, epochs=2, batch=16, ema=None)
    assert again.rounds == result.rounds


def test_a_folder_of_something_else_is_refused(data, tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(FileError, match=r"a sweep's, and .* contains thesis\.tex"):
        sweep(data, out=tmp_path, **TINY)


# ---- the learning rate range test -----------------------------------------------------------


def test_the_ramp_is_exponential_and_ends_when_the_loss_explodes(data, tmp_path):
    curve = find_lr(data, out=tmp_path / "lr", steps=60, low=1e-5, high=10.0, **TINY)
    assert np.diff(np.log(curve.lrs)) == pytest.approx(math.log(1e6) / 59)
    assert len(curve.losses) == len(curve.lrs) < 60
    assert 1e-4 < curve.lr < 0.3
    assert curve.lr == suggest_lr(curve.lrs, curve.smoothed)
    saved = json.loads((tmp_path / "lr" / "lr.json").read_text())
    assert saved["lr"] == curve.lr
    assert (tmp_path / "lr" / "lr.svg").exists()
    assert find_lr(data, steps=60, low=1e-5, high=10.0, **TINY) == curve
    with pytest.raises(FileError, match=r"lr\.json exists"):
        find_lr(data, out=tmp_path / "lr", **TINY)
    with pytest.raises(InputError, match="low < high"):
        find_lr(data, low=1.0, high=0.1, **TINY)


def test_the_suggestion_is_a_tenth_of_the_minimum():
    assert suggest_lr([1e-4, 1e-3, 1e-2, 1e-1], [3.0, 2.0, 1.0, math.nan]) == 1e-3


def test_the_command(data, tmp_path):
    small = ["--set=model.width=16", "--set=model.depth=1", "--set=model.heads=2", "--set=model.patch=4"]
    out = tmp_path / "sweep"
    done = CliRunner().invoke(app, ["sweep", str(data), f"--out={out}", "--trials=3", "--epochs=3", *small])
    assert done.exit_code == 0, done.output
    assert "Train it again with: vitrail train" in done.output
    assert "1 ep." in done.output
    done = CliRunner().invoke(app, ["sweep", str(data), f"--out={tmp_path / 'lr'}", "--lr-only", *small])
    assert done.exit_code == 0, done.output
    assert "Suggested learning rate" in done.output
