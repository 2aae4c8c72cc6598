"""The demo: its functions, and the accuracy that the README promises."""

import numpy as np
import pytest
import torch

from vitrail import ViT, ViTConfig
from vitrail.experiment import digits_demo as demo
from vitrail.images.formats.sources import open_dataset
from vitrail.training.start import train
from vitrail.views import rollout
from vitrail.weights.bundle.bundle import Bundle


@pytest.fixture(scope="module")
def digits():
    return open_dataset("digits")


def predictions_of(labels, predicted, score):
    attention = np.random.default_rng(0).random((len(labels), 4, 4))
    ink = np.zeros((len(labels), 8, 8))
    return demo.DemoPredictions(ink, *map(np.array, (labels, predicted, score)), attention)


def test_the_split_is_fixed_stratified_and_disjoint(digits):
    train, held_out = digits.train, digits.eval_split
    assert (len(train), len(held_out)) == (1437, 360)
    assert held_out.labels[:8].tolist() == open_dataset("digits").eval_split.labels[:8].tolist()
    assert np.bincount(held_out.labels).min() >= 35
    pixels = {image.tobytes() for image in train.images}
    assert not [image for image in held_out.images if image.tobytes() in pixels]


def test_predictions_are_the_models_logits_and_rollout(digits):
    torch.manual_seed(0)
    model = ViT(ViTConfig(width=32, depth=2, heads=2, patch=2, size=8, channels=1, classes=10)).eval()
    torch.nn.init.normal_(model.head.weight)
    bundle, few = Bundle(model=model), digits.eval_split.take(np.arange(3))
    images = torch.stack([bundle.preprocess.normalize(one) for one in few.images])
    with torch.no_grad():
        probabilities = model(images).softmax(1)
    predictions = demo.predict_digits(bundle, few)
    assert (predictions.predicted == probabilities.argmax(1).numpy()).all()
    assert np.abs(predictions.confidence - probabilities.amax(1).numpy()).max() < 1e-6
    assert np.abs(predictions.attention - rollout.compute(model, images).maps[0]).max() < 1e-6
    assert predictions.pixels.max() == 1
    assert (predictions.labels == few.labels).all()


def test_brightness_is_the_attention_to_the_patch_of_each_pixel():
    predictions = predictions_of([1], [1], [0.9])
    light = demo.attention_brightness(predictions, 0)
    assert light.shape == (8, 8)
    assert light.max() == 1
    assert light[5, 2] == predictions.attention[0, 2, 1] / predictions.attention[0].max()


def test_examples_are_wrong_ones_by_confidence_and_correct_ones_of_different_classes():
    predictions = predictions_of([0, 0, 1, 2, 3], [0, 0, 1, 5, 6], [0.9, 0.9, 0.8, 0.4, 0.7])
    assert demo.select_examples(predictions) == ([0, 2], [4, 3])
    assert demo.select_examples(predictions, most=2) == ([0], [4])
    assert [demo.caption(predictions, index) for index in (0, 4)] == ["0 (90%)", "6, is 3"]


@pytest.mark.parametrize("wrong", [True, False])
def test_the_figure_is_drawn_with_and_without_mistakes(tmp_path, wrong):
    labels = list(range(10))
    predictions = predictions_of(labels, [1, *labels[1:]] if wrong else labels, [0.9] * 10)
    demo.save_figure(predictions, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 2000


@pytest.mark.slow
def test_the_demo_reaches_98_percent(digits, tmp_path):
    """A complete run of `vitrail demo`, with the accuracy that the README promises."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = train(digits, out=tmp_path / "run", recipe="digits", epochs=50, seed=0, verbose=False)
        assert demo.predict_digits(run.bundle, digits.eval_split).correct.mean() >= 0.98
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / "run" / "report.html").exists()
