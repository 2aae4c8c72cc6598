"""Lab `translation`: equivariance in known cases, and the verdict for every outcome."""

import math
from dataclasses import replace

import pytest
import torch

from vitrail.base.errors import VitrailError
from vitrail.experiment.trial import one_thread
from vitrail_course.labs import translation
from vitrail_course.labs.datasets import load_dataset
from vitrail_course.labs.equivariance import CNN, builders_for, feature_change, influenced_pixels, surround
from vitrail_course.labs.translation import load_inputs


@pytest.fixture(autouse=True)
def single_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp("translation")
    with one_thread():
        return out, translation.run(out, "small")


@pytest.fixture(scope="module")
def digits():
    return load_inputs(load_dataset(None, 64).train)


def test_small_run_leaves_no_files(small):
    out, result = small
    assert list(out.iterdir()) == []
    assert math.isfinite(result.number)
    assert result.n == 1, "the first of two seeds chooses the learning rate"
    assert "nan" not in result.setting
    assert len(result.figure.axes) == 3
    counts = [result.numbers["parameters"][name] for name in translation.ARMS]
    assert max(counts) < 1.2 * min(counts)


def test_feature_changes_of_shifted_images(small):
    """A CNN is equivariant to pixels, with pooling to strides; a ViT without positions to patches."""
    changes = small[1].numbers["change when shifted"]
    assert max(changes["CNN without pooling"].values()) < 1e-4
    assert changes["CNN"]["1 patch"] < 1e-4 < 0.05 < changes["CNN"]["1 pixel"]
    without = changes["ViT without positions"]
    assert without["1 patch"] < 1e-4 < 0.05 < without["1 pixel"]
    assert min(changes["ViT"].values()) > 0.05


def test_one_pixel_influences_a_neighborhood_in_a_cnn_and_all_of_a_vit(small, digits):
    influenced = small[1].numbers["pixels influenced by one pixel"]
    assert influenced["CNN without pooling"] == 7  # three convolutions of 3 x 3
    assert influenced["ViT"] == digits[0].shape[3] == 16
    assert influenced_pixels(CNN(1, 10, pooling=True).eval(), torch.rand(2, 1, 48, 48)) < 48


def test_no_shift_changes_nothing(digits):
    for build in builders_for(digits[0], 10).values():
        assert feature_change(build().eval(), digits[0][:4], 0) < 1e-5


def test_surrounded_images(digits):
    images = digits[0][:12]
    padded = surround(images)
    assert padded.shape == (12, 1, 48, 48)
    assert torch.equal(padded[:, :, 16:32, 16:32], images)
    assert not torch.equal(padded[:, :, :16, :16], images)


def test_tiny_images_are_upsampled_and_files_rejected():
    split = load_dataset(None, 10).train
    images, labels = load_inputs(split)
    assert images.shape == (10, 1, 16, 16)
    assert torch.equal(images[:, :, ::2, ::2], images[:, :, 1::2, 1::2])
    assert images.min() >= -1
    assert images.max() <= 1
    assert len(labels) == 10
    with pytest.raises(VitrailError, match="not image files"):
        load_inputs(replace(split, images=None))


# ---- verdicts -------------------------------------------------------------------------------
