"""vit-pytorch's ViT: the library's own models in the spelling of every version, and a trained one."""

import re

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from vit_pytorch import SimpleViT, ViT

import vitrail as vt
from tests.support.bits import same_file
from tests.support.model_files import mnist_test_set, same_logits, save_state
from tests.support.models import add_noise
from tests.support.shared_data import shared
from vitrail.base.errors import ConfigError, FileError
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.conversion import ConversionError, convert
from vitrail.weights.load import load

SIZES = dict(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=2, mlp_dim=48)


def theirs(**options):
    return add_noise(ViT(**SIZES | options))


class PreNorm(nn.Module):
    """A norm and a branch of a block, as in vit-pytorch up to version 1.2."""

    def __init__(self, norm, fn):
        super().__init__()
        self.norm, self.fn = norm, fn

    def forward(self, x):
        return self.fn(self.norm(x))


class Wrapped(nn.Module):
    """One more wrapper, as in versions up to 0.9, where it added the residual."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


def build_version(version, **options):
    """The library's model with the module structure of an older version."""
    model = ViT(**SIZES | options)
    if version < (1, 16):  # a class token, whatever the pool
        tokens, patches = model.cls_token.shape[0] or 1, model.pos_embedding.shape[0]
        rows = patches + 1 - model.cls_token.shape[0]
        model.cls_token = nn.Parameter(torch.randn(1, tokens, 32))
        model.pos_embedding = nn.Parameter(torch.randn(1, rows, 32))
    if version < (1, 4):
        for pair in model.transformer.layers:
            attention, mlp = pair
            norm, attention.norm = attention.norm, nn.Identity()
            pair[0], pair[1] = PreNorm(norm, attention), PreNorm(mlp.net[0], mlp)
            mlp.net = nn.Sequential(*list(mlp.net)[1:])
        model.mlp_head = nn.Sequential(model.transformer.norm, model.mlp_head)
        model.transformer.norm = nn.Identity()
    if version < (1, 0):
        model.to_patch_embedding = nn.Sequential(model.to_patch_embedding[0], model.to_patch_embedding[2])
    if version < (0, 10):
        for pair in model.transformer.layers:
            pair[0], pair[1] = Wrapped(pair[0]), Wrapped(pair[1])
    add_noise(model)
    return model if version >= (1, 16) else Old(model)


