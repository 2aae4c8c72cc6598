"""Google's npz files: the logits of Flax and timm, and bit-equal round trips."""

from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer

import vitrail as vt
from tests.support.flax_checks import agree, make_images, run_torch, save_npz
from tests.support.flax_files import Flax, bfloat16, drawn, exact_gelu, same_file, stem_shapes, widened
from tests.support.models import add_noise
from vitrail.base.errors import ConfigError, FileError
from vitrail.weights.conversion import ConversionError
from vitrail.weights.load import describe
from vitrail.weights.readers.folder import open_model

MODELS = {
    "plain": Flax(),
    "from a training run": Flax(prefix="opt/target/"),
    "under params": Flax(prefix="params/"),
    "new numbering": Flax(style="linen"),
    "pre-trained, without head": Flax(classes=0),
    "pre-training head": Flax(rep=24),
    "mean": Flax(cls=False),
    "mean and pre-training head": Flax(cls=False, rep=32),
    "narrow heads": Flax(heads=3, head_width=8),
    "one head, one block": Flax(heads=1, depth=1),
    "five channels": Flax(channels=5),
    "rectangular": Flax(patch=(4, 8), grid=(5, 3)),
}


def timm_model(flax, path=None, **options):
    """timm's model, with the file read by timm."""
    model = VisionTransformer(
        img_size=flax.size, patch_size=flax.patch, in_chans=flax.channels, num_classes=flax.classes,
        embed_dim=flax.width, depth=flax.depth, num_heads=flax.heads, mlp_ratio=flax.hidden / flax.width,
        class_token=flax.cls, global_pool="token" if flax.cls else "avg", fc_norm=False, **options,
    )  # fmt: skip
    if path is not None:
        model.load_pretrained(str(path))
    return model.eval()


# ---- round trips


@pytest.mark.parametrize("flax", MODELS.values(), ids=MODELS)
def test_logits_and_round_trip(flax, tmp_path):
    arrays = flax.arrays()
    path = save_npz(arrays, tmp_path / "in.npz")
    bundle = vt.load(path, size=flax.size)  # only needed for the rectangular one; the others show it
    images = make_images(flax)
    assert bundle.source.family == "google"
    assert (bundle.model.config.heads, bundle.model.config.d) == (
        flax.heads,
        flax.head_width or 32 // flax.heads,
    )
    agree(run_torch(bundle.model, images), flax.logits(arrays, images))

    report = vt.convert(path, tmp_path / "back.npz", to="google", size=flax.size)
    assert same_file(path, tmp_path / "back.npz")
    assert report.difference is None
    assert report.checked_by.startswith("not compared")

    bundle.save(tmp_path / "ours.safetensors")
    again = vt.load(tmp_path / "ours.safetensors")
    assert np.array_equal(run_torch(again.model, images), run_torch(bundle.model, images))
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "later.npz", to="google")
    assert same_file(path, tmp_path / "later.npz")


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.sampled_from([(24, 3), (32, 2), (40, 5)]),
    st.integers(1, 3),
    st.sampled_from([(4, 4), (2, 5), (1, 3), (5, 1)]),
    st.sampled_from([(8, 8), (4, 6)]),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([0, 16]),
    st.sampled_from(["pre-linen", "linen"]),
    st.sampled_from(["", "opt/target/"]),
    st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_any_mixture(tmp_path_factory, widths, depth, grid, patch, channels, cls, rep, style, prefix, dtype):
    folder = tmp_path_factory.mktemp("mixture")
    flax = Flax(
        style,
        prefix,
        *(widths[0], depth, widths[1]),
        grid=grid,
        patch=patch,
        channels=channels,
        cls=cls,
        rep=rep,
    )
    arrays = flax.arrays()
    arrays = bfloat16(arrays) if dtype == "bfloat16" else {n: a.astype(dtype) for n, a in arrays.items()}
    path = save_npz(arrays, folder / "in.npz")
    images = make_images(flax)
    agree(run_torch(vt.load(path, size=flax.size).model, images), flax.logits(widened(arrays), images))
    vt.convert(path, folder / "back.npz", to="google", size=flax.size)
    assert same_file(path, folder / "back.npz")


