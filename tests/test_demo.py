"""The demo's parts, and its promise."""

import numpy as np
import pytest
import torch

from vitrail import ViT, ViTConfig, demo
from vitrail.inspect import rollout
from vitrail.training.listen import Silent
from vitrail.weights.bundle import Bundle


@pytest.fixture(scope="module")
def digits():
    return demo.load()


def looked_with(labels, predicted, score):
    attention = np.random.default_rng(0).random((len(labels), 4, 4))
    ink = np.zeros((len(labels), 8, 8))
    return demo.Looked(ink, *map(np.array, (labels, predicted, score)), attention)


def test_the_split_is_fixed_stratified_and_apart(digits):
    learn, held_out = digits.train, digits.held_out
    assert (len(learn), len(held_out)) == (1437, 360)
    assert held_out.labels[:8].tolist() == demo.load().held_out.labels[:8].tolist()
    assert np.bincount(held_out.labels).min() >= 35
    pixels = {image.tobytes() for image in learn.images}
    assert not [image for image in held_out.images if image.tobytes() in pixels]


def test_a_look_is_the_models_answers_and_its_rollout(digits):
    torch.manual_seed(0)
    model = ViT(ViTConfig(width=32, depth=2, heads=2, patch=2, size=8, channels=1, classes=10)).eval()
    torch.nn.init.normal_(model.head.weight)
    bundle, few = Bundle(model=model), digits.held_out.take(np.arange(3))
    images = torch.stack([bundle.preprocess.normalise(one) for one in few.images])
    with torch.no_grad():
        probabilities = model(images).softmax(1)
    looked = demo.look(bundle, few)
    assert (looked.predicted == probabilities.argmax(1).numpy()).all()
    assert np.abs(looked.score - probabilities.amax(1).numpy()).max() < 1e-6
    assert np.abs(looked.attention - rollout.compute(model, images).maps[0]).max() < 1e-6
    assert looked.ink.max() == 1
    assert (looked.labels == few.labels).all()


def test_light_is_the_attention_on_each_pixels_patch():
    looked = looked_with([1], [1], [0.9])
    light = demo.light(looked, 0)
    assert light.shape == (8, 8)
    assert light.max() == 1
    assert light[5, 2] == looked.attention[0, 2, 1] / looked.attention[0].max()


def test_chosen_are_wrong_ones_surest_first_and_right_ones_of_different_kinds():
    looked = looked_with([0, 0, 1, 2, 3], [0, 0, 1, 5, 6], [0.9, 0.9, 0.8, 0.4, 0.7])
    assert demo.choose(looked) == ([0, 2], [4, 3])
    assert demo.choose(looked, most=2) == ([0], [4])
    assert [demo.caption(looked, index) for index in (0, 4)] == ["0 (90%)", "6, is 3"]


@pytest.mark.parametrize("wrong", [True, False])
def test_the_picture_is_drawn_with_and_without_mistakes(tmp_path, wrong):
    labels = list(range(10))
    looked = looked_with(labels, [1, *labels[1:]] if wrong else labels, [0.9] * 10)
    demo.draw(looked, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 2000


def test_the_demo_reaches_98_percent(digits, tmp_path):
    """The whole run, as `vitrail demo` has it: the promise of the README."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = demo.train(digits, tmp_path / "run", epochs=50, seed=0, listener=Silent())
        assert demo.look(run.bundle, digits.held_out).right.mean() >= 0.98
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / "run" / "report.html").exists()
