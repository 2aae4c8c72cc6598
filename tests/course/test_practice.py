"""The digits of the practice exercise of note 002."""

import pytest

from tests.support.shared_data import shared
from vitrail_course import practice


def test_without_a_path_the_digits_are_those_of_scikit_learn():
    digits = practice.load_digits(count=300)
    assert repr(digits) == "the digits of scikit-learn: 300 training and 50 test digits"
    assert digits.images.shape == (300, 1, 28, 28)
    assert digits.test_labels.unique().tolist() == list(range(10))
    assert digits.images.min() == pytest.approx(-0.1307 / 0.3081)


def test_mnist_is_read_from_its_folder():
    found = practice.load_digits(shared("data/mnist"), count=120)
    assert repr(found) == "MNIST: 120 training and 20 test digits"
