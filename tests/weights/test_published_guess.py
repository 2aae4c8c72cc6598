"""Files whose tensors do not show which published preprocessing they need."""

import shutil

import pytest
import safetensors.torch
from timm.models.vision_transformer import VisionTransformer

import vitrail as vt
from tests.support.shared_data import shared
from vitrail.images.published import published_preprocess
from vitrail.weights.describe import describe
from vitrail.weights.folder import open_model

SMALL = dict(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=5)


def described(path, **options):
    with open_model(path) as files:
        return describe(files, **options)


@pytest.fixture
def state():
    return VisionTransformer(**SMALL).state_dict()


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("deit_tiny.safetensors", "deit"),
        ("my-DeiT-2.safetensors", "deit"),
        ("vit.augreg_in1k.safetensors", "augreg"),
        ("vit.safetensors", "augreg"),
        ("deity.safetensors", "augreg"),
    ],
)
def test_the_name_tells_or_a_note_says_that_it_is_a_guess(tmp_path, state, name, published):
    safetensors.torch.save_file(state, tmp_path / name)
    found = described(tmp_path / name, heads=2)
    assert found.preprocess == published_preprocess(published, 32)
    notes = " ".join(found.notes)
    told = "deit_" in name or "DeiT" in name or "augreg" in name
    assert ("the name of the file says" in notes) == told
    assert ("preprocess='deit'" in notes) == (not told)


def test_the_user_chooses_by_name(tmp_path, state):
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    bundle = vt.load(tmp_path / "x.safetensors", heads=2, preprocess="deit", size=64)
    assert bundle.preprocess == published_preprocess("deit", 64)
    with pytest.raises(vt.ConfigError, match=r"unknown published preprocessing 'diet'.*deit"):
        vt.load(tmp_path / "x.safetensors", heads=2, preprocess="diet")


def test_a_real_deit_file(tmp_path):
    """With mean and std 0.5 it has 766 of 1,000 ImageNet images right, with ImageNet's 796."""
    path = shared("data/weights/deit_tiny_imagenet1k.safetensors")
    assert described(path).preprocess == published_preprocess("deit", 224)
    shutil.copy(path, tmp_path / "weights.safetensors")
    found = described(tmp_path / "weights.safetensors")
    assert any("files of deit look the same and have mean (0.485" in note for note in found.notes)