def test_training_state_is_kept_as_extras(tmp_path):
    arrays = Flax(prefix="opt/target/").arrays()
    arrays["opt/state/step"] = np.array(20_000, np.int32)
    arrays["opt/state/param_states/cls/momentum"] = np.ones((1, 1, 32), np.float32)
    path = save_npz(arrays, tmp_path / "in.npz")
    bundle = vt.load(path)
    assert sorted(bundle.extras) == ["opt/state/param_states/cls/momentum", "opt/state/step"]
    bundle.save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "back.npz", to="google")
    assert same_file(path, tmp_path / "back.npz")


# ---- as timm reads the same file


@pytest.mark.parametrize("name", ["plain", "from a training run", "mean"])
def test_timm_computes_the_same_with_exact_gelu(name, tmp_path):
    flax = MODELS[name]
    path = save_npz(flax.arrays(), tmp_path / "in.npz")
    images = make_images(flax)
    expected = run_torch(timm_model(flax, path), images)
    agree(run_torch(vt.load(path, activation="gelu").model, images), expected)
    agree(flax.logits(flax.arrays(), images, gelu=exact_gelu), expected)
    ours = run_torch(vt.load(path).model, images)
    assert np.abs(ours - expected).max() > 1e-5  # the original has tanh GELU


def test_timm_stops_before_the_pre_training_head(tmp_path):
    flax = Flax(rep=32)
    path = save_npz(flax.arrays(), tmp_path / "in.npz")
    theirs = timm_model(replace(flax, classes=0), path)
    model = vt.load(path, activation="gelu").model
    assert (model.config.head, model.config.head_hidden) == ("tanh", 32)
    images = make_images(flax)
    agree(run_torch(lambda x: model.encode(x).pooled, images), run_torch(theirs, images))


HYBRID = Flax(patch=(1, 1), grid=(2, 2), channels=1024, depth=1, classes=3)


def timm_hybrid(path, units=(3, 4, 9)):
    from timm.models.vision_transformer_hybrid import HybridEmbed, _resnetv2

    def embed(bias, **options):
        return HybridEmbed(_resnetv2(units), **options)

    model = VisionTransformer(
        img_size=32, patch_size=1, embed_dim=32, depth=1, num_heads=2, num_classes=3, mlp_ratio=1.5,
        embed_layer=embed,
    )  # fmt: skip
    model.load_pretrained(str(path))
    return model.eval()


def test_the_hybrid(tmp_path):
    path = save_npz(HYBRID.arrays() | drawn(stem_shapes()), tmp_path / "in.npz")
    images = make_images(Flax(), 1).astype(np.float64)  # in float32, timm's own error is 1e-4
    bundle = vt.load(path, activation="gelu")
    config = bundle.model.config
    assert (config.embedding, config.patch, config.pixels) == ("resnet", (16, 16), (32, 32))
    expected = run_torch(timm_hybrid(path).double(), images)
    agree(run_torch(bundle.model.double(), images), expected, 1e-9)
    vt.convert(path, tmp_path / "back.npz", to="google")
    assert same_file(path, tmp_path / "back.npz")

    model = bundle.model.float()
    model.config = replace(config, activation="gelu-tanh")  # the same tensors, in a new model
    vt.Bundle(model=model).save(tmp_path / "ours.safetensors")
    vt.convert(tmp_path / "ours.safetensors", tmp_path / "new.npz", to="google")
    with np.load(path) as old, np.load(tmp_path / "new.npz") as new:
        assert set(old) == set(new)
        assert all(np.array_equal(old[name].squeeze(), new[name].squeeze()) for name in old)
        assert new["block1/unit1/gn_proj/scale"].shape == (256,)


def test_a_hybrid_of_one_channel(tmp_path):
    shapes = stem_shapes(channels=1, four_axes=False)
    stem = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    with open_model(save_npz(HYBRID.arrays() | stem, tmp_path / "in.npz")) as files:
        assert describe(files).config.channels == 1


