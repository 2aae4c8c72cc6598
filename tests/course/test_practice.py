"""The practice exercise of note 002 in a notebook: data, training, and solutions behind a call."""

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.shared_data import shared
from vitrail_course import practice
from vitrail_course.practice_solutions import improve

CONFIG = vt.ViTConfig(
    width=16, depth=1, heads=2, patch=7, size=28, channels=1, classes=10, position="sincos1d"
)


@pytest.fixture(scope="module")
def digits():
    return practice.load_digits(count=300)


def test_without_a_path_the_digits_are_those_of_scikit_learn(digits):
    assert repr(digits) == "the digits of scikit-learn: 300 training and 50 test digits"
    assert digits.images.shape == (300, 1, 28, 28)
    assert digits.test_labels.unique().tolist() == list(range(10))
    assert digits.images.min() == pytest.approx(-0.1307 / 0.3081)


def test_mnist_is_read_from_its_folder():
    found = practice.load_digits(shared("data/mnist"), count=120)
    assert repr(found) == "MNIST: 120 training and 20 test digits"


def test_training_is_reproducible_and_learns(digits, capsys):
    def run():
        model = practice.train(CONFIG, digits, epochs=4, lr=5e-3, batch=16, warmup=0.1)
        return practice.accuracy(model, digits), capsys.readouterr().out

    score, printed = run()
    assert score > 0.2
    assert printed.count("test accuracy") == 4
    assert f"epoch  4: loss {printed.rsplit('loss ')[-1][:5]}, test accuracy {score:.2%}" in printed
    assert run() == (score, printed)


def test_images_are_resized_to_the_model(digits):
    small = vt.ViT(vt.ViTConfig(width=8, depth=1, heads=2, patch=8, size=32, channels=1, classes=10))
    assert 0 <= practice.accuracy(small, digits) <= 1


@pytest.mark.parametrize("name", practice.SOLUTIONS)
def test_every_solution_is_printed_and_returned(name, capsys):
    function = practice.solution(name)
    printed = capsys.readouterr().out
    assert printed.startswith(f"def {name}(")
    argument = vt.ViT(CONFIG) if "model" in function.__annotations__ else CONFIG
    assert function(argument) is not None


def test_what_the_solutions_do(digits):
    model = vt.ViT(CONFIG)
    E = practice.solution("find_E")(model)
    patches = torch.nn.functional.unfold(digits.images[:2], 7, stride=7).mT
    with torch.no_grad():
        wanted = model.tokens(digits.images[:2])
        np.testing.assert_allclose(patches @ E + model.tokens.proj.bias, wanted, atol=1e-5)
    trainable = practice.solution("make_positions_trainable")(CONFIG)
    assert any(name.startswith("position") for name, _ in vt.ViT(trainable).named_parameters())
    without = practice.solution("drop_class_token")(CONFIG)
    assert vt.ViT(without).prefix is None
    weak = vt.ViTConfig(
        width=9, depth=3, heads=3, patch=16, size=32, channels=1, classes=10, position="sincos1d"
    )
    assert sum(p.numel() for p in vt.ViT(improve(weak)).parameters()) == 105_098 - 50 * 64  # no table


def test_an_unknown_solution_is_refused():
    with pytest.raises(vt.InputError, match=r"Unknown exercise 'draw_e'.*draw_E"):
        practice.solution("draw_e")