class Old(nn.Module):
    """A model whose positions have a batch axis, and whose norm is in its head."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        model = self.model
        x = model.to_patch_embedding(images)
        x = torch.cat([model.cls_token.expand(len(x), -1, -1), x], dim=1) + model.pos_embedding
        x = model.transformer(x)
        return model.mlp_head(x.mean(dim=1) if model.pool == "mean" else x[:, 0])

    def state_dict(self):
        return self.model.state_dict()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)), patch=st.sampled_from([(4, 4), (8, 8), (8, 4)]),
    depth=st.integers(1, 3), heads=st.sampled_from([1, 2, 3]), head=st.sampled_from([8, 16, 64]),
    channels=st.sampled_from([1, 3, 4]), hidden=st.integers(8, 70), mean=st.booleans(),
)  # fmt: skip
def test_same_logits(tmp_path_factory, grid, patch, depth, heads, head, channels, hidden, mean):
    size = grid[0] * patch[0], grid[1] * patch[1]
    model = theirs(
        image_size=size, patch_size=patch, depth=depth, heads=heads, dim_head=head, channels=channels,
        mlp_dim=hidden, pool="mean" if mean else "cls",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("lucidrains") / "model.pt"
    torch.save(model.state_dict(), path)
    bundle = load(path, heads=heads, channels=channels, size=size, patch=patch)
    assert bundle.source.family == "lucidrains"
    assert bundle.model.config.pool == ("mean" if mean else "class")  # an empty class token shows it
    same_logits(bundle.model, model)


VERSIONS = [(0, 7), (0, 40), (1, 0), (1, 4), (1, 16)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_every_version(tmp_path, version, pool):
    model = build_version(version, pool=pool)
    path = save_state(model.state_dict(), tmp_path / "model.safetensors")
    overrides = dict(pool="mean-all") if pool == "mean" and version < (1, 16) else {}
    bundle = load(path, **overrides)
    assert bundle.source.family == ("lucidrains" if version >= (1, 0) else "lucidrains-old")
    assert any(note.startswith("Assumed 2 heads of width 64") for note in bundle.notes)
    same_logits(bundle.model, model)
    convert(path, tmp_path / "again.safetensors", to="lucidrains", **overrides)
    same_file(path, tmp_path / "again.safetensors")

    images = torch.randn(2, 3, 32, 32)
    bundle.save(tmp_path / "ours.safetensors")
    again = load(tmp_path / "ours.safetensors")
    assert torch.equal(again.model(images), bundle.model(images))
    assert again.extras.keys() == bundle.extras.keys()
    convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", to="lucidrains")
    same_file(path, tmp_path / "back.safetensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_round_trips(tmp_path, dtype):
    path = save_state(theirs().to(dtype).state_dict(), tmp_path / "model.safetensors")
    report = convert(path, tmp_path / "again.safetensors", to="lucidrains")
    same_file(path, tmp_path / "again.safetensors")
    assert report.difference < 1e-5
    assert report.checked_by == "lucidrains itself, on the golden inputs"


def ours(**options):
    fields = dict(
        width=32, depth=2, heads=2, head_width=24, patch=8, size=32, classes=5, mlp_width=40, eps=1e-5,
        embedding_norm="both", qkv_bias="none",
    )  # fmt: skip
    return add_noise(vt.ViT(vt.ViTConfig(**fields | options)))


@pytest.mark.parametrize(
    "option",
    [{}, dict(size=(32, 16), patch=(8, 4)), dict(channels=2), dict(classes=0), dict(head_width=None)],
)
def test_new_models_are_written(tmp_path, option):
    Bundle(model=ours(**option)).save(tmp_path / "ours.safetensors")
    report = convert(tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors", to="lucidrains")
    assert report.difference < 1e-5
    assert report.checked_by == "lucidrains itself, on the golden inputs"


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (dict(eps=1e-6), "eps is 1e-05 there, and 1e-06 here"),
        (dict(activation="relu"), "activation is 'gelu' there, and 'relu' here"),
        (dict(embedding_norm="none"), "embedding_norm is 'both' there, and 'none' here"),
        (dict(qkv_bias="all"), "qkv_bias is 'none' there, and 'all' here"),
        (dict(pool="mean-all"), "pool is 'class' there, and 'mean-all' here"),
        (dict(class_token=False, pool="mean"), "a model without a class token has an empty one there, which is not written"),
        (dict(heads=1, head_width=None), "attention of one head as wide as the tokens has no output projection there"),
        (dict(registers=1), "registers is 0 there, and 1 here"),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused(tmp_path, option, reason):
    Bundle(model=ours(**option)).save(tmp_path / "ours.safetensors")
    with pytest.raises(ConversionError, match=re.escape(reason)):
        convert(tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors", to="lucidrains")


def test_one_head_as_wide_as_the_tokens(tmp_path):
    path = save_state(theirs(heads=1, dim_head=32).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(FileError, match="one head as wide as its tokens"):
        load(path, heads=1)


def test_a_simple_vit_is_refused(tmp_path):
    path = save_state(SimpleViT(**SIZES).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(FileError, match="is a SimpleViT"):
        load(path, heads=2)


def test_unknown_and_missing_tensors(tmp_path):
    state = theirs().state_dict()
    more = save_state(
        state | {"transformer.layers.0.0.temperature": torch.ones(1)}, tmp_path / "more.safetensors"
    )
    with pytest.raises(FileError, match=r"transformer\.layers\.0\.0\.temperature"):
        load(more)
    del state["transformer.layers.1.1.net.4.bias"]
    with pytest.raises(FileError, match=r"is missing blocks\.1\.mlp\.fc2\.bias"):
        load(save_state(state, tmp_path / "less.safetensors"))


def test_channels_must_be_given(tmp_path):
    path = save_state(theirs(channels=1).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="give channels"):
        load(path)


@pytest.fixture
def one_thread():
    """For matrices this small, threads cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestTrainedModel:
    """A ViT trained on MNIST, with 9721 of 10000 correct; with the wrong activation it would be 9725."""

    @pytest.fixture
    def path(self):
        return shared("data/weights/vit_mnist_gpu.pt")

    @pytest.mark.slow
    @pytest.mark.usefixtures("one_thread")
    @pytest.mark.parametrize(("activation", "correct"), [("relu", 9721), ("gelu", 9725)])
    def test_accuracy(self, path, activation, correct):
        bundle = load(path, channels=1, heads=4, activation=activation)
        images, labels = mnist_test_set()
        with torch.inference_mode():
            predictions = torch.cat([bundle.model(some).argmax(1) for some in images.split(100)])
        assert (predictions == labels).sum() == correct

    def test_bit_equal_round_trip(self, path, tmp_path):
        report = convert(
            path, tmp_path / "out.safetensors", to="lucidrains", channels=1, heads=4, activation="relu"
        )
        assert (report.source, report.target) == ("lucidrains-old", "lucidrains-old")
        before, after = (
            torch.load(path, "cpu"),
            safetensors.torch.load_file(tmp_path / "out.safetensors"),
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
