"""torchvision's VisionTransformer: same logits, and files that torchvision loads."""

import re

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer as Timm
from torch import nn
from torchvision.models import VisionTransformer
from torchvision.models.vision_transformer import interpolate_embeddings

import vitrail as vt
from tests.support.bits import same_file
from tests.support.model_files import save_state
from tests.support.models import add_noise
from vitrail.base.errors import ConfigError, FileError
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.conversion import ConversionError, convert
from vitrail.weights.load import load

SIZES = dict(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=48, num_classes=5)


def theirs(**options):
    return add_noise(VisionTransformer(**SIZES | options))


def first_version(state):
    """The names of the MLP in the first version."""
    new = {".mlp.0.": ".mlp.linear_1.", ".mlp.3.": ".mlp.linear_2."}
    return {re.sub(r"\.mlp\.[03]\.", lambda match: new[match[0]], name): t for name, t in state.items()}


def agree(model, other, size=32):
    images = torch.randn(3, 3, size, size)
    with torch.no_grad():
        ours, expected = model(images), other(images)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    grid=st.integers(1, 5), patch=st.sampled_from([4, 8]), depth=st.integers(1, 3), heads=st.sampled_from([1, 2, 4]),
    hidden=st.integers(8, 70), classes=st.integers(1, 7), representation=st.sampled_from([None, 8, 32]),
    first=st.booleans(), wrapper=st.sampled_from(["", "module.", "net.model."]),
)  # fmt: skip
def test_same_logits(
    tmp_path_factory, grid, patch, depth, heads, hidden, classes, representation, first, wrapper
):
    model = theirs(
        image_size=grid * patch, patch_size=patch, num_layers=depth, num_heads=heads, mlp_dim=hidden,
        num_classes=classes, representation_size=representation,
    )  # fmt: skip
    state = first_version(model.state_dict()) if first else model.state_dict()
    path = tmp_path_factory.mktemp("torchvision") / "model.pth"
    torch.save({wrapper + name: tensor for name, tensor in state.items()}, path)
    bundle = load(path, heads=heads)
    assert bundle.source.family == "torchvision"
    agree(bundle.model, model, grid * patch)


def test_the_profile(tmp_path):
    bundle = load(save_state(theirs().state_dict(), tmp_path / "model.safetensors"), heads=2)
    config = bundle.model.config
    assert (config.eps, config.activation, config.head, config.pool_norm) == (
        1e-6,
        "gelu",
        "linear",
        "before",
    )
    assert (bundle.preprocess.interpolation, bundle.preprocess.resize) == ("bilinear", "shortest")
    assert bundle.preprocess.mean == (0.485, 0.456, 0.406)


def test_a_removed_head(tmp_path):
    model = theirs()
    model.heads = nn.Identity()
    bundle = load(save_state(model.state_dict(), tmp_path / "model.safetensors"), heads=2)
    assert bundle.model.config.classes == 0
    agree(bundle.model, model)
    report = convert(
        tmp_path / "model.safetensors", tmp_path / "again.safetensors", to="torchvision", heads=2
    )
    assert report.difference < 1e-5


def test_positions_are_resized_as_in_torchvision(tmp_path):
    model = theirs()
    path = save_state(model.state_dict(), tmp_path / "model.safetensors")
    larger = VisionTransformer(**SIZES | dict(image_size=56))
    larger.load_state_dict(interpolate_embeddings(56, 8, model.state_dict()))
    bundle = load(path, heads=2, size=56)
    assert "Positions were resized from a grid of 4x4 to 7x7." in bundle.notes
    agree(bundle.model, larger.eval(), 56)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("representation", [None, 24])
def test_bit_equal_round_trip(tmp_path, dtype, first, representation):
    state = theirs(representation_size=representation).to(dtype).state_dict()
    path = save_state(first_version(state) if first else state, tmp_path / "model.safetensors")
    report = convert(path, tmp_path / "again.safetensors", to="torchvision", heads=2)
    same_file(path, tmp_path / "again.safetensors")
    # strictly loaded by torchvision itself, with the names of the first version too
    assert report.difference < 1e-5
    assert report.checked_by == "torchvision itself, on the golden inputs"

    bundle, images = load(path, heads=2), torch.randn(2, 3, 32, 32)
    bundle.save(tmp_path / "ours.safetensors")
    assert torch.equal(load(tmp_path / "ours.safetensors").model(images), bundle.model(images))
    convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", to="torchvision")
    same_file(path, tmp_path / "back.safetensors")


