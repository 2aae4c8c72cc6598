"""big_vision's npz files: the logits of Flax and timm, and bit-equal round trips."""

from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer

import vitrail as vt
from tests.support.flax_checks import agree, make_images, run_torch, save_npz
from tests.support.flax_files import Flax, bfloat16, exact_gelu, same_file, widened
from vitrail.base.errors import ConfigError, FileError

PLAIN = Flax("big_vision", "params/", cls=False)
MODELS = {
    "mean": PLAIN,
    "class token": replace(PLAIN, cls=True),
    "attention pool": replace(PLAIN, map_head=True),
    "attention pool, no head": replace(PLAIN, map_head=True, classes=0),
    "no head": replace(PLAIN, classes=0),
    "no prefix": replace(PLAIN, prefix=""),
    "image tower": replace(PLAIN, prefix="params/img/", cls=True),
    "pre-training head": replace(PLAIN, rep=24),
    "class token and pre-training head": replace(PLAIN, cls=True, rep=32),
    "stacked": replace(PLAIN, scan=True),
    "stacked, class token": replace(PLAIN, scan=True, cls=True, depth=3),
    "stacked, attention pool": replace(PLAIN, scan=True, map_head=True),
    "one block, stacked": replace(PLAIN, scan=True, depth=1),
    "narrow heads": replace(PLAIN, heads=3, head_width=8, map_head=True),
    "rectangular": replace(PLAIN, patch=(4, 8), grid=(5, 3), channels=1),
    "sincos2d": replace(PLAIN, positions=False),
    "sincos2d, rectangular": replace(PLAIN, positions=False, cls=True, patch=(4, 8), grid=(5, 3)),
}
SIGLIP = replace(PLAIN, prefix="params/img/", map_head=True, classes=0)


def timm_model(flax, path):
    """timm's model, with the file read by timm."""
    pool = "map" if flax.map_head else "token" if flax.cls else "avg"
    model = VisionTransformer(
        img_size=flax.size, patch_size=flax.patch, in_chans=flax.channels, num_classes=flax.classes,
        embed_dim=flax.width, depth=flax.depth, num_heads=flax.heads, mlp_ratio=flax.hidden / flax.width,
        class_token=flax.cls, no_embed_class=True, global_pool=pool, fc_norm=False,
    )  # fmt: skip
    model.load_pretrained(str(path))
    return model.eval()


def text_tower():
    """The tensors beside SigLIP's image tower; the text blocks may be stacked too."""
    draw = np.random.default_rng(5).normal
    shapes = {"txt/Embed_0/embedding": (11, 32), "txt/pos_embedding": (1, 4, 32), "t": (1,), "b": (1,)}
    shapes["txt/Encoder_0/encoderblock/MultiHeadDotProductAttention_0/query/kernel"] = (2, 32, 2, 16)
    shapes["txt/head/kernel"] = (32, 32)
    return {f"params/{name}": draw(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}


# ---- round trips


@pytest.mark.parametrize("flax", MODELS.values(), ids=MODELS)
def test_logits_and_round_trip(flax, tmp_path):
    arrays = flax.arrays()
    path = save_npz(arrays, tmp_path / "in.npz")
    bundle = vt.load(path, size=flax.size)
    config = bundle.model.config
    assert bundle.source.family == "big_vision"
    assert (config.depth, config.heads, config.rows) == (flax.depth, flax.heads, "patches")
    assert config.pool == ("attention" if flax.map_head else "class" if flax.cls else "mean")
    images = make_images(flax)
    agree(run_torch(bundle.model, images), flax.logits(arrays, images))

    vt.convert(path, tmp_path / "back.npz", to="big_vision", size=flax.size)
    assert same_file(path, tmp_path / "back.npz")

    bundle.save(tmp_path / "ours.safetensors")
    again = vt.load(tmp_path / "ours.safetensors")
    assert np.array_equal(run_torch(again.model, images), run_torch(bundle.model, images))
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "later.npz", to="big_vision")
    assert same_file(path, tmp_path / "later.npz")


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.sampled_from([(24, 3), (32, 2), (40, 5)]),
    st.integers(1, 3),
    st.sampled_from([(4, 4), (2, 5), (1, 3)]),
    st.integers(1, 4),
    st.sampled_from(["mean", "class", "attention"]),
    st.sampled_from([0, 16]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "params/", "params/img/", "img/"]),
    st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_any_mixture(
    tmp_path_factory, widths, depth, grid, channels, pool, rep, scan, positions, prefix, dtype
):
    folder = tmp_path_factory.mktemp("mixture")
    flax = Flax(
        "big_vision", prefix, *(widths[0], depth, widths[1]), grid=grid, channels=channels,
        cls=pool == "class", map_head=pool == "attention", rep=rep, scan=scan, positions=positions,
    )  # fmt: skip
    arrays = flax.arrays()
    arrays = bfloat16(arrays) if dtype == "bfloat16" else {n: a.astype(dtype) for n, a in arrays.items()}
    path = save_npz(arrays, folder / "in.npz")
    images = make_images(flax)
    agree(run_torch(vt.load(path, size=flax.size).model, images), flax.logits(widened(arrays), images))
    vt.convert(path, folder / "back.npz", to="big_vision", size=flax.size)
    assert same_file(path, folder / "back.npz")


