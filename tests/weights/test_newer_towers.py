"""EVA-02, Perception Encoder, AIMv2 and MobileCLIP-B: the vectors of their references, and bit-equal round trips."""

from functools import partial

import pytest
import safetensors.torch
import timm
import torch
import transformers as hf

import vitrail as vt
from tests.support.bits import same_file
from tests.support.hf_models import agree, from_pretrained, save_pretrained
from tests.support.models import add_noise
from vitrail.base.errors import ConfigError

TINY = dict(embed_dim=32, depth=2, num_heads=2, img_size=56)


def same_both_ways(file, family, tmp_path, **overrides):
    """Written back bit-equal, directly and from a file of our own; returns the bundle."""
    bundle = vt.load(file, **overrides)
    assert bundle.source.family == family
    vt.convert(file, tmp_path / "back.safetensors", to=family, **overrides)
    assert same_file(file, tmp_path / "back.safetensors")
    bundle.save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "again.safetensors", to=family)
    assert same_file(file, tmp_path / "again.safetensors")
    return bundle


def save(state, tmp_path):
    file = tmp_path / "in.safetensors"
    safetensors.torch.save_file({name: tensor.clone() for name, tensor in state.items()}, file)
    return file


# ---- EVA-02 ---------------------------------------------------------------------------------

EVA02 = {  # the model, the family, and whether the mean of the patches is pooled
    "fused, no inner norm": ("eva02_tiny_patch14_224", "timm-eva02-small", "mean"),
    "split, inner norm": ("eva02_base_patch14_224", "timm-eva02", "mean"),
    "CLIP, norm on the heads": ("eva02_base_patch16_clip_224", "timm-eva02", "class"),
}
NAMES = {"mlp.norm": "mlp.ffn_ln", "attn.norm": "attn.inner_attn_ln", "mlp.fc1_g": "mlp.w1"}
NAMES |= {"mlp.fc1_x": "mlp.w2", "mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3"}
NAMES |= {"q_proj.bias": "q_bias", "v_proj.bias": "v_bias"}


def eva02(name="split, inner norm", **options):
    size = 64 if "16" in EVA02[name][0] else 56
    return add_noise(
        timm.create_model(EVA02[name][0], **{**TINY, "img_size": size}, num_classes=5, **options)
    )


def published_eva02(model):
    """timm's tensors under the names of the authors, with the tables of the rotary embedding."""
    state = {"rope.freqs_cos": torch.randn(16, 16), "rope.freqs_sin": torch.randn(16, 16)}
    for name, tensor in model.state_dict().items():
        for new, old in NAMES.items():
            if f".{new}." in f"{name}." and "patch_embed" not in name:
                name = name.replace(new, old)
                break
        state[name] = tensor
    return state


@pytest.mark.parametrize("name", EVA02)
def test_eva02_of_timm(name, tmp_path):
    model, (_, family, pool) = eva02(name), EVA02[name]
    bundle = same_both_ways(save(model.state_dict(), tmp_path), family, tmp_path, heads=2)
    agree(model, bundle)
    config = bundle.model.config
    assert (config.position, config.pool, config.qkv_bias) == ("rotary-eva02", pool, "no-k")
    assert config.mlp_norm == ("fused" not in name)
    assert config.attention_norm == ("CLIP" in name)


@pytest.mark.parametrize("name", EVA02)
def test_eva02_as_first_published(name, tmp_path):
    model = eva02(name)
    family = "eva02-small" if "fused" in name else "eva02"
    bundle = same_both_ways(save(published_eva02(model), tmp_path), family, tmp_path, heads=2)
    agree(model, bundle)


def test_eva02_at_another_size(tmp_path):
    """The rotary embedding keeps the coordinates of the pretraining grid."""
    bundle = vt.load(save(eva02().state_dict(), tmp_path), heads=2, size=84)
    larger = timm.create_model(
        EVA02["split, inner norm"][0], **{**TINY, "img_size": 84}, num_classes=5
    ).eval()
    larger.load_state_dict(
        timm.models.eva.checkpoint_filter_fn(safetensors.torch.load_file(tmp_path / "in.safetensors"), larger)
    )
    agree(larger, bundle)


def test_eva_without_swiglu_is_refused(tmp_path):
    model = timm.create_model("eva_giant_patch14_224", **TINY)
    with pytest.raises(ConfigError, match=r"EVA or EVA-02-E.*only the EVA-02 models with SwiGLU"):
        vt.load(save(model.state_dict(), tmp_path), heads=2)


# ---- Perception Encoder ---------------------------------------------------------------------

PE = {  # the model, its options, and timm's family
    "core": ("vit_pe_core_base_patch16_224", dict(num_classes=6), "timm-perception-encoder"),
    "core, no class token": (
        "vit_pe_core_gigantic_patch14_448",
        dict(num_classes=0, patch_size=16, mlp_ratio=3.0),
        "timm-perception-encoder",
    ),
    "lang": ("vit_pe_lang_large_patch14_448", dict(num_classes=0), "timm-perception-encoder-trunk"),
    "spatial": ("vit_pe_spatial_base_patch16_512", dict(num_classes=0), "timm-perception-encoder-trunk"),
}


