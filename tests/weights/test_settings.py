"""Settings beside the weights that contradict them, or say only a part: each is refused or said."""

import json

import pytest
import safetensors.torch
import torch
import transformers as hf
from timm.models.vision_transformer import VisionTransformer

import vitrail as vt
from conftest import shake
from vitrail.errors import FileError

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32)
NAMES = {"0": "ant", "1": "bee", "2": "cat", "3": "dog", "4": "eel"}
IMAGENET = dict(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])


@pytest.fixture
def folder(tmp_path):
    """transformers' ViT, as it saves one."""
    config = hf.ViTConfig(**SIZES, patch_size=8, num_labels=5)
    shake(hf.ViTForImageClassification(config)).save_pretrained(tmp_path / "in")
    return tmp_path / "in"


@pytest.fixture
def timms(tmp_path):
    """A folder as we write it for timm."""
    sizes = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
    model = shake(VisionTransformer(**sizes))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "timm.safetensors")
    bundle = vt.load(tmp_path / "timm.safetensors", heads=2)
    bundle.labels = list(NAMES.values())
    bundle.save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "timm", to="timm")
    return tmp_path / "timm"


def changed(folder, file="config.json", **settings):
    path = folder / file
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | settings))
    return folder


# ---- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "true"),
    [
        ("hidden_size", 10**9, 32),
        ("hidden_size", "32", 32),
        ("intermediate_size", 49, 48),
        ("image_size", 10**9, 32),
        ("image_size", [32, 40], 32),
        ("patch_size", 7, 8),
        ("num_channels", 1, 3),
    ],
)
def test_a_size_that_the_weights_do_not_have(folder, name, value, true):
    with pytest.raises(FileError, match=rf"config\.json has {name}=.*weights have \(?{true}"):
        vt.load(changed(folder, **{name: value}))
    assert vt.load(folder / "model.safetensors", heads=4).model.config.width == 32  # without its settings


def test_what_the_user_gives_is_not_held_against_the_settings(folder):
    changed(folder, image_size=10**9)
    assert vt.load(folder, size=32).model.config.pixels == (32, 32)


def test_the_tower_of_two(tmp_path):
    tower = dict(SIZES, patch_size=8)
    text = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = hf.CLIPConfig(vision_config=tower, text_config=text)
    shake(hf.CLIPModel(config)).save_pretrained(tmp_path)
    vt.load(tmp_path)  # the text's sizes are its own
    found = json.loads((tmp_path / "config.json").read_text())
    found["vision_config"]["hidden_size"] = 33
    (tmp_path / "config.json").write_text(json.dumps(found))
    with pytest.raises(FileError, match=r"vision_config\.hidden_size=33"):
        vt.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("embed_dim", 10**9), ("depth", 3), ("img_size", 48), ("in_chans", 4), ("reg_tokens", 1)],
)
def test_a_size_of_timm_s(timms, name, value):
    found = json.loads((timms / "config.json").read_text())
    found["model_args"][name] = value
    (timms / "config.json").write_text(json.dumps(found))
    with pytest.raises(FileError, match=rf"model_args\.{name}={value}"):
        vt.load(timms)


def test_timm_s_classes(timms):
    with pytest.raises(FileError, match="num_classes=6"):
        vt.load(changed(timms, num_classes=6))


# ---- labels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"0": "ant", "1": "bee", "3": "dog", "4": "eel"}, "no name for class 2"),
        (NAMES | {"2": None}, "no name for class 2"),
        (NAMES | {"7": "fox"}, "names class 7"),
        ({"zero": "ant"}, "no name for class 0, 1, 2, 3, 4"),
        ("ant bee", "not names by number"),
    ],
)
def test_labels_that_do_not_fit_are_said(folder, names, words):
    bundle = vt.load(changed(folder, id2label=names))
    assert bundle.labels is None
    assert any("labels in config.json were not used" in note and words in note for note in bundle.notes)


def test_labels_as_timm_has_them(timms):
    assert vt.load(timms).labels == list(NAMES.values())


# ---- an index -----------------------------------------------------------------------------------


@pytest.fixture
def sharded(folder):
    state = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in files.items():
        safetensors.torch.save_file({name: state[name] for name in some}, folder / file, {"format": "pt"})
    index(folder, {name: file for file, some in files.items() for name in some})
    return folder


