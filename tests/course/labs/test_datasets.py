"""Data sets of the labs: subsets, descriptions, resizing, and settings that depend on them."""

import numpy as np
import pytest
import torch

from vitrail_course.labs.datasets import (
    arm_recipe,
    describe_dataset,
    input_fields,
    load_dataset,
    patch_size,
    plain_settings,
    resize_dataset,
    stratified_subset,
)


@pytest.fixture(scope="module")
def data():
    return load_dataset(None, 90, 60)


def test_subsets_have_the_requested_size_and_are_reproducible(data):
    assert (len(data.train), len(data.eval_split)) == (90, 60)
    assert data.test is None
    again = load_dataset(None, 90, 60)
    assert np.array_equal(data.train.images, again.train.images)
    assert describe_dataset(data) == "digits, 90 training images and 60 held-out images"


def test_subsets_are_balanced(data):
    for split, times in ((data.train, 9), (data.eval_split, 6)):
        assert torch.from_numpy(split.labels).bincount().tolist() == [times] * 10
    train = load_dataset(None).train
    some = stratified_subset(train, 40, seed=3)
    assert len(some) == 40
    assert torch.from_numpy(some.labels).bincount().tolist() == [4] * 10
    assert (
        some.names == stratified_subset(train, 40, seed=3).names != stratified_subset(train, 40, seed=4).names
    )
    assert stratified_subset(train, 10**6, seed=0) is train


def test_all_images_of_a_rare_class_are_kept(data):
    labels = data.train.labels
    few = data.train.take(np.concatenate([np.flatnonzero(labels == 1), np.flatnonzero(labels == 2)[:2]]))
    for seed in range(4):
        assert torch.from_numpy(stratified_subset(few, 6, seed).labels).bincount().tolist() == [0, 4, 2]


def test_training_and_held_out_images_are_resized(data):
    larger = resize_dataset(data, 28)
    assert larger.train.images.shape == (90, 28, 28, 1)
    assert larger.eval_split.images.shape == (60, 28, 28, 1)
    assert larger.train.images.max() > 200


def test_config_fields_follow_from_the_images(data, tmp_path):
    assert input_fields(data) == {"size": (8, 8), "patch": (2, 2), "channels": 1}
    x = np.random.default_rng(0).integers(0, 256, (40, 14, 21, 3), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=np.arange(40) % 2)
    own = load_dataset(tmp_path / "own.npz", 20, 9)
    assert input_fields(own) == {"size": (14, 21), "patch": (2, 3), "channels": 3}
    assert [patch_size(side) for side in (8, 9, 12, 28, 32)] == [2, 1, 2, 4, 4]  # what divides the side
    assert arm_recipe(own, plain_settings(own, 3), {}).model.grid == (7, 7)


def test_plain_settings_turn_off_regularization(data):
    chosen = arm_recipe(data, plain_settings(data, 3, width=8, heads=2), {"model": {"depth": 2}})
    assert (chosen.model.width, chosen.model.depth, chosen.model.patch_pixels) == (8, 2, (2, 2))
    assert (chosen.model.drop_path, chosen.train.smoothing, chosen.train.ema) == (0.0, 0.0, None)
    assert chosen.train.epochs == 3
