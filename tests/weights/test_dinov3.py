"""DINOv3 in the spelling of its authors, of transformers and of timm: same outputs, bit-equal round trips."""

import json

import pytest
import safetensors.torch
import timm
import torch
import transformers as hf

import vitrail as vt
from tests.support.bits import same_file
from tests.support.hf_models import agree, change_config, from_pretrained, save_pretrained
from tests.support.models import add_noise
from vitrail.base.errors import ConfigError
from vitrail.weights.conversion import ConversionError

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
    """The tensors of transformers' model under the authors' names; a key bias it does not have is masked."""
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
        if model.config.query_bias:
            q, v = (old[f"{theirs}attention.{x}_proj.bias"] for x in "qv")
            k = old.get(f"{theirs}attention.k_proj.bias", torch.randn(32))  # masked, it must not matter
            state[f"{ours}attn.qkv.bias"] = torch.cat([q, k, v])
        if model.config.query_bias and not model.config.key_bias:
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


def published_file(tmp_path, name="plain", **changes):
    """The file of a model under the authors' names, with some tensors changed; and the model."""
    model = transformers_model(name)
    state = published_state(model, gated=model.config.use_gated_mlp) | changes
    safetensors.torch.save_file(state, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors", model


def same_both_ways(file, tmp_path):
    """Written back bit-equal, directly and from a file of our own; returns the bundle."""
    bundle = vt.load(file, size=32)
    bundle.save(tmp_path / "ours.safetensors")
    for source, options in ((file, {"size": 32}), (tmp_path / "ours.safetensors", {})):
        back = tmp_path / f"{source.stem}-back.safetensors"
        vt.convert(source, back, to="dinov3", **options)
        assert same_file(file, back)
    return bundle


@pytest.mark.parametrize(
    ("name", "qkv_bias"), [("7B, without biases", "none"), ("key bias", "all"), ("gated", "no-k")]
)
def test_biases_as_first_published(name, qkv_bias, tmp_path):
    """SwiGLU without biases of q, k and v; keys with a bias, where no mask is in the file; and masked."""
    file, model = published_file(tmp_path, name)
    bundle = same_both_ways(file, tmp_path)
    assert bundle.model.config.qkv_bias == qkv_bias
    assert bundle.model.config.heads == 2  # by the number of rotary periods
    agree(class_token(model), bundle)


def test_nan_in_the_mask_is_not_used(tmp_path):
    """A buffer that was never initialized. transformers' and timm's loaders drop it."""
    mask = {f"blocks.{i}.attn.qkv.bias_mask": torch.full((96,), torch.nan) for i in range(2)}
    file, model = published_file(tmp_path, **mask)
    bundle = same_both_ways(file, tmp_path)
    assert sum("bias_mask holds NaN" in note for note in bundle.notes) == 2
    agree(class_token(model), bundle)


def test_the_norm_of_local_crops_is_carried_along(tmp_path):
    """local_cls_norm of the 7B and SAT-493M models is for training alone: the last norm is used."""
    norm = {"local_cls_norm.weight": torch.randn(32), "local_cls_norm.bias": torch.randn(32)}
    file, model = published_file(tmp_path, "7B, without biases", **norm)
    bundle = same_both_ways(file, tmp_path)
    assert set(norm) < set(bundle.extras)
    agree(class_token(model), bundle)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cls_norm.weight": torch.ones(32), "cls_norm.bias": torch.zeros(32)},
            "norm of its own for the class",
        ),
        ({"blocks.1.attn.qkv.bias_mask": torch.ones(96)}, "blocks.1.attn.qkv.bias_mask must mask the bias"),
        ({"rope_embed.periods": 50 ** (torch.arange(4) / 4)}, "another rotary base is not supported"),
    ],
)
def test_other_models_of_the_authors_are_refused(changes, message, tmp_path):
    file, _ = published_file(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        vt.load(file, size=32)


def test_periods_in_bf16_are_read(tmp_path):
    periods = (100 ** (torch.arange(4) / 4)).bfloat16()
    file, model = published_file(tmp_path, **{"rope_embed.periods": periods})
    agree(class_token(model), vt.load(file, size=32))


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


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_the_pool_in_timms_settings(pool, tmp_path):
    """LingBot-Vision has the tensors of DINOv3, and config.json says that its class token is pooled."""
    model = timm.create_model("vit_small_patch16_lingbot", **TINY, global_pool=pool, num_classes=0)
    model = add_noise(model).eval()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    settings = {"architecture": "vit_small_patch16_lingbot", "num_features": 32, "global_pool": pool}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    agree(model, vt.load(tmp_path, heads=2, size=64))