def index(folder, listed):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def listed(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def test_an_index_that_is_true(sharded):
    assert vt.load(sharded).model.config.width == 32


@pytest.mark.parametrize("name", ["vit.embeddings.mask", "vit.embeddings.cls_token"])
def test_an_index_names_a_tensor_that_is_not_there(sharded, name):
    """Not at all, or in the other file."""
    other = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}
    index(sharded, listed(sharded) | {name: other[listed(sharded).get(name, "a.safetensors")]})
    with pytest.raises(FileError, match=rf"index\.json lists {name} in .*holds no such tensor"):
        vt.load(sharded)


def test_an_index_leaves_out_a_tensor(sharded):
    index(sharded, {name: file for name, file in listed(sharded).items() if name != "classifier.bias"})
    with pytest.raises(FileError, match=r"holds classifier\.bias, which .*index\.json does not list"):
        vt.load(sharded)


# ---- JSON ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json", "model.safetensors.index.json"])
def test_where_the_json_is_wrong(folder, file):
    (folder / file).write_text('{\n  "one": 1,\n  "two" 2\n}\n')
    with pytest.raises(FileError, match=rf"{file}: .*line 3 column 9"):
        vt.load(folder)
    (folder / file).write_text('{"one": 1, "one": 2}')
    with pytest.raises(FileError, match=rf"{file}: .*'one' comes twice"):
        vt.load(folder)


# ---- a preprocessor_config.json that says a part --------------------------------------------------


def test_without_a_size_the_rest_is_used(folder):
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(IMAGENET, resample=3)))
    bundle = vt.load(folder)
    spec = bundle.preprocess
    assert (spec.mean, spec.std) == tuple(map(tuple, IMAGENET.values()))
    assert (spec.interpolation, spec.target, spec.resize) == ("bicubic", (32, 32), "squash")
    assert any("preprocessor_config.json has no size" in note for note in bundle.notes)


@pytest.mark.parametrize(
    ("settings", "lacks", "after"),
    [
        (dict(size=32), "resample, image_mean, image_std", dict(mean=(0.5,) * 3, interpolation="bilinear")),
        (dict(IMAGENET, do_resize=False), "size", dict(resize="none")),
        (dict(IMAGENET, resample=3, do_center_crop=True, crop_size=32), "size", dict(resize="shortest")),
        (dict(IMAGENET, resample=3, do_center_crop=True, size={"shortest_edge": 36}), "crop_size",
         dict(resize="shortest", resize_to=(36, 36))),
        (dict(size=32, resample=0, do_normalize=False), "", dict(mean=(0,) * 3, interpolation="nearest")),
    ],
)  # fmt: skip
def test_what_is_lacking_is_as_usual(folder, settings, lacks, after):
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    bundle = vt.load(folder)
    assert {name: getattr(bundle.preprocess, name) for name in after} == after
    assert bundle.preprocess.target == (32, 32)
    said = [note for note in bundle.notes if "preprocessor_config.json has no" in note]
    assert len(said) == bool(lacks)
    assert f"no {lacks};" in "".join(said) if lacks else not said


def test_a_preprocessing_for_another_size_is_said(folder):
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(IMAGENET, resample=3, size=10**9)))
    bundle = vt.load(folder)
    assert bundle.preprocess.target == (32, 32)
    assert any("1000000000x1000000000" in note for note in bundle.notes)


def test_one_that_cannot_be_used_is_not_called_missing(folder):
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(IMAGENET, resample=9)))
    notes = vt.load(folder).notes
    assert any("was not used" in note and "resample=9" in note and "google" in note for note in notes)
    assert not any("not in the file" in note for note in notes)


# ---- a stem -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, (96, 160)])
def test_the_stem_of_a_hybrid_is_named(size, tmp_path):
    """Whose positions are not on a square: no size that is given would fit, as its patches are no pixels."""
    state = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2).state_dict()
    state["pos_embed"] = torch.zeros(1, 61, 32)
    state["patch_embed.proj.weight"] = torch.zeros(32, 1024, 1, 1)
    state["patch_embed.backbone.stem.conv.weight"] = torch.zeros(64, 3, 7, 7)
    safetensors.torch.save_file(state, tmp_path / "hybrid.safetensors")
    with pytest.raises(FileError, match=r"convolutional stem \(patch_embed\.backbone\.stem\.conv\.weight\)"):
        vt.load(tmp_path / "hybrid.safetensors", size=size, heads=2)
