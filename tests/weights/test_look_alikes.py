"""Models that look like a ViT and are not: refused by name. Every family that is read stays readable."""

import json

import pytest
import safetensors.torch
import timm
import torch

import vitrail as vt
from vitrail.base.errors import FileError
from vitrail.weights.families.recognize import LOOK_ALIKES, find_look_alike

MODELS = {
    "hiera_tiny_224": "Hiera",
    "tiny_vit_5m_224": "TinyViT",
    "swin_tiny_patch4_window7_224": "Swin",
    "beit_base_patch16_224": "BEiT",
    "cait_xxs24_224": "CaiT",
    "xcit_nano_12_p16_224": "XCiT",
    "hiera_small_abswin_256": "Hiera",
    "sam2_hiera_tiny": "Hiera",
    "vit_base_patch16_sapiens2": "Sapiens2",
    "vit_5b_patch16_sapiens2": "Sapiens2",
    "naflexvit_base_patch16_gap": "timm's NaFlexVit",
    "naflexvit_base_patch16_parfac_gap": "timm's NaFlexVit",
    "naflexvit_base_patch16_siglip": "timm's NaFlexVit",
}


def names_of(model):
    with torch.device("meta"):
        return list(timm.create_model(model).state_dict())


@pytest.mark.parametrize("model", MODELS)
def test_refused_by_name(model, tmp_path):
    tensors = {name: torch.zeros(1) for name in names_of(model)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=f"looks like {MODELS[model]}, which is not read: it.* Use timm"):
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


EUPE = dict(embed_dim=64, depth=1, num_heads=1, img_size=64, num_classes=0)


def timm_eupe():
    """timm's EUPE in small. Its names are those of timm's DINOv3."""
    tag = "vit_tiny_patch16_dinov3_qkvb.eupe_lvd1689m"
    assert tag in timm.list_pretrained("*eupe*")
    return timm.create_model(tag, **EUPE).eval()


def published_eupe(projectors):
    """The original names, as timm's loader takes them; the projectors are optional there."""
    swaps = {"reg_token": "storage_tokens", "gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}
    state = {"rope_embed.periods": torch.ones(16), "mask_token": torch.zeros(1, 64)}
    model = timm_eupe()
    for name, tensor in model.state_dict().items():
        for new, old in swaps.items():
            name = name.replace(new, old)
        state[name] = tensor.clone()
    q, v = (state.pop(f"blocks.0.attn.{part}_bias") for part in "qv")
    state["blocks.0.attn.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
    assert timm.models.eva.checkpoint_filter_fn(state, model).keys() == model.state_dict().keys()
    return state | ({"projectors.teacher.0.weight": torch.zeros(4, 64)} if projectors else {})


@pytest.mark.parametrize("projectors", [True, False])
def test_eupe_as_first_published(projectors, tmp_path):
    torch.save(published_eupe(projectors), tmp_path / "EUPE-ViT-T.pt")
    with pytest.raises(FileError, match=r"looks like EUPE, which is not read: it.*distilled from several"):
        vt.load(tmp_path / "EUPE-ViT-T.pt")


@pytest.mark.parametrize(
    ("folder", "settings"),
    [
        ("model", {"pretrained_cfg": {"tag": "eupe_lvd1689m"}}),
        ("model", {"pretrained_cfg": {"hf_hub_id": "timm/vit_tiny_patch16_dinov3_qkvb.eupe_lvd1689m"}}),
        ("model", {"architecture": "vit_tiny_eupe"}),
        ("model", {"architectures": ["Eupe-ViT"]}),
        ("vit_tiny_patch16_dinov3_qkvb.eupe_lvd1689m", {"pretrained_cfg": {}}),
    ],
)
def test_eupe_of_timm_is_told_by_a_name(folder, settings, tmp_path):
    """Its tensors are those of timm's DINOv3: without a word of EUPE, nothing tells them apart."""
    model, folder = timm_eupe(), tmp_path / folder
    folder.mkdir()
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    paths = [folder, *[folder / "model.safetensors"] * ("eupe" in folder.name)]
    for path in paths:
        with pytest.raises(FileError, match=r"looks like EUPE.*as a DINOv3.*give the family timm-dinov3"):
            vt.load(path)
    asked = vt.load(folder, family="timm-dinov3", size=64)  # on the user's own word
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(asked.model(images), model(images), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["dinov3.safetensors", "eupean.safetensors"])
def test_dinov3_is_not_taken_for_eupe(name, tmp_path):
    safetensors.torch.save_file(timm_eupe().state_dict(), tmp_path / name)
    assert vt.load(tmp_path / name, size=64).source.family == "timm-dinov3"


def test_a_plain_vit_may_be_called_anything(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "eupe.safetensors")
    assert vt.load(tmp_path / "eupe.safetensors").source.family == "timm"


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
