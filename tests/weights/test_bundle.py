"""The bundle: one file that is a whole model, and says so truly."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import vitrail as vt
from conftest import shake
from vitrail.weights.verify import verify

SMALL = dict(width=32, depth=2, heads=2, patch=8, size=32, classes=3)
GOLDEN = Path(__file__).parent / "golden-1.safetensors"


@pytest.fixture
def bundle():
    torch.manual_seed(0)
    preprocess = vt.Preprocess(size=32, resize="shortest", resize_to=36, interpolation="bicubic")
    card = vt.Card(name="pets", source="a test", licence="MIT", metrics={"accuracy": 0.97})
    model = shake(vt.ViT(vt.ViTConfig(**SMALL)))
    extras = {"mask_token": torch.randn(1, 32)}
    return vt.Bundle(
        model=model, preprocess=preprocess, labels=["cat", "dog", "eel"], card=card, extras=extras
    )


def header(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["vitrail"])


def rewritten(path, **changes):
    """The file with parts of its description changed; None takes one out."""
    tensors, described = safetensors.torch.load_file(path), header(path)
    for name, value in changes.items():
        described.pop(name) if value is None else described.__setitem__(name, value)
    safetensors.torch.save_file(tensors, path, {"vitrail": json.dumps(described)})
    return path


def test_everything_comes_back(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    again = vt.load(tmp_path / "pets.safetensors")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(again.model(images), bundle.model(images))
    assert again.model.config == bundle.model.config
    assert again.preprocess == bundle.preprocess
    assert again.labels == ["cat", "dog", "eel"]
    assert (again.card.name, again.card.licence, again.card.metrics) == ("pets", "MIT", {"accuracy": 0.97})
    assert again.card.versions["torch"] == torch.__version__
    assert torch.equal(again.extras["mask_token"], bundle.extras["mask_token"])
    assert not again.model.training


def test_what_is_not_given_has_a_default(tmp_path):
    model = vt.create("mu/8", classes=2, channels=1)
    vt.Bundle(model=model, labels=["cat", "dog"]).save(tmp_path / "new.safetensors")
    again = vt.load(tmp_path / "new.safetensors")
    assert again.preprocess == vt.Preprocess(size=32, mean=(0.5,), std=(0.5,))
    assert again.card.licence == "unknown"


def test_our_tensors_have_our_names(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    state = bundle.model.state_dict()
    tensors = safetensors.torch.load_file(tmp_path / "pets.safetensors")
    assert set(tensors) == {*state, "extras/mask_token", "golden/inputs", "golden/logits"}
    assert tensors["golden/inputs"].shape == (4, 3, 32, 32)
    assert tensors["golden/inputs"].dtype == torch.uint8
    assert all(torch.equal(tensors[name], state[name]) for name in state)


def test_golden_logits_are_those_of_the_preprocessed_inputs(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    tensors = safetensors.torch.load_file(tmp_path / "pets.safetensors")
    pictures = tensors["golden/inputs"].permute(0, 2, 3, 1).numpy()
    with torch.no_grad():
        logits = bundle.model(torch.stack([bundle.preprocess.normalise(p) for p in pictures]))
    assert torch.equal(logits, tensors["golden/logits"])
    assert len({tuple(row) for row in pictures.reshape(4, -1)[:, :9].tolist()}) == 4


def test_saving_leaves_the_model_as_it_was(bundle, tmp_path):
    bundle.model.train()
    bundle.model.blocks[0].eval()
    before = [module.training for module in bundle.model.modules()]
    bundle.save(tmp_path / "pets.safetensors")
    assert [module.training for module in bundle.model.modules()] == before


def test_a_half_model_is_kept_in_half(bundle, tmp_path):
    bundle.model.half()
    bundle.save(tmp_path / "half.safetensors")
    tensors = safetensors.torch.load_file(tmp_path / "half.safetensors")
    assert tensors["head.weight"].dtype == torch.float16
    assert vt.load(tmp_path / "half.safetensors").model.head.weight.dtype == torch.float32
    assert (
        vt.load(tmp_path / "half.safetensors", dtype=torch.float16).model.head.weight.dtype == torch.float16
    )
    assert verify(tmp_path / "half.safetensors").holds


@pytest.mark.parametrize(
    "fields",
    [
        dict(input="video", size=(4, 16, 16), patch=(2, 8, 8)),
        dict(input="audio", channels=1, size=(16, 16), patch=8),
        dict(input="text", size=9, patch=1, vocabulary=11),
        dict(position="sincos2d"),
        dict(position="rotary"),
        dict(position="relative", qkv_bias="no-k"),
        dict(classes=0),
    ],
    ids=str,
)
def test_every_kind_of_model_has_its_proof(fields, tmp_path):
    """What is computed and not stored (sines, angles, windows) is there after loading too."""
    model = shake(vt.ViT(vt.ViTConfig(**SMALL | fields)))
    vt.Bundle(model=model).save(tmp_path / "m.safetensors")
    verdict = verify(tmp_path / "m.safetensors")
    assert (verdict.holds, verdict.difference, verdict.inputs) == (True, 0.0, 4)


def test_verify_sees_a_changed_weight(bundle, tmp_path):
    path = tmp_path / "pets.safetensors"
    bundle.save(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    tensors["blocks.1.mlp.fc2.weight"][3, 3] += 1e-2
    safetensors.torch.save_file(tensors, path, metadata)
    verdict = verify(path)
    assert not verdict.holds
    assert verdict.difference > verdict.limit


def test_verify_sees_other_preprocessing(bundle, tmp_path):
    path = tmp_path / "pets.safetensors"
    bundle.save(path)
    spec = dataclasses.asdict(dataclasses.replace(bundle.preprocess, std=(0.6, 0.5, 0.5)))
    assert not verify(rewritten(path, preprocess=spec)).holds


def test_the_golden_file_of_the_first_format():
    """Written once by the first version that had bundles. Whatever reads it must give its logits."""
    verdict = verify(GOLDEN)
    assert verdict.holds
    bundle = vt.load(GOLDEN)
    assert bundle.labels == ["zero", "one", "two"]
    assert bundle.card.licence == "Apache-2.0"
    assert bundle.preprocess.resize == "shortest"
    assert bundle.model.config.registers == 2
    assert list(bundle.extras) == ["mask_token"]
    assert header(GOLDEN)["format"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(format=2), "reads files up to format 1. Got .* of format 2. Install a newer vitrail"),
        (dict(format="1"), "no format version"),
        (dict(format=None), "no format version"),
        (dict(config=None), "no config"),
        (dict(config=[1]), "no config"),
        (dict(run="rm -rf"), r"its description has \['run'\]"),
        (dict(config={"width": 32, "depth": 2, "heads": 2, "patch": 8, "_target_": "os.system"}), "_target_"),
        (dict(config={"width": 10**9, "depth": 10**4, "heads": 1, "patch": 8}), "at most 100,000,000,000 parameters"),
        (dict(config={"width": 48, "depth": 2, "heads": 2, "patch": 8, "size": 32, "classes": 3}), "48 for|32 for 48"),
        (dict(labels=["a"]), "labels must be a list of 3 names"),
        (dict(labels=[1, 2, 3]), "labels must be a list of 3 names"),
        (dict(preprocess={"size": 99}), "must give what the model takes"),
        (dict(preprocess={"sise": 32}), "sise"),
        (dict(preprocess="auto"), "describe its model"),
        (dict(card={"licence": "MIT", "price": 3}), "price"),
        (dict(source={"family": "timm"}), "describe its model"),
    ],
)  # fmt: skip
def test_a_description_that_is_not_right_is_refused(bundle, changes, message, tmp_path):
    path = tmp_path / "pets.safetensors"
    bundle.save(path)
    with pytest.raises(vt.VitrailError, match=message) as caught:
        vt.load(rewritten(path, **changes))
    assert "pets.safetensors" in str(caught.value)


def test_tensors_that_do_not_belong_are_refused(bundle, tmp_path):
    path = tmp_path / "pets.safetensors"
    bundle.save(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({**tensors, "blocks.9.norm1.weight": torch.ones(32)}, path, metadata)
    with pytest.raises(vt.FileError, match=r"with, besides, blocks.9.norm1.weight"):
        vt.load(path)
    del tensors["norm.weight"]
    safetensors.torch.save_file(tensors, path, metadata)
    with pytest.raises(vt.FileError, match=r"without norm.weight"):
        vt.load(path)


def test_a_fact_that_is_told_goes_before_the_file(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    told = vt.load(tmp_path / "pets.safetensors", eps=1e-3, activation="gelu-tanh", heads=2)
    assert told.model.config.eps == 1e-3
    assert told.notes == [
        "eps is 0.001 as told, and 1e-06 in the file.",
        "activation is 'gelu-tanh' as told, and 'gelu' in the file.",
    ]
    with pytest.raises(vt.ConfigError, match="takes only the fields it has"):
        vt.load(tmp_path / "pets.safetensors", head=4, hidden_size=3)
    with pytest.raises(vt.FileError, match=r"without blocks.0.scale1.weight"):
        vt.load(tmp_path / "pets.safetensors", layer_scale=0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(labels=["a", "b"]), "labels must be a list of 3 names, one for each class. Got 2 of them"),
        (dict(preprocess=vt.Preprocess(size=64)), r"\(3, 64, 64\) for a model that takes \(3, 32, 32\)"),
        (dict(model="B/16"), "A bundle holds a ViT. Got 'B/16'"),
    ],
)
def test_a_bundle_that_cannot_be(given, message):
    with pytest.raises(vt.VitrailError, match=message):
        vt.Bundle(**{"model": vt.ViT(vt.ViTConfig(**SMALL)), **given})


# ---- fitting --------------------------------------------------------------------------------


def test_each_change_is_a_sentence(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    changed = vt.load(tmp_path / "pets.safetensors", classes=7, size=(48, 64), channels=1, patch=16)
    assert changed.notes == [
        "The patch projection for 3 channels was changed to take 1.",
        "The patch projection was resized from 8x8 to 16x16 pixels.",
        "Positions were resized from a grid of 4x4 to 3x4.",
        "The head for 3 classes was replaced by a new one for 7, all zero.",
    ]
    assert changed.labels is None
    assert changed.preprocess.target == (48, 64)
    assert changed.preprocess.mean == (0.5,)
    assert changed.model(torch.randn(2, 1, 48, 64)).shape == (2, 7)
    changed.save(tmp_path / "changed.safetensors")
    assert verify(tmp_path / "changed.safetensors").holds


def test_nothing_asked_nothing_changed(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    same = vt.load(tmp_path / "pets.safetensors", classes=3, size=32, channels=3, patch=8)
    assert same.notes == []
    assert same.labels == bundle.labels


def test_the_head_can_be_taken_off(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    bare = vt.load(tmp_path / "pets.safetensors", classes=0)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(bare.model(images), bundle.model.encode(images).pooled)


def test_a_grey_picture_gives_what_it_gave_in_colour(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    grey = vt.load(tmp_path / "pets.safetensors", channels=1)
    level = np.random.default_rng(0).integers(0, 256, (32, 32, 1), dtype=np.uint8)
    one = grey.model(grey.preprocess(level)[None])
    three = bundle.model(bundle.preprocess(np.repeat(level, 3, axis=2))[None])
    assert (one - three).abs().max() < 1e-5


def test_resizing_follows_the_family(tmp_path):
    """A DINOv2 file is resized with its offset, a timm file with antialias: not the same numbers."""
    from timm.models.vision_transformer import VisionTransformer

    small = dict(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=0)
    state = shake(VisionTransformer(**small, init_values=1e-5)).state_dict()
    safetensors.torch.save_file(state, tmp_path / "timm.safetensors")
    safetensors.torch.save_file({**state, "mask_token": torch.zeros(1, 32)}, tmp_path / "dino.safetensors")
    table = state["pos_embed"][0, 1:]
    for name, how in [
        ("timm", dict(method="bicubic", antialias=True)),
        ("dino", dict(method="bicubic", antialias=False, offset=0.1)),
    ]:
        for path in (tmp_path / f"{name}.safetensors", tmp_path / f"{name}-ours.safetensors"):
            facts = {} if "ours" in path.name else dict(heads=2)
            if facts:
                vt.load(path, heads=2).save(tmp_path / f"{name}-ours.safetensors")
            loaded = vt.load(path, size=24, **facts)
            from vitrail.model.resample import resize_grid

            expected = resize_grid(table, (4, 4), (3, 3), **how)
            assert torch.equal(loaded.model.position.table[1:], expected), path.name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_device(bundle, device, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    assert vt.load(tmp_path / "pets.safetensors", device=device).model.head.weight.device.type == device


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(size=30), "whole number of patches"),
        (dict(size=(32, 32, 32)), "size must be one number"),
        (dict(classes=-1), "classes must be a whole number"),
        (dict(channels=0), "channels must be"),
        (dict(patch=5), "whole number of patches"),
        (dict(device="gpu"), "device"),
    ],
)
def test_what_cannot_be_fitted_is_said(bundle, asked, message, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    with pytest.raises(vt.VitrailError, match=message):
        vt.load(tmp_path / "pets.safetensors", **asked)
