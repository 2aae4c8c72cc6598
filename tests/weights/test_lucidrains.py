"""vit-pytorch's ViT: the library's own models, in every spelling it has had, and one that somebody trained."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from vit_pytorch import SimpleViT, ViT

import vitrail as vt
from bits import same_file
from conftest import shake
from vitrail.errors import ConfigError, FileError
from vitrail.weights.bundle import Bundle
from vitrail.weights.convert import CannotExpress, convert
from vitrail.weights.load import load

DATA = Path(__file__).parents[3] / "shared" / "data"
SIZES = dict(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=2, mlp_dim=48)


def theirs(**options):
    return shake(ViT(**SIZES | options))


class Before(nn.Module):
    """A part of a block behind its norm, as vit-pytorch had it up to version 1.2."""

    def __init__(self, norm, fn):
        super().__init__()
        self.norm, self.fn = norm, fn

    def forward(self, x):
        return self.fn(self.norm(x))


class Wrapped(nn.Module):
    """The same, wrapped once more, as up to 0.9, where this was where the sum was formed."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


def spelled(version, **options):
    """The library's model with its parts put together as an older version did."""
    model = ViT(**SIZES | options)
    if version < (1, 16):  # a class token however it is pooled
        tokens, patches = model.cls_token.shape[0] or 1, model.pos_embedding.shape[0]
        rows = patches + 1 - model.cls_token.shape[0]
        model.cls_token = nn.Parameter(torch.randn(1, tokens, 32))
        model.pos_embedding = nn.Parameter(torch.randn(1, rows, 32))
    if version < (1, 4):
        for pair in model.transformer.layers:
            attention, mlp = pair
            norm, attention.norm = attention.norm, nn.Identity()
            pair[0], pair[1] = Before(norm, attention), Before(mlp.net[0], mlp)
            mlp.net = nn.Sequential(*list(mlp.net)[1:])
        model.mlp_head = nn.Sequential(model.transformer.norm, model.mlp_head)
        model.transformer.norm = nn.Identity()
    if version < (1, 0):
        model.to_patch_embedding = nn.Sequential(model.to_patch_embedding[0], model.to_patch_embedding[2])
    if version < (0, 10):
        for pair in model.transformer.layers:
            pair[0], pair[1] = Wrapped(pair[0]), Wrapped(pair[1])
    shake(model)
    return model if version >= (1, 16) else Old(model)


