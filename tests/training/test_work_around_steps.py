"""What a run computes besides its steps and evaluations: little before the first step, little after the last."""

import pytest

from tests.support.tiny_runs import SETTINGS, one_thread, train
from tests.training.test_loading import build
from vitrail.training import epoch
from vitrail.training.plan import step_mode
from vitrail.weights.load import load

__all__ = ["one_thread"]


@pytest.mark.parametrize(("slow", "images"), [(0.0, 2 * 4), (1e9, 4 + 2 * 16)])
def test_a_slow_step_is_estimated_from_a_few_images(data, monkeypatch, slow, images):
    passed, rehearse = [], step_mode.rehearse_pass
    monkeypatch.setattr(step_mode, "_SLOW", slow)
    monkeypatch.setattr(step_mode, "_FEW", 4)
    monkeypatch.setattr(step_mode, "rehearse_pass", lambda t, x: (passed.append(len(x)), rehearse(t, x)))
    trainer = build(data)
    assert step_mode.estimate_seconds(trainer) > 0
    assert sum(passed) == images
    trainer.workers.close()


@pytest.mark.parametrize("ema", [0.9, None])
def test_only_the_best_weights_pass_over_the_training_images_again(data, tmp_path, monkeypatch, ema):
    """Not those of the last step, where they are others: one pass for the statistics of features."""
    splits, run_model = [], epoch.run_model
    monkeypatch.setattr(
        epoch,
        "run_model",
        lambda model, split, *a, **k: (splits.append(len(split)), run_model(model, split, *a, **k))[1],
    )
    run = train(data, out=tmp_path / "run", **{**SETTINGS, "ema": ema})
    assert splits == [30] * SETTINGS["epochs"] + [80, 30]
    assert load(tmp_path / "run" / "best.safetensors").statistics is not None
    is_best = run.best["epoch"] == SETTINGS["epochs"] and ema is None
    assert (load(tmp_path / "run" / "last.safetensors").statistics is not None) == is_best
