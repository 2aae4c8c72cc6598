"""Files whose tensors do not show which published preprocessing they need."""

import json
import shutil

import pytest
import safetensors.torch
import transformers as hf
from timm.models.vision_transformer import VisionTransformer

import vitrail as vt
from tests.support.command import run_command
from tests.support.hf_models import save_pretrained
from tests.support.shared_data import shared
from vitrail.images.published_preprocess import published_preprocess
from vitrail.weights.load import describe
from vitrail.weights.readers.folder import open_model

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
    assert ("known from the name of the file" in notes) == told
    assert ("preprocess='deit'" in notes) == (not told)


BY_NAME = {
    "architecture": {"architecture": "deit_tiny_patch16_224", "num_classes": 5},
    "pretrained_cfg.tag": {"architecture": "vit_x", "pretrained_cfg": {"tag": "deit_in1k"}},
    "_name_or_path": {"_name_or_path": "facebook/deit-tiny-patch16-224"},
}
PIXELS = {"input_size": [3, 32, 32], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 1.0}


def info(path, *arguments):
    """`vitrail info` as a process of its own: what it prints, in one line."""
    done = run_command("info", path, "--set", "heads=2", *arguments, cwd=path.parent, columns=500)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


@pytest.fixture
def folder(tmp_path, state):
    def write(**files):
        safetensors.torch.save_file(state, tmp_path / "model.safetensors")
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(
                content if isinstance(content, str) else json.dumps(content)
            )
        return tmp_path

    return write


@pytest.mark.parametrize("settings", BY_NAME.values(), ids=BY_NAME)
def test_a_name_in_the_settings_tells_which(folder, settings):
    path = folder(config=settings)
    for one in (path, path / "model.safetensors"):
        found = described(one, heads=2)
        assert found.preprocess == published_preprocess("deit", 32)
        assert found.preprocess_from.startswith("published for deit, known from config.json, ")
        assert not any("That is a guess" in note for note in found.notes)
        assert vt.load(one, heads=2).preprocess == found.preprocess


def test_timms_pretrained_cfg_is_used_for_a_folder_and_for_its_file(folder):
    path = folder(config={"architecture": "vit_tiny_patch16_224", "pretrained_cfg": PIXELS})
    for one, origin in (
        (path, "config.json (pretrained_cfg)"),
        (path / "model.safetensors", "config.json (pretrained_cfg) beside the file"),
    ):
        bundle = vt.load(one, heads=2)
        assert (bundle.preprocess.mean, bundle.preprocess.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
        assert described(one, heads=2).preprocess_from == origin
    assert f"The preprocessing is that of {origin}." in bundle.notes


def test_the_only_weight_file_of_a_folder_has_its_settings(folder):
    path = folder(config={"pretrained_cfg": PIXELS})
    other = (path / "model.safetensors").rename(path / "other.safetensors")
    found = described(other, heads=2)
    assert found.preprocess.mean == (0.1, 0.2, 0.3)
    assert found.preprocess_from == "config.json (pretrained_cfg) beside the file"
    assert not found.guess


@pytest.mark.parametrize("second", ["model.safetensors", "second.pth"])
def test_a_file_of_another_name_has_no_neighbours(folder, second):
    """With two weight files, a config.json belongs to model.safetensors; of others it says nothing."""
    path = folder(config={"pretrained_cfg": PIXELS})
    other = (path / "model.safetensors").rename(path / "other.safetensors")
    shutil.copy(other, path / second)
    assert described(other, heads=2).preprocess == published_preprocess("augreg", 32)


def test_a_folder_that_may_not_be_listed_tells_nothing(folder, monkeypatch):
    path = folder(config={"pretrained_cfg": PIXELS})
    other = (path / "model.safetensors").rename(path / "other.safetensors")

    def forbidden(self):
        raise PermissionError

    monkeypatch.setattr("pathlib.Path.iterdir", forbidden)
    assert described(other, heads=2).preprocess == published_preprocess("augreg", 32)


def test_the_name_of_a_folder_is_called_that(tmp_path, state):
    (tmp_path / "deit_folder").mkdir()
    safetensors.torch.save_file(state, tmp_path / "deit_folder" / "x.safetensors")
    found = described(tmp_path / "deit_folder", heads=2)
    assert found.preprocess_from == "published for deit, known from the name of the folder: deit_folder"


@pytest.mark.parametrize("content", ["{", "[]", '{"pretrained_cfg": {"mean": [1]}}'])
def test_a_broken_neighbour_is_no_obstacle(folder, content):
    found = described(folder(config=content) / "model.safetensors", heads=2)
    assert found.preprocess == published_preprocess("augreg", 32)
    assert any("not used" in note for note in found.notes)


def test_info_says_where_the_preprocessing_comes_from(folder):
    named = info(folder(config=BY_NAME["architecture"]))
    assert "published for deit, known from config.json, architecture: deit_tiny_patch16_224" in named
    assert "minus (0.485, 0.456, 0.406)" in named
    stored = info(folder(config={"pretrained_cfg": PIXELS}) / "model.safetensors")
    assert "preprocessing from config.json (pretrained_cfg) beside the file" in stored
    assert "minus (0.1, 0.2, 0.3)" in stored
    assert "preprocessing from as given" in info(folder(), "--set", "preprocess=deit")


def test_info_shows_a_guess_with_its_candidates(tmp_path, state):
    """Both candidates, how they differ, and how to choose."""
    safetensors.torch.save_file(state, tmp_path / "weights.safetensors")
    shown = info(tmp_path / "weights.safetensors")
    assert "preprocessing from published for augreg, a guess (see the notes)" in shown
    assert "the one published for augreg is used: mean 0.5, std 0.5." in shown
    assert (
        "files of deit look the same and have mean (0.485, 0.456, 0.406), std (0.229, 0.224, 0.225)" in shown
    )
    assert "if this is one, give --set preprocess=deit" in shown
    assert (
        "796 correctly with mean and std of ImageNet and short side 256, and 766 with mean and std 0.5"
        in shown
    )


def test_candidates_that_are_resized_differently(tmp_path):
    """Google's files are squashed, DeiT's cropped: the note says so."""
    config = hf.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    save_pretrained(hf.ViTForImageClassification(config), tmp_path)
    found = described(tmp_path / "model.safetensors", heads=2)
    assert "short side to 248 by bicubic" in found.notes[-1]


def test_the_user_chooses_by_name(tmp_path, state):
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    bundle = vt.load(tmp_path / "x.safetensors", heads=2, preprocess="deit", size=64)
    assert bundle.preprocess == published_preprocess("deit", 64)
    with pytest.raises(vt.ConfigError, match=r"unknown published preprocessing 'diet'.*deit"):
        vt.load(tmp_path / "x.safetensors", heads=2, preprocess="diet")


def test_a_real_deit_file(tmp_path):
    path = shared("data/weights/deit_tiny_imagenet1k.safetensors")
    assert described(path).preprocess == published_preprocess("deit", 224)
    shutil.copy(path, tmp_path / "weights.safetensors")
    found = described(tmp_path / "weights.safetensors")
    assert any("files of deit look the same and have mean (0.485" in note for note in found.notes)