class Old(nn.Module):
    """A model whose positions have an axis for the batch, and whose norm is in its head."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pictures):
        model = self.model
        x = model.to_patch_embedding(pictures)
        x = torch.cat([model.cls_token.expand(len(x), -1, -1), x], dim=1) + model.pos_embedding
        x = model.transformer(x)
        return model.mlp_head(x.mean(dim=1) if model.pool == "mean" else x[:, 0])

    def state_dict(self):
        return self.model.state_dict()


def saved(tensors, path):
    safetensors.torch.save_file(dict(tensors), path)
    return path


def agree(model, other):
    pictures = torch.randn(2, *model.config.input_shape)
    with torch.no_grad():
        ours, expected = model(pictures), other(pictures)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


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
    assert bundle.model.config.pool == ("mean" if mean else "class")  # an empty class token tells it
    agree(bundle.model, model)


VERSIONS = [(0, 7), (0, 40), (1, 0), (1, 4), (1, 16)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_every_spelling(tmp_path, version, pool):
    model = spelled(version, pool=pool)
    path = saved(model.state_dict(), tmp_path / "model.safetensors")
    facts = dict(pool="mean-all") if pool == "mean" and version < (1, 16) else {}
    bundle = load(path, **facts)
    assert bundle.source.family == ("lucidrains" if version >= (1, 0) else "lucidrains-old")
    assert "2 heads of width 64, which is usual and not in the file; give heads if not." in bundle.notes
    agree(bundle.model, model)
    convert(path, tmp_path / "again.safetensors", to="lucidrains", **facts)
    same_file(path, tmp_path / "again.safetensors")

    pictures = torch.randn(2, 3, 32, 32)
    bundle.save(tmp_path / "ours.safetensors")
    again = load(tmp_path / "ours.safetensors")
    assert torch.equal(again.model(pictures), bundle.model(pictures))
    assert again.extras.keys() == bundle.extras.keys()
    convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", to="lucidrains")
    same_file(path, tmp_path / "back.safetensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_numbers_are_written_back(tmp_path, dtype):
    path = saved(theirs().to(dtype).state_dict(), tmp_path / "model.safetensors")
    report = convert(path, tmp_path / "again.safetensors", to="lucidrains")
    same_file(path, tmp_path / "again.safetensors")
    assert report.difference < 1e-5
    assert report.checked_by == "lucidrains itself, on the golden inputs"


def ours(**options):
    fields = dict(
        width=32, depth=2, heads=2, head_width=24, patch=8, size=32, classes=5, mlp_width=40, eps=1e-5,
        embedding_norm="both", qkv_bias="none",
    )  # fmt: skip
    return shake(vt.ViT(vt.ViTConfig(**fields | options)))


@pytest.mark.parametrize(
    "option",
    [{}, dict(size=(32, 16), patch=(8, 4)), dict(channels=2), dict(classes=0), dict(head_width=None)],
)
def test_a_model_of_ours_is_written_for_vit_pytorch(tmp_path, option):
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
        (dict(heads=1, head_width=None), "attention of one head as wide as the tokens has no last layer there"),
        (dict(registers=1), "registers is 0 there, and 1 here"),
    ],
)  # fmt: skip
def test_what_vit_pytorch_cannot_express(tmp_path, option, reason):
    Bundle(model=ours(**option)).save(tmp_path / "ours.safetensors")
    with pytest.raises(CannotExpress, match=re.escape(reason)):
        convert(tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors", to="lucidrains")


def test_one_head_as_wide_as_the_tokens(tmp_path):
    path = saved(theirs(heads=1, dim_head=32).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"must have a last layer\. Got a vit-pytorch model of one head"):
        load(path, heads=1)


def test_a_simple_vit_is_another_model(tmp_path):
    path = saved(SimpleViT(**SIZES).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"must be of its ViT\. Got a SimpleViT"):
        load(path, heads=2)


def test_a_tensor_too_many_and_one_too_few(tmp_path):
    state = theirs().state_dict()
    more = saved(state | {"transformer.layers.0.0.temperature": torch.ones(1)}, tmp_path / "more.safetensors")
    with pytest.raises(FileError, match=r"transformer\.layers\.0\.0\.temperature"):
        load(more)
    del state["transformer.layers.1.1.net.4.bias"]
    with pytest.raises(FileError, match=r"without blocks\.1\.mlp\.fc2\.bias"):
        load(saved(state, tmp_path / "less.safetensors"))


def test_channels_are_to_be_told(tmp_path):
    path = saved(theirs(channels=1).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="A flat patch must hold channels x P x P numbers"):
        load(path)


def mnist():
    def read(name, header):
        with gzip.open(DATA / "mnist" / f"t10k-{name}-ubyte.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=header)

    levels = torch.from_numpy(read("images-idx3", 16).reshape(-1, 1, 28, 28) / np.float32(255))
    return (levels - 0.1307) / 0.3081, torch.from_numpy(read("labels-idx1", 8).astype(np.int64))


@pytest.fixture
def one_thread():
    """Matrices this small are done before threads have met; on a busy machine they wait ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not (DATA / "weights").exists(), reason="the weights are not part of the repository")
class TestTrainedBySomebodyElse:
    """A ViT on MNIST whose author counted 9721 of 10000; with the wrong activation it would be 9725."""

    path = DATA / "weights" / "vit_mnist_gpu.pt"

    @pytest.mark.usefixtures("one_thread")
    @pytest.mark.parametrize(("activation", "right"), [("relu", 9721), ("gelu", 9725)])
    def test_its_author_s_score(self, activation, right):
        bundle = load(self.path, channels=1, heads=4, activation=activation)
        pictures, labels = mnist()
        with torch.inference_mode():
            guesses = torch.cat([bundle.model(some).argmax(1) for some in pictures.split(100)])
        assert (guesses == labels).sum() == right

    def test_written_back_to_the_last_bit(self, tmp_path):
        report = convert(
            self.path, tmp_path / "out.safetensors", to="lucidrains", channels=1, heads=4, activation="relu"
        )
        assert (report.source, report.target) == ("lucidrains-old", "lucidrains-old")
        before, after = (
            torch.load(self.path, "cpu"),
            safetensors.torch.load_file(tmp_path / "out.safetensors"),
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
