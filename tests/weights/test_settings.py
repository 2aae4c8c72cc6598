"""Settings beside the weights that contradict them or are incomplete: each is refused or noted."""

import json

import pytest
import safetensors.torch
import torch
import transformers as hf
from timm.models.vision_transformer import VisionTransformer

import vitrail as vt
from tests.support.models import add_noise
from vitrail.base.errors import FileError

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32)
NAMES = {"0": "ant", "1": "bee", "2": "cat", "3": "dog", "4": "eel"}
IMAGENET = dict(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])


@pytest.fixture
def folder(tmp_path):
    """transformers' ViT, saved by transformers."""
    config = hf.ViTConfig(**SIZES, patch_size=8, num_labels=5)
    add_noise(hf.ViTForImageClassification(config)).save_pretrained(tmp_path / "in")
    return tmp_path / "in"


@pytest.fixture
def timm_folder(tmp_path):
    """A folder that we write for timm."""
    sizes = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
    model = add_noise(VisionTransformer(**sizes))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "timm.safetensors")
    bundle = vt.load(tmp_path / "timm.safetensors", heads=2)
    bundle.labels = list(NAMES.values())
    bundle.save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "timm", to="timm")
    return tmp_path / "timm"


def changed(folder, file="config.json", **settings):
    path = folder / file
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | settings))
    return folder


# ---- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "stored"),
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
def test_sizes_that_contradict_the_weights(folder, name, value, stored):
    with pytest.raises(FileError, match=rf"config\.json has {name}=.*weights have \(?{stored}"):
        vt.load(changed(folder, **{name: value}))
    assert vt.load(folder / "model.safetensors", heads=4).model.config.width == 32  # without its settings


def test_given_sizes_are_not_compared_with_the_settings(folder):
    changed(folder, image_size=10**9)
    assert vt.load(folder, size=32).model.config.pixels == (32, 32)


def test_the_vision_config_of_two_towers(tmp_path):
    tower = dict(SIZES, patch_size=8)
    text = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = hf.CLIPConfig(vision_config=tower, text_config=text)
    add_noise(hf.CLIPModel(config)).save_pretrained(tmp_path)
    vt.load(tmp_path)  # the sizes of the text tower do not matter
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["hidden_size"] = 33
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileError, match=r"vision_config\.hidden_size=33"):
        vt.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("embed_dim", 10**9), ("depth", 3), ("img_size", 48), ("in_chans", 4), ("reg_tokens", 1)],
)
def test_sizes_in_timm_s_settings(timm_folder, name, value):
    config = json.loads((timm_folder / "config.json").read_text())
    config["model_args"][name] = value
    (timm_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileError, match=rf"model_args\.{name}={value}"):
        vt.load(timm_folder)


def test_classes_in_timm_s_settings(timm_folder):
    with pytest.raises(FileError, match="num_classes=6"):
        vt.load(changed(timm_folder, num_classes=6))


# ---- labels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"0": "ant", "1": "bee", "3": "dog", "4": "eel"}, "no name for class 2"),
        (NAMES | {"2": None}, "no name for class 2"),
        (NAMES | {"7": "fox"}, "names class 7"),
        ({"zero": "ant"}, "no name for class 0, 1, 2, 3, 4"),
        ("ant bee", "not names by number"),
    ],
)
def test_labels_that_do_not_fit_are_noted(folder, names, message):
    bundle = vt.load(changed(folder, id2label=names))
    assert bundle.labels is None
    assert any("labels in config.json were not used" in note and message in note for note in bundle.notes)


def test_labels_in_timm_s_settings(timm_folder):
    assert vt.load(timm_folder).labels == list(NAMES.values())


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


def test_a_correct_index(sharded):
    assert vt.load(sharded).model.config.width == 32


@pytest.mark.parametrize("name", ["vit.embeddings.mask", "vit.embeddings.cls_token"])
def test_an_index_that_lists_a_missing_tensor(sharded, name):
    """Missing everywhere, or in another file."""
    other = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}
    index(sharded, listed(sharded) | {name: other[listed(sharded).get(name, "a.safetensors")]})
    with pytest.raises(FileError, match=rf"index\.json lists {name} in .*holds no such tensor"):
        vt.load(sharded)