@pytest.mark.parametrize("head", [{}, dict(head="tanh"), dict(head="tanh", head_hidden=20), dict(classes=0)])
def test_new_models_are_written(tmp_path, head):
    config = vt.ViTConfig(
        **dict(width=32, depth=2, heads=4, patch=8, size=32, classes=5, mlp_width=40) | head
    )
    model = add_noise(vt.ViT(config))
    Bundle(model=model).save(tmp_path / "ours.safetensors")
    report = convert(tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors", to="torchvision")
    assert report.difference < 1e-5
    assert report.checked_by == "torchvision itself, on the golden inputs"
    if config.classes:
        rep = (config.head_hidden or 32) if config.head == "tanh" else None
        loaded = VisionTransformer(**SIZES | dict(num_heads=4, mlp_dim=40, representation_size=rep))
        loaded.load_state_dict(safetensors.torch.load_file(tmp_path / "theirs.safetensors"))
        agree(model, loaded.eval())


def test_from_timm(tmp_path):
    timm = add_noise(Timm(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5))
    path = save_state(timm.state_dict(), tmp_path / "timm.safetensors")
    report = convert(path, tmp_path / "out.safetensors", to="torchvision", heads=2)
    assert report.difference < 1e-5
    loaded = VisionTransformer(**SIZES | dict(mlp_dim=128))
    loaded.load_state_dict(safetensors.torch.load_file(tmp_path / "out.safetensors"))
    agree(timm, loaded.eval())


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (dict(size=(32, 48)), "images and patches are square there, and 32x48 with patches of 8x8 here"),
        (dict(patch=(8, 4)), "images and patches are square there, and 32x32 with patches of 8x4 here"),
        (dict(channels=1), "channels is 3 there, and 1 here"),
        (dict(eps=1e-5), "eps is 1e-06 there, and 1e-05 here"),
        (dict(activation="relu"), "activation is 'gelu' there, and 'relu' here"),
        (dict(registers=2), "registers is 0 there, and 2 here"),
        (dict(pool="mean"), "pool is 'class' there, and 'mean' here"),
        (dict(pool_norm="none"), "pool_norm is 'before' there, and 'none' here"),
        (dict(qkv_bias="none"), "qkv_bias is 'all' there, and 'none' here"),
        (dict(head_width=8), "head_width is None there, and 8 here"),
        (dict(position="none"), "position is 'learned' there, and 'none' here"),
        (dict(block="post-norm"), "block is 'pre-norm' there, and 'post-norm' here"),
        (dict(layer_scale=0.1), "blocks.0.scale1.weight"),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused(tmp_path, option, reason):
    config = vt.ViTConfig(**dict(width=32, depth=1, heads=2, patch=8, size=32, classes=5) | option)
    Bundle(model=vt.ViT(config)).save(tmp_path / "ours.safetensors")
    with pytest.raises(ConversionError, match=re.escape(reason)):
        convert(tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors", to="torchvision")
    assert not (tmp_path / "theirs.safetensors").exists()


def test_no_folder_is_written(tmp_path):
    path = save_state(theirs().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"written as one file.*ends in \.safetensors"):
        convert(path, tmp_path / "folder", to="torchvision", heads=2)


def test_unknown_and_missing_tensors(tmp_path):
    state = theirs().state_dict()
    more = save_state(
        state | {"encoder.layers.encoder_layer_0.ln_3.weight": torch.ones(32)}, tmp_path / "more.safetensors"
    )
    with pytest.raises(FileError, match=r"encoder_layer_0\.ln_3\.weight"):
        load(more, heads=2)
    del state["encoder.layers.encoder_layer_1.ln_2.bias"]
    with pytest.raises(FileError, match=r"is missing blocks\.1\.norm2\.bias"):
        load(save_state(state, tmp_path / "less.safetensors"), heads=2)


def test_heads_must_be_given(tmp_path):
    path = save_state(theirs().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="number of heads"):
        load(path)
    with pytest.raises(ConfigError, match="does not divide the attention width"):
        load(path, heads=5)


def test_the_huge_model_has_sixteen_heads(tmp_path):
    """The usual head width 64 would also divide its width."""
    model = theirs(num_layers=1, hidden_dim=1280, num_heads=16, mlp_dim=8)
    bundle = load(save_state(model.state_dict(), tmp_path / "model.safetensors"))
    assert bundle.model.config.heads == 16
    assert any(note.startswith("Assumed 16 heads of width 80") for note in bundle.notes)


def test_a_convolutional_stem_is_refused(tmp_path):
    from torchvision.models.vision_transformer import ConvStemConfig

    model = theirs(
        conv_stem_configs=[ConvStemConfig(16, 3, 2), ConvStemConfig(16, 3, 2), ConvStemConfig(16, 3, 2)]
    )
    with pytest.raises(FileError, match="is of no known family"):
        load(save_state(model.state_dict(), tmp_path / "model.safetensors"), heads=2)