@pytest.mark.parametrize(
    ("units", "stages"),
    [
        ((2, 2, 2, 2), "stages of 2, 2, 2, 2 units"),
        ((3, 4, 6, 3), "stages of 3, 4, 6, 3 units"),
        ((), "a root without stages"),
    ],
    ids=["R26", "R50 of stride 32", "R"],
)
def test_other_stems_are_refused(units, stages, tmp_path):
    stem = {name: np.zeros([1] * len(shape)) for name, shape in stem_shapes(units).items()}
    with pytest.raises(ConfigError, match=f"has {stages}, but only the R50 of stride 16"):
        vt.load(save_npz(HYBRID.arrays() | stem, tmp_path / "in.npz"))


@pytest.mark.parametrize(("old", "new"), [((4, 4), (6, 6)), ((5, 5), (3, 3)), ((4, 4), (2, 7))])
def test_positions_are_resized_as_scipy_does(old, new, tmp_path):
    from scipy.ndimage import zoom

    flax = Flax(grid=old)
    arrays = flax.arrays()
    bundle = vt.load(save_npz(arrays, tmp_path / "in.npz"), size=(8 * new[0], 8 * new[1]))
    table = arrays["Transformer/posembed_input/pos_embedding"][0]
    grid = zoom(table[1:].reshape(*old, 32), (new[0] / old[0], new[1] / old[1], 1), order=1)
    expected = np.concatenate([table[:1], grid.reshape(-1, 32)])
    agree(bundle.model.position.table.detach().numpy(), expected, 1e-6)


# ---- written from other models


SMALL = dict(width=32, depth=2, heads=2, patch=8, size=32, classes=5, mlp_width=48, activation="gelu-tanh")
WRITTEN = {
    "plain": ({}, Flax()),
    "no head": (dict(classes=0), Flax(classes=0)),
    "pre-training head": (dict(head="tanh", head_hidden=24), Flax(rep=24)),
    "mean": (dict(class_token=False, pool="mean"), Flax(cls=False)),
    "rectangular": (
        dict(patch=(4, 8), size=(20, 24), channels=1),
        Flax(patch=(4, 8), grid=(5, 3), channels=1),
    ),
    "remainder": (dict(size=35, remainder="cut"), Flax()),
}


@pytest.mark.parametrize(("fields", "flax"), WRITTEN.values(), ids=WRITTEN)
def test_a_new_model_is_written(fields, flax, tmp_path):
    model = add_noise(vt.ViT(vt.ViTConfig(**SMALL | fields)))
    vt.Bundle(model=model).save(tmp_path / "ours.safetensors")
    report = vt.convert(tmp_path / "ours.safetensors", tmp_path / "out.npz", to="google")
    assert (report.target, report.difference) == ("google", None)
    with np.load(tmp_path / "out.npz", allow_pickle=False) as file:
        arrays = dict(file)
    assert {name: array.shape for name, array in arrays.items()} == flax.shapes()
    images = np.random.default_rng(7).normal(size=(2, *model.config.pixels, model.config.channels))
    images = images.astype(np.float32)
    agree(run_torch(model, images), flax.logits(arrays, images))
    if not flax.rep and "remainder" not in fields:
        agree(
            run_torch(model, images),
            run_torch(timm_model(flax, tmp_path / "out.npz", act_layer="gelu_tanh"), images),
        )
    again = vt.load(tmp_path / "out.npz", size=flax.size).model
    cut = images[:, : flax.size[0], : flax.size[1]]
    assert np.array_equal(run_torch(again, cut), run_torch(model, images))


