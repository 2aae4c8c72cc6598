"""SigLIP 2 NaFlex: transformers' vectors at the own grid and at others, and bit-equal round trips."""

import pytest
import torch
import transformers as hf

import vitrail as vt
from tests.support.bits import same_file
from tests.support.hf_models import agree, from_pretrained, save_pretrained
from tests.support.models import add_noise
from vitrail.images.published_preprocess import from_hf
from vitrail.weights.families.hf_clip import flat_patches

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, patch_size=8)
TEXT = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=50,
    max_position_embeddings=8, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def pooled(tower):
    """Images of one size to pooled vectors, cut into patches as transformers' processor does."""

    def vectors(images):
        patches = flat_patches(images, 8)
        grid = [images.shape[2] // 8, images.shape[3] // 8]
        shapes = torch.tensor([grid] * len(images))
        mask = torch.ones(patches.shape[:2], dtype=torch.int64)
        return tower(patches, pixel_attention_mask=mask, spatial_shapes=shapes).pooler_output

    return vectors


def build(name):
    vision = dict(**SMALL, num_patches=16)
    if name == "with text":
        model = add_noise(hf.Siglip2Model(hf.Siglip2Config(text_config=TEXT, vision_config=vision)))
        return model, pooled(model.vision_model)
    model = add_noise(hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**vision)))
    return model, pooled(model)


@pytest.mark.parametrize("name", ["alone", "with text"])
def test_folder(name, tmp_path):
    model, theirs = build(name)
    file = save_pretrained(model, tmp_path / "in")
    bundle = vt.load(tmp_path / "in")
    assert bundle.source.family == "hf-siglip2-naflex"
    assert bundle.model.config.pixels == (32, 32)
    agree(theirs, bundle)
    report = vt.convert(tmp_path / "in", tmp_path / "back.safetensors", to="hf-siglip2-naflex")
    assert same_file(file, tmp_path / "back.safetensors")
    assert report.difference < 1e-5
    assert bool(bundle.extras) == (name == "with text")


@pytest.mark.parametrize("size", [(16, 48), (40, 24)])
def test_other_sizes(size, tmp_path):
    """Positions are resized as transformers resizes them for each image."""
    model, theirs = build("alone")
    save_pretrained(model, tmp_path)
    agree(theirs, vt.load(tmp_path, size=size))


def test_a_file_alone_is_told_from_siglip_by_its_flat_patches(tmp_path):
    model, theirs = build("alone")
    file = save_pretrained(model, tmp_path)
    bundle = vt.load(file, heads=4)
    assert bundle.source.family == "hf-siglip2-naflex"
    agree(theirs, bundle)


def test_our_own_models_are_written(tmp_path):
    fields = dict(width=32, depth=2, heads=4, patch=8, size=32, classes=0, class_token=False)
    model = vt.ViT(vt.ViTConfig(**fields, pool="attention", activation="gelu-tanh", mlp_width=48))
    vt.Bundle(model=add_noise(model)).save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "theirs", to="hf-siglip2-naflex")
    theirs = from_pretrained(hf.Siglip2VisionModel, tmp_path / "theirs")
    agree(pooled(theirs), vt.load(tmp_path / "ours.safetensors"))


def test_the_processor_of_naflex_is_read():
    settings = dict(image_processor_type="Siglip2ImageProcessor", max_num_patches=256, patch_size=16)
    settings |= dict(
        size={"height": 256, "width": 256}, resample=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    spec = from_hf(settings)
    assert (spec.target, spec.resize, spec.interpolation) == ((256, 256), "squash", "bilinear")
    with pytest.raises(vt.ConfigError, match="max_num_patches=256"):
        from_hf({**settings, "image_processor_type": "ViTImageProcessor"})
