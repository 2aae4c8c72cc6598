"""Models that look like a ViT and are not: refused by name. Every family that is read stays readable."""

import pytest
import safetensors.torch
import timm
import torch

import vitrail as vt
from vitrail.errors import FileError
from vitrail.weights.look_alikes import LOOK_ALIKES, find_look_alike

MODELS = {
    "hiera_tiny_224": "Hiera",
    "tiny_vit_5m_224": "TinyViT",
    "swin_tiny_patch4_window7_224": "Swin",
    "beit_base_patch16_224": "BEiT",
    "cait_xxs24_224": "CaiT",
    "xcit_nano_12_p16_224": "XCiT",
    "vit_5b_patch16_sapiens2": "Sapiens2",
}


def names_of(model):
    with torch.device("meta"):
        return list(timm.create_model(model).state_dict())


@pytest.mark.parametrize("model", MODELS)
def test_refused_by_name(model, tmp_path):
    tensors = {name: torch.zeros(1) for name in names_of(model)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=f"looks like {MODELS[model]}, which is not read: it"):
        vt.load(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "names",
    [
        ["backbone.patch_embed.proj.weight", "projectors.0.weight"],
        ["blocks.0.attn.wq.weight", "blocks.0.ffn.w12.weight"],
        ["hiera.embeddings.patch_embeddings.projection.weight"],
        ["patch_embed.seq.0.c.weight", "layers.0.blocks.0.conv1.c.weight"],
        ["encoder.layers.0.ffn.gate_proj.weight", "head.k_proj.weight"],
    ],
)
def test_other_spellings(names):
    assert find_look_alike(names) is not None


READ = [
    "vit_base_patch16_224",
    "vit_base_patch16_siglip_224",
    "vit_base_patch16_clip_224",
    "deit3_base_patch16_224",
]
READ += ["vit_small_patch14_reg4_dinov2", "vit_small_patch16_dinov3_qkvb", "deit_base_distilled_patch16_224"]
READ += ["eva02_tiny_patch14_224", "eva02_large_patch14_clip_224", "aimv2_large_patch14_224"]
READ += ["vit_pe_core_tiny_patch16_384", "vit_pe_lang_large_patch14_448", "vit_pe_spatial_base_patch16_512"]


@pytest.mark.parametrize("model", READ)
def test_what_is_read_is_no_look_alike(model):
    assert find_look_alike(names_of(model)) is None


def test_a_family_or_a_key_table_overrides_it(tmp_path):
    safetensors.torch.save_file({"blocks.0.attn.temperature": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(FileError, match="is not a file of the family timm"):
        vt.load(tmp_path / "x.safetensors", family="timm")


def test_every_look_alike_is_tested():
    assert {one.name for one in LOOK_ALIKES} == {*MODELS.values(), "EUPE", "AIMv2 lit"}
