"""How logits become scores, recorded in the file."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import vitrail as vt
from tests.support.models import add_noise

OLD = Path(__file__).parent / "golden-1.safetensors"
THRESHOLDS = (0.2, 0.5, 0.8)


@pytest.fixture
def bundle():
    torch.manual_seed(0)
    model = add_noise(vt.create("mu/8", classes=3))
    scores = vt.Scores(activation="sigmoid", thresholds=THRESHOLDS)
    return vt.Bundle(model=model, labels=["cat", "dog", "eel"], scores=scores)


def test_a_file_of_format_1_is_of_softmax():
    assert vt.load(OLD).scores == vt.Scores(activation="softmax", thresholds=None)


def test_round_trip(bundle, tmp_path):
    bundle.save(tmp_path / "x.safetensors")
    assert vt.load(tmp_path / "x.safetensors").scores == bundle.scores


def test_a_new_head_has_no_thresholds(bundle, tmp_path):
    bundle.save(tmp_path / "x.safetensors")
    assert vt.load(tmp_path / "x.safetensors", classes=7).scores == vt.Scores()


def test_sigmoid_without_thresholds_predicts_the_most_likely_class(bundle):
    single = replace(bundle, scores=vt.Scores(activation="sigmoid"))
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3)).astype(np.uint8)
    one = vt.Predictor(single)(image)
    scores = torch.from_numpy(one.logits).double().sigmoid()
    assert (one.label, one.score) == (single.labels[scores.argmax()], pytest.approx(scores.max().item()))
    assert one.labels == [(one.label, one.score)]
    assert not one.unsure
    many = vt.Predictor(bundle)(image)
    above = {single.labels[k] for k in range(3) if scores[k] > THRESHOLDS[k]}
    assert {label for label, _ in many.labels} == above


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(activation="relu"), "unknown activation 'relu'. Choose from: softmax, sigmoid"),
        (dict(thresholds=(0.5,)), "thresholds belong to sigmoid scores"),
        (dict(activation="sigmoid", thresholds=(0.5, 2.0)), "numbers from 0 to 1"),
    ],
)
def test_impossible_scores_are_refused(fields, message):
    with pytest.raises(vt.ConfigError, match=message):
        vt.Scores(**fields)


def test_the_number_of_thresholds_is_checked(bundle, tmp_path):
    two = vt.Scores(activation="sigmoid", thresholds=(0.5, 0.5))
    with pytest.raises(vt.ConfigError, match="thresholds must be 3 numbers, one for each class"):
        replace(bundle, scores=two)
    bundle.save(tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        header = json.loads(file.metadata()["vitrail"])
    header["scores"] = two.describe()
    tensors = safetensors.torch.load_file(tmp_path / "x.safetensors")
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", {"vitrail": json.dumps(header)})
    with pytest.raises(vt.FileError, match="is damaged: thresholds must be 3 numbers"):
        vt.load(tmp_path / "x.safetensors")
