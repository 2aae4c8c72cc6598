"""DINOv3 in the spelling of its authors, of transformers and of timm: same outputs, bit-equal round trips."""

import pytest
import safetensors.torch
import timm
import torch
import transformers as hf

import vitrail as vt
from tests.support.bits import same_file
from tests.support.hf_models import agree, change_config, from_pretrained, save_pretrained
from tests.support.models import add_noise
from vitrail.errors import ConfigError
from vitrail.weights.convert import ConversionError

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=32)
PATCHES = dict(patch_size=8, num_register_tokens=4)
MODELS = {
    "plain": {},
    "gated": dict(use_gated_mlp=True, hidden_act="silu"),
    "without registers": dict(num_register_tokens=0),
    "key bias": dict(key_bias=True),
    "7B, without biases": dict(query_bias=False, value_bias=False, use_gated_mlp=True, hidden_act="silu"),
    "rectangular": dict(image_size=[16, 48], layer_norm_eps=1e-3),
}


def transformers_model(name="plain"):
    return add_noise(hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**{**SMALL, **PATCHES, **MODELS[name]}))).eval()


def class_token(model):
    return lambda images: model(images).pooler_output


def build(name):
    model = transformers_model(name)
    return model, class_token(model)


@pytest.mark.parametrize("name", MODELS)
def test_transformers(name, tmp_path):
    model, theirs = build(name)
    file = save_pretrained(model, tmp_path / "in")
    bundle = vt.load(tmp_path / "in")
    assert bundle.source.family == "hf-dinov3"
    assert bundle.model.config.position == "rotary-dinov3"
    agree(theirs, bundle)
    report = vt.convert(tmp_path / "in", tmp_path / "back.safetensors", to="hf-dinov3")
    assert same_file(file, tmp_path / "back.safetensors")
    assert report.difference is not None, report
    assert report.difference < 1e-5
    bundle.save(tmp_path / "ours.safetensors")
    vt.convert(
        tmp_path / "ours.safetensors", tmp_path / "folder", to="hf-dinov3"
    )  # by the names it came with
    agree(class_token(from_pretrained(hf.DINOv3ViTModel, tmp_path / "folder")), bundle)


def test_names_in_memory_are_read(tmp_path):
    model = transformers_model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    bundle = vt.load(tmp_path / "model.pt", heads=2, size=32)
    agree(class_token(model), bundle)


def test_another_rotary_base_is_refused(tmp_path):
    save_pretrained(transformers_model(), tmp_path)
    with pytest.raises(ConfigError, match="rope_theta=50"):
        vt.load(change_config(tmp_path, rope_theta=50.0))


def test_our_own_models_are_written(tmp_path):
    fields = dict(width=32, depth=2, heads=2, patch=8, size=32, classes=0, position="rotary-dinov3", eps=1e-5)
    model = add_noise(vt.ViT(vt.ViTConfig(**fields, registers=2, layer_scale=1e-5, qkv_bias="no-k")))
    vt.Bundle(model=model).save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "theirs", to="hf-dinov3")
    theirs = from_pretrained(hf.DINOv3ViTModel, tmp_path / "theirs")
    agree(class_token(theirs), vt.load(tmp_path / "ours.safetensors"))
    plain = vt.create("mu/16", classes=3)
    vt.Bundle(model=plain).save(tmp_path / "plain.safetensors")
    with pytest.raises(ConversionError, match=r"position is 'rotary-dinov3' there.*its blocks always have"):
        vt.convert(tmp_path / "plain.safetensors", tmp_path / "no", to="hf-dinov3")


# ---- as first published ---------------------------------------------------------------------

PARTS = {"norm1": "norm1", "norm2": "norm2", "attention.o_proj": "attn.proj"}
MLPS = {
    False: {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
    True: {"mlp.gate_proj": "mlp.w1", "mlp.up_proj": "mlp.w2", "mlp.down_proj": "mlp.w3"},
}


def published_state(model, gated):
    """The tensors of transformers' model under the authors' names, with a key bias that is masked."""
    old = {name.replace("model.layer.", "layer."): tensor for name, tensor in model.state_dict().items()}
    state = {
        "cls_token": old["embeddings.cls_token"],
        "storage_tokens": old["embeddings.register_tokens"],
        "mask_token": old["embeddings.mask_token"][0],
        "rope_embed.periods": 100 ** (torch.arange(4) / 4),
        "norm.weight": old["norm.weight"],
        "norm.bias": old["norm.bias"],
    }
    for part in ("weight", "bias"):
        state[f"patch_embed.proj.{part}"] = old[f"embeddings.patch_embeddings.{part}"]
    for i in range(2):
        theirs, ours = f"layer.{i}.", f"blocks.{i}."
        for old_name, name in {**PARTS, **MLPS[gated]}.items():
            for part in ("weight", "bias"):
                state[f"{ours}{name}.{part}"] = old[f"{theirs}{old_name}.{part}"]
        q, k, v = (old[f"{theirs}attention.{x}_proj.weight"] for x in "qkv")
        state[f"{ours}attn.qkv.weight"] = torch.cat([q, k, v])
        q, v = (old[f"{theirs}attention.{x}_proj.bias"] for x in "qv")
        state[f"{ours}attn.qkv.bias"] = torch.cat([q, torch.randn(32), v])  # the middle must not matter
        state[f"{ours}attn.qkv.bias_mask"] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(32)
        for n in (1, 2):
            state[f"{ours}ls{n}.gamma"] = old[f"{theirs}layer_scale{n}.lambda1"]
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("gated", [False, True])
def test_as_first_published(gated, tmp_path):
    model = transformers_model("gated" if gated else "plain")
    state = published_state(model, gated)
    torch.save(state, tmp_path / "dinov3.pth")
    bundle = vt.load(tmp_path / "dinov3.pth", heads=2, size=32)
    assert bundle.source.family == "dinov3"
    assert bundle.model.config.qkv_bias == "no-k"
    agree(class_token(model), bundle)
    vt.convert(tmp_path / "dinov3.pth", tmp_path / "back.safetensors", to="dinov3", heads=2, size=32)
    back = safetensors.torch.load_file(tmp_path / "back.safetensors")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


# ---- timm -----------------------------------------------------------------------------------

TINY = dict(embed_dim=32, depth=2, num_heads=2, img_size=64)


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_dinov3", "vit_small_patch16_dinov3_qkvb", "vit_small_plus_patch16_dinov3"]
)
@pytest.mark.parametrize("classes", [0, 5])
def test_timm(name, classes, tmp_path):
    model = add_noise(timm.create_model(name, **TINY, num_classes=classes)).eval()
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), file)
    bundle = vt.load(file, heads=2, size=64)
    assert bundle.source.family == "timm-dinov3"
    agree(model, bundle)
    vt.convert(file, tmp_path / "back.safetensors", to="timm-dinov3", heads=2, size=64)
    assert same_file(file, tmp_path / "back.safetensors")


def test_timm_with_the_class_token(tmp_path):
    model = timm.create_model("vit_small_patch16_dinov3", **TINY, global_pool="token", num_classes=0)
    model = add_noise(model).eval()
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), file)
    agree(model, vt.load(file, heads=2, size=64, pool="class"))
