"""What a lab is given: part of the data, in words, enlarged, and the fields that follow from it."""

import numpy as np
import pytest
import torch

from vitrail.labs.given import described, enlarged, fields_for, opened, part_of, patch_of, plainly, recipe_of


@pytest.fixture(scope="module")
def data():
    return opened(None, 90, 60)


def test_data_is_cut_and_the_same_every_time(data):
    assert (len(data.train), len(data.held_out)) == (90, 60)
    assert data.test is None
    again = opened(None, 90, 60)
    assert np.array_equal(data.train.images, again.train.images)
    assert described(data) == "digits, 90 pictures to learn from and 60 held out"


def test_every_class_comes_alike(data):
    for split, times in ((data.train, 9), (data.held_out, 6)):
        assert torch.from_numpy(split.labels).bincount().tolist() == [times] * 10
    train = opened(None).train
    some = part_of(train, 40, seed=3)
    assert len(some) == 40
    assert torch.from_numpy(some.labels).bincount().tolist() == [4] * 10
    assert some.names == part_of(train, 40, seed=3).names != part_of(train, 40, seed=4).names
    assert part_of(train, 10**6, seed=0) is train


def test_a_rare_class_comes_as_often_as_it_can(data):
    labels = data.train.labels
    few = data.train.take(np.concatenate([np.flatnonzero(labels == 1), np.flatnonzero(labels == 2)[:2]]))
    for seed in range(4):
        assert torch.from_numpy(part_of(few, 6, seed).labels).bincount().tolist() == [0, 4, 2]


def test_pictures_are_enlarged_for_learning_and_judging_alike(data):
    larger = enlarged(data, 28)
    assert larger.train.images.shape == (90, 28, 28, 1)
    assert larger.held_out.images.shape == (60, 28, 28, 1)
    assert larger.train.images.max() > 200


def test_a_model_takes_its_sizes_from_the_pictures(data, tmp_path):
    assert fields_for(data) == {"size": (8, 8), "patch": (2, 2), "channels": 1}
    x = np.random.default_rng(0).integers(0, 256, (40, 14, 21, 3), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=np.arange(40) % 2)
    own = opened(tmp_path / "own.npz", 20, 9)
    assert fields_for(own) == {"size": (14, 21), "patch": (2, 3), "channels": 3}
    assert [patch_of(side) for side in (8, 9, 12, 28, 32)] == [2, 1, 2, 4, 4]  # what divides the side
    assert recipe_of(own, plainly(own, 3), {}).model.grid == (7, 7)


def test_plain_settings_hide_nothing(data):
    chosen = recipe_of(data, plainly(data, 3, width=8, heads=2), {"model": {"depth": 2}})
    assert (chosen.model.width, chosen.model.depth, chosen.model.patch_pixels) == (8, 2, (2, 2))
    assert (chosen.model.drop_path, chosen.train.smoothing, chosen.train.ema) == (0.0, 0.0, None)
    assert chosen.train.epochs == 3