def perception_encoder(name="core"):
    model, options, _ = PE[name]
    patch = options.get("patch_size") or (14 if "14" in model else 16)
    grid = dict(img_size=4 * patch, ref_feat_shape=(4, 4))
    return add_noise(timm.create_model(model, **{**TINY, **grid, **options}))


SWAPS = {
    "patch_embed.proj": "conv1",
    "norm_pre": "ln_pre",
    "blocks.": "transformer.resblocks.",
    ".norm1": ".ln_1",
}
SWAPS |= {".norm2": ".ln_2", "attn.qkv.weight": "attn.in_proj_weight", "attn.qkv.bias": "attn.in_proj_bias"}
SWAPS |= {"attn.proj": "attn.out_proj", "gamma_1": "ls_1.gamma", "gamma_2": "ls_2.gamma"}
SWAPS |= {"mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
POOL = {"attn_pool.latent": "attn_pool.probe", "attn_pool.proj": "attn_pool.attn.out_proj"}
POOL |= {"attn_pool.norm": "attn_pool.layernorm", "attn_pool.mlp.fc1": "attn_pool.mlp.c_fc"}
POOL |= {"attn_pool.mlp.fc2": "attn_pool.mlp.c_proj"}


def published_pe(model, at="visual."):
    """timm's tensors under the names of the authors; the projection has no bias."""
    old, state = model.state_dict(), {}
    for name, tensor in old.items():
        if name.startswith("attn_pool."):
            for new, theirs in POOL.items():
                name = name.replace(new, theirs)
        else:
            for new, theirs in SWAPS.items():
                name = name.replace(new, theirs)
            name = name.replace("norm.", "ln_post.") if name.startswith("norm.") else name
        state[name] = tensor
    for kind in ("weight", "bias"):
        if f"attn_pool.q.{kind}" in state:
            parts = state.pop(f"attn_pool.q.{kind}"), state.pop(f"attn_pool.kv.{kind}")
            state[f"attn_pool.attn.in_proj_{kind}"] = torch.cat(parts)
    if "cls_token" in state:
        state["class_embedding"] = state.pop("cls_token")[0, 0]
    state["positional_embedding"] = state.pop("pos_embed")[0]
    if "head.weight" in state:
        state["proj"] = state.pop("head.weight").T.contiguous()
        del state["head.bias"]
    return {at + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize("name", PE)
def test_perception_encoder_of_timm(name, tmp_path):
    model = perception_encoder(name)
    bundle = same_both_ways(save(model.state_dict(), tmp_path), PE[name][2], tmp_path, heads=2)
    agree(model, bundle)
    assert bundle.model.config.position == "rotary-pe"


@pytest.mark.parametrize("name", PE)
@pytest.mark.parametrize("at", ["visual.", ""])
def test_perception_encoder_as_first_published(name, at, tmp_path):
    model = perception_encoder(name)
    if name == "core":
        model.head.bias.data.zero_()  # it has none
    state = published_pe(model, at)
    families = {"": "perception-encoder-visual", "visual.": "perception-encoder"}
    family = families[at] if "core" in name else "perception-encoder-trunk"
    bundle = same_both_ways(save(state, tmp_path), family, tmp_path, heads=2)
    agree(model, bundle)


# ---- AIMv2 ----------------------------------------------------------------------------------

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, patch_size=8)
AIMV2 = {
    "plain": {},
    "native": dict(is_native=True),
    "with biases": dict(qkv_bias=True, mlp_bias=True, rms_norm_eps=1e-3),
}


def build(name):
    """transformers' vision tower, and what it gives: the mean of the patches."""
    config = hf.Aimv2VisionConfig(**SMALL, image_size=32, use_head=False, **AIMV2[name])
    model = add_noise(hf.Aimv2VisionModel(config))
    return model, lambda images: model(images).last_hidden_state.mean(dim=1)


@pytest.mark.parametrize("name", AIMV2)
def test_aimv2_of_transformers(name, tmp_path):
    model, theirs = build(name)
    file = save_pretrained(model, tmp_path / "in")
    overrides = dict(size=32) if name == "native" else {}
    bundle = vt.load(tmp_path / "in", **overrides)
    assert bundle.source.family == "hf-aimv2"
    agree(theirs, bundle)
    report = vt.convert(tmp_path / "in", tmp_path / "back.safetensors", to="hf-aimv2", **overrides)
    assert same_file(file, tmp_path / "back.safetensors")
    assert report.difference < 1e-5


def test_aimv2_for_native_resolution_at_another_size(tmp_path):
    model, theirs = build("native")
    save_pretrained(model, tmp_path)
    bundle = vt.load(tmp_path, size=(24, 48))
    assert "computed for this size" in " ".join(bundle.notes)
    agree(theirs, bundle)


def test_aimv2_written_for_transformers(tmp_path):
    fields = dict(width=32, depth=2, heads=2, patch=8, size=32, classes=0, class_token=False, pool="mean")
    fields |= dict(norm="rms", mlp="gated", activation="silu", eps=1e-5, embedding_norm="after", mlp_width=48)
    model = add_noise(vt.ViT(vt.ViTConfig(**fields, qkv_bias="none", linear_bias=False)))
    vt.Bundle(model=model).save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "theirs", to="hf-aimv2")
    theirs = from_pretrained(hf.Aimv2VisionModel, tmp_path / "theirs")
    agree(lambda x: theirs(x).last_hidden_state.mean(dim=1), vt.load(tmp_path / "theirs"))