def test_a_timm_file_is_written_with_tanh_gelu(tmp_path):
    flax = Flax()
    theirs = add_noise(timm_model(flax))
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "timm.safetensors")
    with pytest.raises(
        ConversionError, match="activation is 'gelu' here; it can be written with activation="
    ):
        vt.convert(tmp_path / "timm.safetensors", tmp_path / "out.npz", to="google", heads=2)
    assert not (tmp_path / "out.npz").exists()
    overrides = dict(heads=2, activation="gelu-tanh")
    vt.convert(tmp_path / "timm.safetensors", tmp_path / "out.npz", to="google", **overrides)
    images = make_images(flax)
    agree(run_torch(timm_model(flax, tmp_path / "out.npz"), images), run_torch(theirs, images))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (dict(activation="gelu"), "its only activation is tanh GELU, and activation is 'gelu' here"),
        (dict(activation="silu"), "its only activation is tanh GELU, and activation is 'silu' here"),
        (dict(pool="mean"), "class token exactly if that is the pool"),
        (dict(head_width=8), "its heads together are as wide as a token"),
        (dict(eps=1e-5), "eps is 1e-06 there, and 1e-05 here"),
        (dict(registers=2), "registers is 0 there, and 2 here"),
        (dict(distillation_token=True), "distillation_token is False there"),
        (dict(rows="patches"), "rows is 'all' there, and 'patches' here"),
        (dict(position="sincos2d"), "position is 'learned' there, and 'sincos2d' here"),
        (dict(layer_scale=0.1), "has no tensors for blocks.0.scale1.weight"),
        (dict(embedding_bias=False), "embedding_bias is True there"),
        (dict(qkv_bias="none"), "qkv_bias is 'all' there"),
        (dict(qk_norm=True), "qk_norm is False there"),
        (dict(norm_pre=True), "norm_pre is False there"),
        (dict(norm="rms"), "norm is 'layer' there"),
        (dict(pool_norm="after"), "pool_norm is 'before' there"),
        (dict(class_token=False, pool="attention"), "pool is 'class' or 'mean' there"),
        (dict(head="mlp"), "head is 'linear' or 'tanh' there"),
        (dict(head_bias=False), "head_bias is True there"),
        (dict(mlp="gated"), "mlp is 'plain' there"),
        (dict(block="parallel"), "block is 'pre-norm' there"),
        (dict(embedding="conv"), "embedding is 'linear' or 'resnet' there"),
        (dict(input="text", vocabulary=9, patch=1, size=4), "input is 'image' there, and 'text' here"),
    ],
    ids=str,
)
def test_unsupported_models_are_refused(fields, reason, tmp_path):
    vt.Bundle(model=vt.ViT(vt.ViTConfig(**SMALL | fields))).save(tmp_path / "ours.safetensors")
    with pytest.raises(ConversionError, match=reason):
        vt.convert(tmp_path / "ours.safetensors", tmp_path / "out.npz", to="google")
    assert not (tmp_path / "out.npz").exists()


def test_it_is_written_as_one_file(tmp_path):
    path = save_npz(Flax().arrays(), tmp_path / "in.npz")
    with pytest.raises(ConfigError, match=r"written as one file.* ends in \.npz"):
        vt.convert(path, tmp_path / "folder", to="google")


# ---- recognized, or refused


def test_the_profile(tmp_path):
    bundle = vt.load(save_npz(Flax().arrays(), tmp_path / "in.npz"))
    config = bundle.model.config
    assert (config.activation, config.eps, config.rows, config.pool) == ("gelu-tanh", 1e-6, "all", "class")
    assert bundle.preprocess.mean == (0.5, 0.5, 0.5)
    assert (bundle.preprocess.resize, bundle.preprocess.interpolation) == ("squash", "bilinear")
    assert not any("heads" in note for note in bundle.notes)  # the file shows them


def test_new_classes_replace_the_pre_training_head(tmp_path):
    bundle = vt.load(save_npz(Flax(rep=24).arrays(), tmp_path / "in.npz"), classes=7)
    assert (bundle.model.config.head, bundle.model.config.classes) == ("linear", 7)
    vt.convert(tmp_path / "in.npz", tmp_path / "out.npz", to="google", classes=7)
    with np.load(tmp_path / "out.npz") as file:
        assert not [name for name in file if name.startswith("pre_logits")]
        assert file["head/kernel"].shape == (32, 7)


def test_channels_and_patch_change_the_model(tmp_path):
    path = save_npz(Flax().arrays(), tmp_path / "in.npz")
    gray = make_images(Flax(channels=1))
    expected = run_torch(vt.load(path).model, gray.repeat(3, axis=-1))
    agree(run_torch(vt.load(path, channels=1).model, gray), expected)
    bundle = vt.load(path, patch=16, size=64)
    assert (bundle.model.config.patch, bundle.model.config.grid) == ((16, 16), (4, 4))
    assert any("resized from 8x8 to 16x16 pixels" in note for note in bundle.notes)


