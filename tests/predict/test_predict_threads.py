"""One model in several threads: each gets the answers that it gets alone."""

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import matplotlib
import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.models import add_noise
from vitrail.model.device import eval_mode
from vitrail.views import rollout

THREADS = 4


@pytest.fixture
def model():
    """In training mode, in which dropout changes every answer."""
    config = vt.ViTConfig(
        width=12, depth=3, heads=3, patch=4, size=16, channels=3, classes=3, dropout=0.5, drop_path=0.5
    )
    return add_noise(vt.ViT(config)).train()


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (THREADS, 5, 16, 16, 3), dtype=np.uint8)


def in_threads(function):
    """What function(number) returns, of threads that start together."""
    barrier = threading.Barrier(THREADS)

    def call(number):
        barrier.wait()
        return function(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(call, range(THREADS)))


def logits_of(predictions):
    return np.stack([one.logits for one in predictions])


def test_a_predictor_of_a_model_in_training_mode(model, images):
    predict = vt.Predictor(model)
    expected = [logits_of(predict(batch)) for batch in images]
    assert model.training

    def call(number):
        wrong = 0
        for _ in range(60):
            found = logits_of(predict(images[number]))
            wrong += not np.allclose(found, expected[number], atol=1e-5)
            assert torch.is_grad_enabled()
        return wrong

    assert in_threads(call) == [0] * THREADS
    assert all(module.training for module in model.modules())


def test_predictions_beside_explanations_and_edits(model, images):
    """Two threads predict, one explains, and one edits the activations of its own forward passes."""
    predict = vt.Predictor(model)
    expected = [logits_of(predict(batch)) for batch in images]
    inputs = torch.stack([predict.preprocess.normalize(image) for image in images[2]])
    maps = rollout.compute(model, inputs).maps

    def edited():
        with vt.edit(model, {"blocks.*.attention.weights": torch.zeros_like, "embed": torch.zeros_like}):
            return logits_of(predict(images[3]))

    expected[3] = edited()
    assert abs(expected[3] - logits_of(predict(images[3]))).max() > 0.1

    def call(number):
        errors = []
        for _ in range(30):
            if number == 2:
                error = abs(rollout.compute(model, inputs).maps - maps).max()
            else:
                found = edited() if number == 3 else logits_of(predict(images[number]))
                error = abs(found - expected[number]).max()
            errors.append(float(error))
        return max(errors)

    assert max(in_threads(call)) < 1e-4
    assert [block.attention.explicit for block in model.blocks] == [0, 0, 0]
    assert not any(module._forward_hooks for module in model.modules())


def test_figures_leave_the_settings_of_matplotlib_and_warnings_alone(model, images):
    predict, before = vt.Predictor(model), (dict(matplotlib.rcParams), list(warnings.filters))
    expected = [(predict.explain(batch[0]).axes[0].title.get_fontsize()) for batch in images]

    def call(number):
        return [predict.explain(images[number][0]).axes[0].title.get_fontsize() for _ in range(3)][-1]

    assert in_threads(call) == expected
    assert (dict(matplotlib.rcParams), list(warnings.filters)) == before


def test_a_model_evaluated_by_threads_while_others_enter_and_leave(model):
    """The first thread sets the mode and the last one restores it, of each submodule."""
    model.blocks[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}

    def call(number):
        wrong = 0
        for turn in range(200):
            with eval_mode(model if turn % 2 else model.blocks[number % 3]):
                wrong += any(module.training for module in model.blocks[number % 3].modules())
                time.sleep(0)
        return wrong

    assert in_threads(call) == [0] * THREADS
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_evaluation_in_threads(model, images, tmp_path):
    from PIL import Image

    for number, image in enumerate(images.reshape(-1, 16, 16, 3)):
        folder = tmp_path / "abc"[number % 3]
        folder.mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    bundle = vt.Bundle(model=model, labels=["a", "b", "c"])
    expected = vt.evaluate(bundle, tmp_path).metrics
    assert in_threads(lambda _: vt.evaluate(bundle, tmp_path).metrics) == [expected] * THREADS
    assert model.training
