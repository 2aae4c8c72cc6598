"""Lab `attention-distance`: its images, the slope over layers, and a known case."""

import numpy as np
import pytest
import torch

import vitrail as vt
from vitrail.views.sample import sample_model
from vitrail_course.labs import attention_distance as lab


def test_a_run_compares_the_model_with_one_without_training(tmp_path):
    result = lab.run(tmp_path, "small")
    slopes = lab.slope_gains(
        *(map(np.array, (result.numbers[key])) for key in ("distance", "without training"))
    )
    assert result.number == pytest.approx(np.mean(slopes))
    assert result.n == 4
    assert "4 digits" in result.setting
    assert len(result.figure.axes) == 2


def test_a_model_of_photographs_gets_crops_of_photographs():
    preprocess = vt.Bundle(model=vt.create("mu/16", classes=2)).preprocess
    images = lab.load_images(preprocess, 4)
    assert len(images) == 4
    assert images[0].shape[1] == 3
    assert not torch.equal(images[0], images[1])


def test_uniform_attention_has_distance_one():
    """With q and k zero, attention is uniform in every layer."""
    model = sample_model().model
    [image] = lab.load_images(sample_model().preprocess, 1)
    assert np.ptp(lab.measure_distances(model, image)) > 0.01
    with torch.no_grad():
        for block in model.blocks:
            for part in (block.attention.qkv.weight, block.attention.qkv.bias):
                part[: 2 * model.config.width] = 0
    assert lab.measure_distances(model, image) == pytest.approx(1.0)


def test_slope_of_a_straight_line():
    heads = np.array([[0.5, 0.7], [0.6, 0.8], [0.7, 0.9]])
    assert lab.slope_per_layer(heads) == pytest.approx(0.1)
    assert lab.slope_per_layer(heads[::-1]) == pytest.approx(-0.1)