def aimv2_timm(classes=0):
    options = dict(TINY, img_size=56, mlp_ratio=1.5, num_classes=classes)
    return add_noise(timm.create_model("aimv2_large_patch14_224", **options))


@pytest.mark.parametrize("classes", [0, 5])
def test_aimv2_of_timm(classes, tmp_path):
    model = aimv2_timm(classes)
    agree(model, same_both_ways(save(model.state_dict(), tmp_path), "timm-aimv2", tmp_path, heads=2))


PUBLISHED = {"patch_embed.": "preprocessor.patchifier.", "pos_embed": "preprocessor.pos_embed"}
PUBLISHED |= {
    "blocks.": "trunk.blocks.",
    "norm1": "norm_1",
    "norm2": "norm_2",
    "fc1_g": "fc1",
    "fc1_x": "fc3",
}


def published_aimv2(model):
    state = {}
    for name, tensor in model.state_dict().items():
        name = name.replace("norm.", "trunk.post_trunk_norm.") if name.startswith("norm.") else name
        for new, old in PUBLISHED.items():
            name = name.replace(new, old)
        state[name] = tensor
    return state


def test_aimv2_as_first_published(tmp_path):
    model = aimv2_timm()
    bundle = same_both_ways(save(published_aimv2(model), tmp_path), "aimv2", tmp_path, heads=2)
    agree(model, bundle)


# ---- MobileCLIP-B ---------------------------------------------------------------------------

MOBILE = {"patch_embed.backbone.": "patch_emb.", ".conv": ".block.conv", ".bn": ".block.norm"}
MOBILE |= {"blocks.": "transformer.", "norm1": "pre_norm_mha.0", "attn.qkv": "pre_norm_mha.1.qkv_proj"}
MOBILE |= {"attn.proj": "pre_norm_mha.1.out_proj", "norm2": "pre_norm_ffn.0", "mlp.fc1": "pre_norm_ffn.1"}
MOBILE |= {"mlp.fc2": "pre_norm_ffn.4"}


def mobileclip():
    """timm's hybrid in small, with random statistics of its batch norms."""
    hybrid = timm.models.vision_transformer_hybrid
    stem = hybrid.ConvStem(
        channels=(8, 8, 32), stride=(4, 2, 2), kernel_size=(4, 2, 2), padding=0, act_layer=torch.nn.GELU
    )
    sizes = dict(img_size=64, embed_dim=32, depth=2, num_heads=2, num_classes=6, no_embed_class=True)
    sizes["patch_size"] = 1
    embed = partial(hybrid.HybridEmbed, backbone=stem, proj=False)
    model = add_noise(timm.models.vision_transformer.VisionTransformer(**sizes, embed_layer=embed))
    for layer in stem.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.normal_(), layer.running_var.uniform_(0.5, 2)
    return model


def published_mobileclip(model, at="image_encoder.model."):
    state = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("norm."):
            name = name.replace("norm.", "post_transformer_norm.")
        elif name == "pos_embed":
            name, tensor = "pos_embed.pos_embed.pos_embed", tensor[None]
        elif name == "head.weight":
            name, tensor = "classifier.proj", tensor.T.contiguous()
        for new, old in MOBILE.items():
            name = name.replace(new, old) if "post_transformer" not in name else name
        state[at + name] = tensor
    state.pop(f"{at}head.bias", None)
    return state


def test_mobileclip_of_timm(tmp_path):
    model = mobileclip()
    bundle = same_both_ways(save(model.state_dict(), tmp_path), "timm-mobileclip", tmp_path, heads=2)
    agree(model, bundle)
    assert (bundle.model.config.embedding, bundle.model.config.patch) == ("mobile", (16, 16))
    assert bundle.preprocess.mean == (0, 0, 0)


def test_mobileclip_as_first_published(tmp_path):
    model = mobileclip()
    model.head.bias.data.zero_()  # the projection has none
    state = published_mobileclip(model) | {"logit_scale": torch.tensor(1.0)}
    bundle = same_both_ways(save(state, tmp_path), "mobileclip", tmp_path, heads=2)
    agree(model, bundle)


def test_the_statistics_of_batch_norm_do_not_change_in_training(tmp_path):
    bundle = vt.load(save(mobileclip().state_dict(), tmp_path), heads=2)
    images = torch.randn(3, 3, 64, 64)
    before = {name: tensor.clone() for name, tensor in bundle.model.state_dict().items()}
    one, alone = bundle.model.train()(images), bundle.model(images[:1])
    assert (one[:1] - alone).abs().max() < 1e-5
    assert all(torch.equal(tensor, before[name]) for name, tensor in bundle.model.state_dict().items())