def test_an_index_that_omits_a_tensor(sharded):
    index(sharded, {name: file for name, file in listed(sharded).items() if name != "classifier.bias"})
    with pytest.raises(FileError, match=r"holds classifier\.bias, which .*index\.json does not list"):
        vt.load(sharded)


# ---- JSON ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json", "model.safetensors.index.json"])
def test_invalid_json(folder, file):
    (folder / file).write_text('{\n  "one": 1,\n  "two" 2\n}\n')
    with pytest.raises(FileError, match=rf"{file} is not valid JSON: .*line 3, column 9"):
        vt.load(folder)
    (folder / file).write_text('{"one": 1, "one": 2}')
    with pytest.raises(FileError, match=rf"{file} is not valid JSON: .*'one' appears twice"):
        vt.load(folder)


# ---- an incomplete preprocessor_config.json --------------------------------------------------


def test_a_missing_size(folder):
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(IMAGENET, resample=3)))
    bundle = vt.load(folder)
    spec = bundle.preprocess
    assert (spec.mean, spec.std) == tuple(map(tuple, IMAGENET.values()))
    assert (spec.interpolation, spec.target, spec.resize) == ("bicubic", (32, 32), "squash")
    assert any("preprocessor_config.json has no size" in note for note in bundle.notes)


@pytest.mark.parametrize(
    ("settings", "missing", "expected"),
    [
        (dict(size=32), "resample, image_mean, image_std", dict(mean=(0.5,) * 3, interpolation="bilinear")),
        (dict(IMAGENET, do_resize=False), "size", dict(resize="none")),
        (dict(IMAGENET, resample=3, do_center_crop=True, crop_size=32), "size", dict(resize="shortest")),
        (dict(IMAGENET, resample=3, do_center_crop=True, size={"shortest_edge": 36}), "crop_size",
         dict(resize="shortest", resize_to=(36, 36))),
        (dict(size=32, resample=0, do_normalize=False), "", dict(mean=(0,) * 3, interpolation="nearest")),
    ],
)  # fmt: skip
def test_missing_keys_have_the_usual_values(folder, settings, missing, expected):
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    bundle = vt.load(folder)
    assert {name: getattr(bundle.preprocess, name) for name in expected} == expected
    assert bundle.preprocess.target == (32, 32)
    notes = [note for note in bundle.notes if "preprocessor_config.json has no" in note]
    assert len(notes) == bool(missing)
    assert f"no {missing};" in "".join(notes) if missing else not notes


def test_a_preprocessing_for_another_size_is_noted(folder):
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(IMAGENET, resample=3, size=10**9)))
    bundle = vt.load(folder)
    assert bundle.preprocess.target == (32, 32)
    assert any("1000000000x1000000000" in note for note in bundle.notes)


def test_an_unusable_one_is_not_called_missing(folder):
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(IMAGENET, resample=9)))
    notes = vt.load(folder).notes
    assert any("was not used" in note and "resample=9" in note and "google" in note for note in notes)
    assert not any("has no preprocessing" in note for note in notes)


# ---- a stem -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, (96, 160)])
def test_the_stem_of_a_hybrid_is_named(size, tmp_path):
    """Its positions are not on a square; no size would fit, since its patches are not pixels."""
    state = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2).state_dict()
    state["pos_embed"] = torch.zeros(1, 61, 32)
    state["patch_embed.proj.weight"] = torch.zeros(32, 1024, 1, 1)
    state["patch_embed.backbone.stem.conv.weight"] = torch.zeros(64, 3, 7, 7)
    safetensors.torch.save_file(state, tmp_path / "hybrid.safetensors")
    with pytest.raises(FileError, match=r"convolutional stem \(patch_embed\.backbone\.stem\.conv\.weight\)"):
        vt.load(tmp_path / "hybrid.safetensors", size=size, heads=2)