def test_stacks_in_two_dtypes_round_trip(tmp_path):
    """As memory-saving training writes them: kernels in bfloat16, the rest in float32."""
    flax = replace(PLAIN, scan=True)
    arrays = flax.arrays()
    arrays |= bfloat16({name: array for name, array in arrays.items() if name.endswith("kernel")})
    path = save_npz(arrays, tmp_path / "in.npz")
    bundle = vt.load(path)
    images = make_images(flax)
    agree(run_torch(bundle.model, images), flax.logits(widened(arrays), images))
    bundle.save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "back.npz", to="big_vision")
    assert same_file(path, tmp_path / "back.npz")


@pytest.mark.parametrize("name", ["mean", "class token", "attention pool", "stacked", "no prefix"])
def test_timm_computes_the_same_with_exact_gelu(name, tmp_path):
    flax = MODELS[name]
    path = save_npz(flax.arrays(), tmp_path / "in.npz")
    images = make_images(flax)
    expected = run_torch(timm_model(flax, path), images)
    agree(run_torch(vt.load(path, activation="gelu").model, images), expected)
    agree(flax.logits(flax.arrays(), images, gelu=exact_gelu), expected)
    assert np.abs(run_torch(vt.load(path).model, images) - expected).max() > 1e-5


# ---- SigLIP


@pytest.mark.parametrize("scan", [False, True])
def test_siglip_and_its_text_tower(scan, tmp_path):
    flax = replace(SIGLIP, scan=scan)
    arrays = flax.arrays() | text_tower()
    path = save_npz(arrays, tmp_path / "in.npz")
    bundle = vt.load(path)
    assert bundle.source.family == "big_vision-siglip"
    assert sorted(bundle.extras) == sorted(text_tower())
    assert (bundle.preprocess.resize, bundle.preprocess.interpolation) == ("squash", "bicubic")
    images = make_images(flax)
    agree(run_torch(bundle.model, images), flax.logits(flax.arrays(), images))
    agree(
        run_torch(vt.load(path, activation="gelu").model, images), run_torch(timm_model(flax, path), images)
    )

    bundle.save(tmp_path / "ours.safetensors")
    for name in ("in.npz", "ours.safetensors"):
        report = vt.convert(tmp_path / name, tmp_path / f"{name}.npz", to="big_vision")
        assert sorted(report.extras) == sorted(text_tower())
        assert same_file(path, tmp_path / f"{name}.npz")


def test_an_image_tower_without_attention_pool_is_not_siglip(tmp_path):
    flax = replace(SIGLIP, map_head=False, cls=True)
    bundle = vt.load(save_npz(flax.arrays() | text_tower(), tmp_path / "in.npz"))
    assert bundle.source.family == "big_vision"
    assert len(bundle.extras) == len(text_tower())


def test_training_state_is_kept_as_extras(tmp_path):
    arrays = PLAIN.arrays()
    moments = {name.replace("params/", "opt/0/1/mu/"): array for name, array in arrays.items()}
    path = save_npz(arrays | moments | {"extra/step": np.array(3)}, tmp_path / "in.npz")
    bundle = vt.load(path)
    assert len(bundle.extras) == len(moments) + 1
    images = make_images(PLAIN)
    agree(run_torch(bundle.model, images), PLAIN.logits(arrays, images))
    vt.convert(path, tmp_path / "back.npz", to="big_vision")
    assert same_file(path, tmp_path / "back.npz")


# ---- positions


def test_sines_and_cosines_are_computed_for_the_size(tmp_path):
    flax = replace(PLAIN, positions=False)
    path = save_npz(flax.arrays(), tmp_path / "in.npz")
    bundle = vt.load(path, size=48)
    assert any("sines and cosines" in note for note in bundle.notes)
    larger = replace(flax, grid=(6, 6))
    agree(bundle.model.position.table.detach().numpy(), larger.sincos(), 1e-5)
    assert vt.load(path).model.config.pixels == (224, 224)  # the file does not show it
    learned = vt.load(save_npz(PLAIN.arrays(), tmp_path / "learned.npz"))
    assert not any("sines and cosines" in note for note in learned.notes)


def test_trained_positions_are_written(tmp_path):
    flax = replace(PLAIN, positions=False)
    path = save_npz(flax.arrays(), tmp_path / "in.npz")
    bundle = vt.load(path, size=32)
    with torch.no_grad():
        bundle.model.position.table[3] += 1
    bundle.save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "out.npz", to="big_vision")
    with np.load(path) as old, np.load(tmp_path / "out.npz") as new:
        assert set(new) - set(old) == {"params/pos_embedding"}
        assert np.array_equal(new["params/pos_embedding"][0], bundle.model.position.table.detach().numpy())
    images = make_images(flax)
    again = vt.load(tmp_path / "out.npz").model
    assert np.array_equal(run_torch(again, images), run_torch(bundle.model, images))


