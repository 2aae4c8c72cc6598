"""The figures and the walk of a multi-label model use its own link, sigmoid, and not softmax."""

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail as vt
from tests.support.equations import check
from tests.support.models import add_noise
from vitrail.views import ablation, attribution, scoring
from vitrail.views.figure import InspectionRequest

CONFIG = vt.ViTConfig(width=12, depth=2, heads=3, patch=4, size=12, channels=3, classes=5)


@pytest.fixture
def request_for_sigmoid(tmp_path):
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for path in paths:
        Image.fromarray(rng.integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(path)
    scores = vt.Scores(activation="sigmoid", thresholds=(0.5,) * 5)
    bundle = vt.Bundle(model=add_noise(vt.ViT(CONFIG)).eval(), scores=scores)
    return InspectionRequest(bundle, paths)


def sigmoid_of_prediction(request):
    with torch.no_grad():
        return request.model(request.drawn.images).sigmoid().max(dim=1).values.numpy()


def test_attribution_explains_the_sigmoid(request_for_sigmoid):
    expected = sigmoid_of_prediction(request_for_sigmoid)
    found, _ = attribution.FIGURE.make(request_for_sigmoid)
    assert found.probability == pytest.approx(expected, abs=1e-5)
    assert np.abs(found.gap).mean() < 0.1 * np.abs(found.change).mean()  # completeness, of log sigmoid


def test_scoring_measures_the_sigmoid(request_for_sigmoid):
    expected = sigmoid_of_prediction(request_for_sigmoid)
    found, _ = scoring.FIGURE.make(request_for_sigmoid)
    for method in found.deletion:
        assert found.deletion[method][:, 0] == pytest.approx(expected, abs=1e-5)
        assert found.insertion[method][:, -1] == pytest.approx(expected, abs=1e-5)


def test_ablation_measures_the_drop_of_log_sigmoid(request_for_sigmoid):
    found, _ = ablation.FIGURE.make(request_for_sigmoid)
    model, images = request_for_sigmoid.model, request_for_sigmoid.drawn.images
    d = model.config.d
    with torch.no_grad():
        full = model(images)
        predicted = full.argmax(1)[:, None]
        model.blocks[1].attention.out.weight[:, d : 2 * d] = 0  # head 1
        drop = full.sigmoid().log().gather(1, predicted) - model(images).sigmoid().log().gather(1, predicted)
    assert found.drop[1, 1] == pytest.approx(drop.mean().item(), abs=1e-5)


def test_the_walk_ends_with_sigmoid():
    model = add_noise(vt.ViT(CONFIG)).double()
    x = torch.randn(CONFIG.input_shape, dtype=torch.float64)
    stages = vt.walk(model, x, activation="sigmoid")
    assert (stages[-1].name, stages[-1].equation) == ("probabilities", "P = sigmoid(o)")
    check(model, x, stages, last=torch.sigmoid, block=0, head=0, token=0)
