"""The published sizes: exact parameter counts, model names, and `create`."""

import dataclasses
import pydoc

import pytest
import torch

import vitrail as vt
from tests.support.models import add_noise
from vitrail.model.presets import SIZES

# At 224 pixels unless the name says otherwise: without a head, and with 1000 classes. Equal to the counts of
# torchvision, timm and keras-hub where they have the model.
COUNTS = {
    "mu/16@224": (43_712, 76_712),
    "Ti/16": (5_524_416, 5_717_416),
    "S/16": (21_665_664, 22_050_664),
    "S/32": (22_493_952, 22_878_952),
    "M/16": (38_324_736, 38_837_736),
    "B/16": (85_798_656, 86_567_656),
    "B/32": (87_455_232, 88_224_232),
    "B/8": (85_807_872, 86_576_872),
    "L/16": (303_301_632, 304_326_632),
    "L/32": (305_510_400, 306_535_400),
    "So400m/14": (412_444_656, 413_597_656),
    "H/14": (630_764_800, 632_045_800),
    "g/14": (1_011_202_432, 1_012_611_432),
    "g-opt/14": (1_134_564_864, 1_136_101_864),
    "G/14": (1_842_775_680, 1_844_440_680),
    "G-opt/14": (1_663_305_216, 1_664_842_216),
    "e/14": (3_805_421_312, 3_807_214_312),
    "B/16@384": (None, 86_859_496),
    "B/32@384": (None, 88_297_192),
    "L/16@384": (None, 304_715_752),
    "L/16@512": (None, 305_174_504),
    "L/16@256": (None, 304_388_072),  # lecture note 004 says 307 million
    "H/14@518": (None, 633_470_440),
}


def count(name, **fields):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in vt.create(name, **fields).parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_published_ones(name):
    backbone, with_head = COUNTS[name]
    assert count(name) == with_head
    if backbone:
        assert count(name, classes=0) == backbone


def test_21k_head():
    assert count("B/16", classes=21_843) == 102_595_923


def test_every_size_has_a_count_and_a_source():
    assert {name.split("/")[0] for name in COUNTS} == set(SIZES)
    assert all(size.source for size in SIZES.values())


@pytest.mark.parametrize(
    ("name", "patch", "size"),
    [
        ("B/16", (16, 16), (224, 224)),
        ("L/14@336", (14, 14), (336, 336)),
        ("mu/4", (4, 4), (32, 32)),
        ("mu/4@64", (4, 4), (64, 64)),
        ("S/16@256x128", (16, 16), (256, 128)),
        ("S/8x16@64x128", (8, 16), (64, 128)),
    ],
)
def test_names_give_patch_and_image_size(name, patch, size):
    config = vt.preset(name)
    assert (config.patch, config.size) == (patch, size)


def test_any_field_overrides_the_name():
    config = vt.preset("B/16", size=(96, 64), classes=0, depth=2, dropout=0.1)
    assert (config.size, config.classes, config.depth, config.width, config.dropout) == (
        (96, 64),
        0,
        2,
        768,
        0.1,
    )


@pytest.mark.parametrize("size", [(32, 32), (8, 64), (4, 4), (12, 20)])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 13])
def test_any_image_size_and_channels(size, channels):
    model = vt.create("mu/4", size=size, channels=channels, classes=3)
    enc = model.encode(torch.randn(2, channels, *size))
    h, w = size[0] // 4, size[1] // 4
    assert enc.patches.shape == (2, h, w, 32)
    assert enc.prefix.shape == (2, 1, 32)
    assert enc.pooled.shape == (2, 32)
    assert model(torch.randn(2, channels, *size)).shape == (2, 3)


def test_create_on_the_meta_device_allocates_nothing():
    model = vt.create("e/14", device="meta")  # 3.8 billion parameters
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert torch.empty(0).device.type == "cpu"  # the default device is restored


def test_create_with_a_dtype():
    model = vt.create("mu/4", dtype=torch.float64, device="cpu", position="sincos2d", classes=3)
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {torch.float64}
    assert model(torch.randn(2, 3, 32, 32, dtype=torch.float64)).shape == (2, 3)
    assert next(vt.create("mu/4").parameters()).dtype == torch.float32


def test_from_pretrained_returns_the_model_of_load(tmp_path):
    model = add_noise(vt.create("mu/4", classes=5))
    vt.Bundle(model=model).save(tmp_path / "toy.safetensors")
    images = torch.randn(2, 3, 32, 32)
    loaded = vt.ViT.from_pretrained(tmp_path / "toy.safetensors")
    assert isinstance(loaded, vt.ViT)
    assert not loaded.training
    assert torch.equal(loaded(images), model(images))
    other = vt.ViT.from_pretrained(str(tmp_path / "toy.safetensors"), classes=7, size=64, dtype=torch.float64)
    assert other(torch.randn(1, 3, 64, 64, dtype=torch.float64)).shape == (1, 7)
    with pytest.raises(vt.VitrailError, match=r"missing\.safetensors"):
        vt.ViT.from_pretrained(tmp_path / "missing.safetensors")


@pytest.mark.parametrize("config", [vt.ViTConfig, vt.DecoderConfig])
def test_help_shows_every_field(config):
    text = pydoc.plain(pydoc.render_doc(config))
    for field in dataclasses.fields(config):
        assert f"{field.name} (" in text
        assert field.metadata["doc"] in text
    assert "width (required): D, the length of every token vector." in text


def test_without_a_head_the_model_returns_the_pooled_vector():
    model = vt.create("mu/4", classes=0)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), model.encode(images).pooled)