def test_positions_are_resized_as_scipy_does(tmp_path):
    from scipy.ndimage import zoom

    arrays = replace(PLAIN, cls=True).arrays()
    bundle = vt.load(save_npz(arrays, tmp_path / "in.npz"), size=56)
    expected = zoom(arrays["params/pos_embedding"].reshape(4, 4, 32), (7 / 4, 7 / 4, 1), order=1)
    agree(bundle.model.position.table.detach().numpy(), expected.reshape(49, 32), 1e-6)


# ---- recognized, or refused


def test_the_profile(tmp_path):
    bundle = vt.load(save_npz(PLAIN.arrays(), tmp_path / "in.npz"))
    config = bundle.model.config
    assert (config.activation, config.eps, config.pool_norm) == ("gelu-tanh", 1e-6, "before")
    assert bundle.preprocess.mean == (0.5, 0.5, 0.5)
    assert not any("heads" in note for note in bundle.notes)  # the file shows them


def test_it_is_only_written_back(tmp_path):
    config = vt.ViTConfig(width=32, depth=1, heads=2, patch=8, size=32)
    vt.Bundle(model=vt.ViT(config)).save(tmp_path / "ours.safetensors")
    with pytest.raises(ConfigError, match="not a family that can be written"):
        vt.convert(tmp_path / "ours.safetensors", tmp_path / "out.npz", to="big_vision")


def test_conversion_to_timm(tmp_path):
    """timm has tanh GELU, and positions for the patches alone."""
    flax = replace(PLAIN, scan=True, map_head=True)
    path = save_npz(flax.arrays(), tmp_path / "in.npz")
    report = vt.convert(path, tmp_path / "timm.safetensors", to="timm")
    assert report.difference < 1e-5
    assert "blocks.1.attn.qkv.weight" in safetensors.torch.load_file(tmp_path / "timm.safetensors")


@pytest.mark.parametrize("scan", [False, True])
def test_heads_cannot_contradict_the_file(scan, tmp_path):
    path = save_npz(replace(PLAIN, scan=scan).arrays(), tmp_path / "in.npz")
    with pytest.raises(ConfigError, match=r"heads=4 contradicts .* have 2"):
        vt.load(path, heads=4)


@pytest.mark.parametrize(
    "name",
    [
        "params/rubbish",
        "params/Transformer/encoderblock/LayerNorm_9/scale",
        "params/llm/embedder/input_embedding",
        "text/t",
    ],
)
def test_unknown_tensors_are_named(name, tmp_path):
    arrays = replace(PLAIN, scan=True).arrays() | {name: np.ones((2, 3), np.float32)}
    with pytest.raises(FileError, match=f"{name}"):
        vt.load(save_npz(arrays, tmp_path / "in.npz"))


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("embedding/bias", "tokens.proj.bias"),
        ("Transformer/encoderblock/LayerNorm_1/bias", "blocks.0.norm2.bias"),
        ("Transformer/encoderblock/MlpBlock_0/Dense_1/kernel", "mlp.fc2.weight"),
        ("Transformer/encoder_norm/scale", "norm.weight"),
        ("MAPHead_0/MultiHeadDotProductAttention_0/out/bias", "pool.attention.out.bias"),
        ("MAPHead_0/probe", "pool.attention.qkv.weight"),
        ("head/bias", "head.bias"),
    ],
)
def test_missing_tensors_are_named(missing, named, tmp_path):
    arrays = replace(PLAIN, scan=True, map_head=True).arrays()
    del arrays[f"params/{missing}"]
    with pytest.raises(FileError, match=named):
        vt.load(save_npz(arrays, tmp_path / "in.npz"))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embedding/kernel", (192, 32)),  # NaFlex
        ("pos_embedding", (4, 4, 32)),  # NaFlex
        ("MAPHead_0/probe", (32,)),
        ("Transformer/encoderblock/LayerNorm_0/scale", (3, 32)),
        ("Transformer/encoderblock/LayerNorm_0/scale", ()),
        ("Transformer/encoderblock/LayerNorm_0/scale", (0, 32)),
        ("Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel", (2, 32, 32)),
        ("Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel", (2,)),
    ],
    ids=str,
)
def test_unexpected_shapes_are_refused(name, shape, tmp_path):
    arrays = replace(PLAIN, scan=True, map_head=True).arrays() | {
        f"params/{name}": np.ones(shape, np.float32)
    }
    with pytest.raises((FileError, ConfigError)):
        vt.load(save_npz(arrays, tmp_path / "in.npz"))


def test_other_families_are_not_mistaken_for_big_vision(tmp_path):
    path = save_npz(PLAIN.arrays(), tmp_path / "in.npz")
    for family in ("google", "timm", "big_vision-siglip"):
        with pytest.raises(FileError, match=f"is not a file of the family {family}"):
            vt.load(path, family=family)
    path = save_npz(Flax(prefix="params/").arrays(), tmp_path / "google.npz")
    assert vt.load(path).source.family == "google"
    with pytest.raises(FileError, match="is not a file of the family big_vision"):
        vt.load(path, family="big_vision")