@pytest.mark.parametrize("fields", [dict(heads=4), dict(head_width=8), dict(heads=4, head_width=8)], ids=str)
def test_heads_cannot_contradict_the_file(fields, tmp_path):
    path = save_npz(Flax().arrays(), tmp_path / "in.npz")
    with pytest.raises(ConfigError, match="contradicts the shapes in the file"):
        vt.load(path, **fields)
    assert vt.load(path, heads=2, head_width=16).model.config.heads == 2


@pytest.mark.parametrize(
    "name", ["rubbish", "Transformer/encoderblock_0/LayerNorm_9/scale", "block4/unit1/conv1/kernel"]
)
def test_unknown_tensors_are_named(name, tmp_path):
    path = save_npz(Flax().arrays() | {name: np.ones(3, np.float32)}, tmp_path / "in.npz")
    with pytest.raises(FileError, match=f"{name}"):
        vt.load(path)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("embedding/bias", "tokens.proj.bias"),
        ("Transformer/encoderblock_1/LayerNorm_2/bias", "blocks.1.norm2.bias"),
        ("Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel", "qkv.weight"),
        ("Transformer/encoderblock_1/MultiHeadDotProductAttention_1/value/bias", "query/bias.*, .*key/bias"),
        ("Transformer/encoder_norm/scale", "norm.weight"),
        ("head/bias", "head.bias"),
        ("head/kernel", "head.bias"),
    ],
)
def test_missing_tensors_are_named(missing, named, tmp_path):
    arrays = Flax().arrays()
    del arrays[missing]
    path = save_npz(arrays, tmp_path / "in.npz")
    with pytest.raises(FileError, match=named):
        vt.load(path)


def test_half_a_pre_training_head_is_refused(tmp_path):
    arrays = Flax(rep=24).arrays()
    arrays = {name: array for name, array in arrays.items() if not name.startswith("head")}
    with pytest.raises(FileError, match="pre_logits/kernel"):
        vt.load(save_npz(arrays, tmp_path / "in.npz"))


QUERY = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embedding/kernel", (192, 32)),
        ("embedding/kernel", (8, 8, 3, 32, 1)),
        ("embedding/kernel", (32,)),
        ("embedding/bias", (1, 32)),
        ("cls", ()),
        ("cls", (1, 2, 32)),
        ("Transformer/posembed_input/pos_embedding", (17,)),
        ("Transformer/posembed_input/pos_embedding", (2, 17, 32)),
        (QUERY, (32, 32)),
        (QUERY, (32,)),
        (QUERY, (16, 2, 16)),
        (QUERY.replace("query", "out"), (32, 32)),
        (QUERY.replace("query", "out"), (2, 16, 32, 1)),
        (QUERY.replace("query", "out"), ()),
        ("head/kernel", ()),
        ("head/kernel", (5, 32)),
    ],
    ids=str,
)
def test_unexpected_shapes_are_refused(name, shape, tmp_path):
    arrays = Flax().arrays() | {name: np.ones(shape, np.float32)}
    with pytest.raises((FileError, ConfigError)):
        vt.load(save_npz(arrays, tmp_path / "in.npz"))


def test_other_families_are_not_mistaken_for_google(tmp_path):
    safetensors.torch.save_file(timm_model(Flax()).state_dict(), tmp_path / "timm.safetensors")
    assert vt.load(tmp_path / "timm.safetensors", heads=2).source.family == "timm"
    with pytest.raises(FileError, match="is not a file of the family google"):
        vt.load(tmp_path / "timm.safetensors", heads=2, family="google")
    path = save_npz(Flax().arrays(), tmp_path / "in.npz")
    with pytest.raises(FileError, match="is not a file of the family timm"):
        vt.load(path, family="timm")
    for flax in (Flax(), Flax("linen")):
        with pytest.raises(FileError, match="is not a file of the family big_vision"):
            vt.load(save_npz(flax.arrays(), tmp_path / "in.npz"), family="big_vision")
