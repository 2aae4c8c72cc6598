"""Bundles: a complete model in one file, verified by its golden logits."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import vitrail as vt
from tests.support.models import add_noise
from vitrail.weights.bundle.golden import verify

SMALL = dict(width=32, depth=2, heads=2, patch=8, size=32, classes=3)
GOLDEN = Path(__file__).parent / "golden-1.safetensors"
GOLDEN_2 = Path(__file__).parent / "golden-2.safetensors"


@pytest.fixture
def bundle():
    torch.manual_seed(0)
    preprocess = vt.Preprocess(size=32, resize="shortest", resize_to=36, interpolation="bicubic")
    card = vt.Card(name="pets", source="a test", license="MIT", metrics={"accuracy": 0.97})
    model = add_noise(vt.ViT(vt.ViTConfig(**SMALL)))
    extras = {"mask_token": torch.randn(1, 32)}
    return vt.Bundle(
        model=model, preprocess=preprocess, labels=["cat", "dog", "eel"], card=card, extras=extras
    )


def header(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["vitrail"])


def rewritten(path, **changes):
    """Change parts of the description in a file; None removes a part."""
    tensors, description = safetensors.torch.load_file(path), {**header(path), **changes}
    description = {name: value for name, value in description.items() if value is not None}
    safetensors.torch.save_file(tensors, path, {"vitrail": json.dumps(description)})
    return path


def test_save_and_load_round_trip(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    again = vt.load(tmp_path / "pets.safetensors")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(again.model(images), bundle.model(images))
    assert again.model.config == bundle.model.config
    assert again.preprocess == bundle.preprocess
    assert again.labels == ["cat", "dog", "eel"]
    assert (again.card.name, again.card.license, again.card.metrics) == ("pets", "MIT", {"accuracy": 0.97})
    assert again.card.versions["torch"] == torch.__version__
    assert torch.equal(again.extras["mask_token"], bundle.extras["mask_token"])
    assert not again.model.training


def test_defaults(tmp_path):
    model = vt.create("mu/8", classes=2, channels=1)
    vt.Bundle(model=model, labels=["cat", "dog"]).save(tmp_path / "new.safetensors")
    again = vt.load(tmp_path / "new.safetensors")
    assert again.preprocess == vt.Preprocess(size=32, mean=(0.5,), std=(0.5,))
    assert again.card.license == "unknown"


def test_tensor_names_in_the_file(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    state = bundle.model.state_dict()
    tensors = safetensors.torch.load_file(tmp_path / "pets.safetensors")
    assert set(tensors) == {*state, "extras/mask_token", "golden/inputs", "golden/logits"}
    assert tensors["golden/inputs"].shape == (4, 3, 32, 32)
    assert tensors["golden/inputs"].dtype == torch.uint8
    assert all(torch.equal(tensors[name], state[name]) for name in state)


def test_golden_logits_are_those_of_the_normalized_inputs(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    tensors = safetensors.torch.load_file(tmp_path / "pets.safetensors")
    images = tensors["golden/inputs"].permute(0, 2, 3, 1).numpy()
    with torch.no_grad():
        logits = bundle.model(torch.stack([bundle.preprocess.normalize(p) for p in images]))
    assert torch.equal(logits, tensors["golden/logits"])
    assert len({tuple(row) for row in images.reshape(4, -1)[:, :9].tolist()}) == 4


def test_saving_does_not_change_the_training_mode(bundle, tmp_path):
    bundle.model.train()
    bundle.model.blocks[0].eval()
    before = [module.training for module in bundle.model.modules()]
    bundle.save(tmp_path / "pets.safetensors")
    assert [module.training for module in bundle.model.modules()] == before


def test_a_float16_model_is_saved_in_float16(bundle, tmp_path):
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
def test_every_kind_of_model_verifies(fields, tmp_path):
    """Buffers that are computed and not stored (sines, angles, windows) exist after loading too."""
    model = add_noise(vt.ViT(vt.ViTConfig(**SMALL | fields)))
    vt.Bundle(model=model).save(tmp_path / "m.safetensors")
    result = verify(tmp_path / "m.safetensors")
    assert (result.holds, result.difference, result.inputs) == (True, 0.0, 4)


def test_verify_detects_a_changed_weight(bundle, tmp_path):
    path = tmp_path / "pets.safetensors"
    bundle.save(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    tensors["blocks.1.mlp.fc2.weight"][3, 3] += 1e-2
    safetensors.torch.save_file(tensors, path, metadata)
    result = verify(path)
    assert not result.holds
    assert result.difference > result.limit


def test_verify_detects_changed_preprocessing(bundle, tmp_path):
    path = tmp_path / "pets.safetensors"
    bundle.save(path)
    spec = dataclasses.asdict(dataclasses.replace(bundle.preprocess, std=(0.6, 0.5, 0.5)))
    assert not verify(rewritten(path, preprocess=spec)).holds


def test_files_of_format_1_are_read_for_ever():
    """Written by the first version that had bundles. Every later version must read it and give its logits."""
    result = verify(GOLDEN)
    assert result.holds
    bundle = vt.load(GOLDEN)
    assert bundle.labels == ["zero", "one", "two"]
    assert bundle.card.license == "Apache-2.0"
    assert bundle.preprocess.resize == "shortest"
    assert bundle.model.config.registers == 2
    assert bundle.model.config.input == "image"
    assert list(bundle.extras) == ["mask_token"]
    assert header(GOLDEN)["format"] == 1
    assert (header(GOLDEN)["config"]["input"], header(GOLDEN)["card"]["licence"]) == ("picture", "Apache-2.0")


def test_files_of_format_1_with_current_names():
    """Written after the fields had been renamed: input "image", license; read from timm by a key table."""
    assert verify(GOLDEN_2).holds
    bundle = vt.load(GOLDEN_2)
    assert bundle.labels == ["zero", "one", "two"]
    assert (bundle.card.license, bundle.model.config.input) == ("Apache-2.0", "image")
    assert bundle.card.metrics["accuracy"] != bundle.card.metrics["accuracy"]  # NaN
    assert (bundle.source.family, bundle.source.keys) == (
        "timm",
        [["stem", "tokens.proj.bias"], ["decoder.*", None]],
    )
    assert list(bundle.extras) == ["mask_token"]
    stored = header(GOLDEN_2)
    assert (stored["format"], stored["config"]["input"]) == (1, "image")


def test_family_vitrail(bundle, tmp_path):
    """Our own format is a family: it can be requested, and other files are not of it."""
    bundle.save(tmp_path / "pets.safetensors")
    assert vt.load(tmp_path / "pets.safetensors", family="vitrail").labels == bundle.labels
    state = bundle.model.state_dict()
    safetensors.torch.save_file(state, tmp_path / "bare.safetensors")
    assert vt.load(tmp_path / "bare.safetensors", family="vitrail").labels is None
    other = {f"{name}s": tensor for name, tensor in state.items()}
    safetensors.torch.save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(vt.FileError, match="is not a file of the family vitrail"):
        vt.load(tmp_path / "other.safetensors", family="vitrail")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(format=5), "has format 5, .*reads formats up to 4; install a newer vitrail"),
        (dict(format=4, native=3), "description of the model"),
        (dict(format="1"), "no format version"),
        (dict(format=None), "no format version"),
        (dict(config=None), "no config"),
        (dict(config=[1]), "no config"),
        (dict(run="rm -rf"), r"unknown keys \['run'\]"),
        (dict(config={"width": 32, "depth": 2, "heads": 2, "patch": 8, "_target_": "os.system"}), "_target_"),
        (dict(config={"width": 10**9, "depth": 10**4, "heads": 1, "patch": 8}), "more than the limit of 100,000,000,000"),
        (dict(config={"width": 48, "depth": 2, "heads": 2, "patch": 8, "size": 32, "classes": 3}), "32.* instead of 48"),
        (dict(labels=["a"]), "labels must be a list of 3 names"),
        (dict(labels=[1, 2, 3]), "labels must be a list of 3 names"),
        (dict(preprocess={"size": 99}), "preprocessing gives images of"),
        (dict(preprocess={"sise": 32}), "sise"),
        (dict(preprocess="auto"), "description of the model"),
        (dict(card={"license": "MIT", "price": 3}), "price"),
        (dict(source={"family": "timm"}), "description of the model"),
    ],
)  # fmt: skip
def test_an_invalid_description_is_refused(bundle, changes, message, tmp_path):
    path = tmp_path / "pets.safetensors"
    bundle.save(path)
    with pytest.raises(vt.VitrailError, match=message) as caught:
        vt.load(rewritten(path, **changes))
    assert "pets.safetensors" in str(caught.value)


def test_unexpected_and_missing_tensors_are_refused(bundle, tmp_path):
    path = tmp_path / "pets.safetensors"
    bundle.save(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({**tensors, "blocks.9.norm1.weight": torch.ones(32)}, path, metadata)
    with pytest.raises(vt.FileError, match=r"unexpected blocks.9.norm1.weight"):
        vt.load(path)
    del tensors["norm.weight"]
    safetensors.torch.save_file(tensors, path, metadata)
    with pytest.raises(vt.FileError, match=r"missing norm.weight"):
        vt.load(path)


def test_given_fields_override_the_file(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    bundle = vt.load(tmp_path / "pets.safetensors", eps=1e-3, activation="gelu-tanh", heads=2)
    assert bundle.model.config.eps == 1e-3
    assert bundle.notes == [
        "eps is 0.001 as given; the file has 1e-06.",
        "activation is 'gelu-tanh' as given; the file has 'gelu'.",
    ]
    with pytest.raises(vt.ConfigError, match="has no field 'hidden_size'"):
        vt.load(tmp_path / "pets.safetensors", head=4, hidden_size=3)
    with pytest.raises(vt.FileError, match=r"missing blocks.0.scale1.weight"):
        vt.load(tmp_path / "pets.safetensors", layer_scale=0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(labels=["a", "b"]), "labels must be a list of 3 names, .* but got 2"),
        (dict(preprocess=vt.Preprocess(size=64)), r"\(3, 64, 64\), but the model takes \(3, 32, 32\)"),
        (dict(model="B/16"), "A bundle holds a ViT, not 'B/16'"),
    ],
)
def test_invalid_bundles(given, message):
    with pytest.raises(vt.VitrailError, match=message):
        vt.Bundle(**{"model": vt.ViT(vt.ViTConfig(**SMALL)), **given})


# ---- adapting --------------------------------------------------------------------------------


def test_each_change_is_noted(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    changed = vt.load(tmp_path / "pets.safetensors", classes=7, size=(48, 64), channels=1, patch=16)
    assert changed.notes == [
        "The patch projection was changed from 3 to 1 channels.",
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


def test_no_request_no_change(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    same = vt.load(tmp_path / "pets.safetensors", classes=3, size=32, channels=3, patch=8)
    assert same.notes == []
    assert same.labels == bundle.labels


def test_the_head_can_be_removed(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    bare = vt.load(tmp_path / "pets.safetensors", classes=0)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(bare.model(images), bundle.model.encode(images).pooled)


def test_gray_and_color_images_give_the_same_logits(bundle, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    gray = vt.load(tmp_path / "pets.safetensors", channels=1)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 1), dtype=np.uint8)
    one = gray.model(gray.preprocess(pixels)[None])
    three = bundle.model(bundle.preprocess(np.repeat(pixels, 3, axis=2))[None])
    assert (one - three).abs().max() < 1e-5


def test_resizing_follows_the_family(tmp_path):
    """DINOv2 resizes positions with an offset, timm with antialiasing: the results differ."""
    from timm.models.vision_transformer import VisionTransformer

    small = dict(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=0)
    state = add_noise(VisionTransformer(**small, init_values=1e-5)).state_dict()
    safetensors.torch.save_file(state, tmp_path / "timm.safetensors")
    safetensors.torch.save_file({**state, "mask_token": torch.zeros(1, 32)}, tmp_path / "dino.safetensors")
    table = state["pos_embed"][0, 1:]
    for name, how in [
        ("timm", dict(method="bicubic", antialias=True)),
        ("dino", dict(method="bicubic", antialias=False, offset=0.1)),
    ]:
        for path in (tmp_path / f"{name}.safetensors", tmp_path / f"{name}-ours.safetensors"):
            overrides = {} if "ours" in path.name else dict(heads=2)
            if overrides:
                vt.load(path, heads=2).save(tmp_path / f"{name}-ours.safetensors")
            loaded = vt.load(path, size=24, **overrides)
            from vitrail.model.resample import resize_grid

            expected = resize_grid(table, (4, 4), (3, 3), **how)
            assert torch.equal(loaded.model.position.table[1:], expected), path.name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_device(bundle, device, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    assert vt.load(tmp_path / "pets.safetensors", device=device).model.head.weight.device.type == device


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (dict(size=30), "not a multiple of the patch size"),
        (dict(size=(32, 32, 32)), "size must be one integer"),
        (dict(classes=-1), "classes must be an integer"),
        (dict(channels=0), "channels must be"),
        (dict(patch=5), "not a multiple of the patch size"),
        (dict(device="gpu"), "device"),
    ],
)
def test_impossible_requests_are_refused(bundle, requested, message, tmp_path):
    bundle.save(tmp_path / "pets.safetensors")
    with pytest.raises(vt.VitrailError, match=message):
        vt.load(tmp_path / "pets.safetensors", **requested)
