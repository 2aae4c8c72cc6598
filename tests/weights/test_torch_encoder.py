"""Home-made ViTs around nn.TransformerEncoder, as in tutorials; and a key table for other names."""

import re

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision.models import VisionTransformer

from tests.support.bits import same_file
from tests.support.model_files import mnist_test_set, same_logits, save_state
from tests.support.models import add_noise
from tests.support.shared_data import shared
from vitrail.base.errors import ConfigError, FileError
from vitrail.weights.conversion import convert
from vitrail.weights.load import load


class Patches(nn.Module):
    """Patch embedding by a matrix: patches flattened channel by channel, or pixel by pixel."""

    def __init__(self, channels, width, patch, pixelwise=False):
        super().__init__()
        self.proj, self.patch, self.pixelwise = nn.Linear(channels * patch**2, width), patch, pixelwise

    def forward(self, images):
        P = self.patch
        x = images.unfold(2, P, P).unfold(3, P, P)  # (B, C, h, w, P, P)
        x = x.permute(0, 2, 3, 4, 5, 1) if self.pixelwise else x.permute(0, 2, 3, 1, 4, 5)
        return self.proj(x.flatten(3).flatten(1, 2))


class Conv(nn.Conv2d):
    def forward(self, images):
        return super().forward(images).flatten(2).mT


class Net(nn.Module):
    """A typical tutorial model, with the options that people choose."""

    def __init__(
        self, linear=False, norm_first=False, last="encoder", tokens="cls_token", activation="relu", encoder="encoder",
        head="head", positions="pos_embed", pixelwise=False, width=32, depth=2, heads=2, patch=8, grid=(4, 4), channels=3,
    ):  # fmt: skip
        super().__init__()
        self.names = tokens, positions, encoder, head
        self.patch_embed = (
            Patches(channels, width, patch, pixelwise) if linear else Conv(channels, width, patch, patch)
        )
        if tokens:
            setattr(self, tokens, nn.Parameter(torch.randn(1, 1, width)))
        setattr(self, positions, nn.Parameter(torch.randn(1, grid[0] * grid[1] + bool(tokens), width)))
        layer = nn.TransformerEncoderLayer(
            width, heads, 48, 0.1, activation, batch_first=True, norm_first=norm_first
        )
        norm = nn.LayerNorm(width) if last == "encoder" else None
        setattr(self, encoder, nn.TransformerEncoder(layer, depth, norm, enable_nested_tensor=False))
        self.norm = nn.LayerNorm(width) if last == "outside" else nn.Identity()
        setattr(self, head, nn.Linear(width, 5))
        if last == "head":
            setattr(self, head, nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 5)))

    def forward(self, images):
        tokens, positions, encoder, head = (getattr(self, name, None) for name in self.names)
        x = self.patch_embed(images)
        if tokens is not None:
            x = torch.cat([tokens.expand(len(x), -1, -1), x], dim=1)
        x = self.norm(encoder(x + positions))
        return head(x[:, 0] if tokens is not None else x.mean(dim=1))


def net(**options):
    return add_noise(Net(**options))


def overrides(norm_first=False, activation="relu", heads=2, channels=3, **_):
    fields = dict(heads=heads, channels=channels)
    fields |= dict(block="pre-norm") if norm_first else {}
    return fields | (dict(activation=activation) if activation != "relu" else {})


OPTIONS = st.fixed_dictionaries(
    dict(
        linear=st.booleans(), norm_first=st.booleans(), last=st.sampled_from(["encoder", "outside", "head", "nowhere"]),
        tokens=st.sampled_from(["", "cls_token", "class_token"]), activation=st.sampled_from(["relu", "gelu"]),
        encoder=st.sampled_from(["encoder", "transformer_encoder", "my_layers"]), depth=st.integers(1, 3),
        head=st.sampled_from(["head", "classifier", "mlp_head"]), heads=st.sampled_from([1, 2, 4]),
        positions=st.sampled_from(["pos_embed", "pos_embedding", "position_embedding"]),
        grid=st.sampled_from([(4, 4), (3, 5)]), channels=st.sampled_from([1, 3]),
    )
)  # fmt: skip


@settings(max_examples=25, deadline=None, derandomize=True)
@given(options=OPTIONS, wrapper=st.sampled_from(["", "module.", "a.b."]))
def test_same_logits(tmp_path_factory, options, wrapper):
    model = net(**options)
    path = tmp_path_factory.mktemp("torch") / "model.pth"
    torch.save({wrapper + name: tensor for name, tensor in model.state_dict().items()}, path)
    h, w = options["grid"]
    bundle = load(path, size=(8 * h, 8 * w), **overrides(**options))
    assert bundle.source.family == "torch"
    same_logits(bundle.model, model)


@pytest.mark.parametrize("last", ["encoder", "outside", "head", "nowhere"])
def test_position_of_the_last_norm(tmp_path, last):
    model = net(last=last, tokens="")  # it makes a difference for the mean
    same_logits(load(save_state(model.state_dict(), tmp_path / "model.safetensors"), heads=2).model, model)


def test_the_profile(tmp_path):
    bundle = load(save_state(net().state_dict(), tmp_path / "model.safetensors"), heads=2)
    config = bundle.model.config
    assert (config.block, config.activation, config.eps) == ("post-norm", "relu", 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("last", ["encoder", "head", "nowhere"])
def test_bit_equal_round_trip(tmp_path, dtype, linear, last):
    model = net(linear=linear, last=last).to(dtype)
    path = save_state(model.state_dict(), tmp_path / "model.safetensors")
    report = convert(path, tmp_path / "again.safetensors", to="torch", heads=2)
    same_file(path, tmp_path / "again.safetensors")
    assert report.difference is None

    bundle, images = load(path, heads=2), torch.randn(2, 3, 32, 32)
    bundle.save(tmp_path / "ours.safetensors")
    assert torch.equal(load(tmp_path / "ours.safetensors").model(images), bundle.model(images))
    convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", to="torch")
    same_file(path, tmp_path / "back.safetensors")


def test_it_is_only_written_back(tmp_path):
    model = VisionTransformer(32, 8, 1, 2, 32, 48, num_classes=5)
    path = save_state(model.state_dict(), tmp_path / "model.safetensors")
    assert load(path, heads=2).source.family == "torchvision"
    with pytest.raises(ConfigError, match="not a family that can be written"):
        convert(path, tmp_path / "out.safetensors", to="torch", heads=2)


def test_unknown_and_missing_tensors(tmp_path):
    state = net().state_dict()
    more = save_state(state | {"neck.weight": torch.ones(32)}, tmp_path / "more.safetensors")
    with pytest.raises(FileError, match=r"neck\.weight"):
        load(more, heads=2)
    del state["encoder.layers.1.linear2.bias"]
    with pytest.raises(FileError, match=r"is missing blocks\.1\.mlp\.fc2\.bias"):
        load(save_state(state, tmp_path / "less.safetensors"), heads=2)


# ---- key tables


def renamed(state, names):
    return {names.get(name, name): tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("pixelwise", "names"),
    [
        (False, {"patch_embed.proj": "embedding", "pos_embed": "pos_embedding.weight", "head": "fc"}),
        (False, {"patch_embed.proj": "patch_embedding.projection", "cls_token": "patch_embedding.cls_token"}),
        (False, {"pos_embed": "embedding.position_embeddings", "encoder.norm": "ln_f"}),
        (True, {"patch_embed.proj": "to_patch_embedding.1", "encoder.": ""}),
        (True, {"patch_embed.proj": "patch_embedding.1", "encoder.": "model.deep.encoder."}),
    ],
)
def test_other_common_names(tmp_path, pixelwise, names):
    model = net(linear=True, pixelwise=pixelwise)
    state = {}
    for name, tensor in model.state_dict().items():
        old = next((start for start in names if name.startswith(start)), "")
        new = names[old] + name.removeprefix(old) if old else name
        state[new] = tensor[0] if new.endswith("pos_embedding.weight") else tensor  # as in nn.Embedding
    path = save_state(state, tmp_path / "model.safetensors")
    same_logits(load(path, heads=2).model, model)
    convert(path, tmp_path / "again.safetensors", to="torch", heads=2)
    same_file(path, tmp_path / "again.safetensors")


def test_custom_names(tmp_path):
    model = net()
    names = {"patch_embed.weight": "stem.w", "patch_embed.bias": "stem.b", "cls_token": "first"}
    path = save_state(renamed(model.state_dict(), names), tmp_path / "model.safetensors")
    with pytest.raises(
        FileError,
        match=r"'tokens\.proj\.weight' is missing or has an unexpected shape, and first, stem\.b, stem\.w",
    ):
        load(path, heads=2)
    keys = [("stem.w", "tokens.proj.weight"), ("stem.b", "tokens.proj.bias"), ("first", "prefix", "tokens")]
    bundle = load(path, heads=2, keys=iter(keys), family="torch")
    same_logits(bundle.model, model)
    bundle.save(tmp_path / "ours.safetensors")
    convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", to="torch")
    same_file(path, tmp_path / "back.safetensors")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("stem.w",), "A row of keys is"),
        (("stem.w", 3), "A row of keys is"),
        ((3, "tokens.proj.weight"), "may contain {i}"),
        (("{w:>999999999}stem.w", "tokens.proj.weight"), "no other braces"),
        (("stem.w", "tokens.{0}"), "no other braces"),
        (("stem.w", "tokens.proj.weight", "sideways"), "unknown layout"),
    ],
)
def test_invalid_rows(tmp_path, row, message):
    path = save_state(net().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(path, heads=2, keys=[row])


def test_patches_flattened_pixel_by_pixel(tmp_path):
    """The order within a flat patch does not show in shapes; a row of keys gives it."""
    model = net(linear=True, pixelwise=True)
    path = save_state(model.state_dict(), tmp_path / "model.safetensors")
    keys = [("patch_embed.proj.weight", "tokens.proj.weight", "patch_rows")]
    same_logits(load(path, heads=2, keys=keys).model, model)
    with pytest.raises(AssertionError, match="not close"):
        same_logits(load(path, heads=2).model, model)
    convert(path, tmp_path / "again.safetensors", to="torch", heads=2, keys=keys)
    same_file(path, tmp_path / "again.safetensors")


class TestTrainedBySomebodyElse:
    """A one-block ViT trained on MNIST, with custom names: post-norm, no class token, mean pool."""

    @property
    def path(self):
        return shared("data/weights/mnist_vit_agentzz1.pth")

    keys = (
        ("patch_embed.proj.weight", "tokens.proj.weight", "patch_planes"),
        ("patch_embed.proj.bias", "tokens.proj.bias"),
        ("encoder.{i}.attn.in_proj_weight", "blocks.{i}.attention.qkv.weight"),
        ("encoder.{i}.attn.in_proj_bias", "blocks.{i}.attention.qkv.bias"),
        ("encoder.{i}.attn.out_proj.weight", "blocks.{i}.attention.out.weight"),
        ("encoder.{i}.attn.out_proj.bias", "blocks.{i}.attention.out.bias"),
        ("encoder.{i}.ffn.fc1.weight", "blocks.{i}.mlp.fc1.weight"),
        ("encoder.{i}.ffn.fc1.bias", "blocks.{i}.mlp.fc1.bias"),
        ("encoder.{i}.ffn.fc2.weight", "blocks.{i}.mlp.fc2.weight"),
        ("encoder.{i}.ffn.fc2.bias", "blocks.{i}.mlp.fc2.bias"),
        *((f"encoder.{{i}}.{n}.{kind}", f"blocks.{{i}}.{n}.{kind}") for n in ("norm1", "norm2") for kind in ("weight", "bias")),
    )  # fmt: skip

    def load(self, **overrides):
        return load(self.path, family="torch", keys=self.keys, channels=1, heads=1, **overrides)

    def count_correct(self, **overrides):
        images, labels = mnist_test_set()
        model = self.load(**overrides).model
        with torch.no_grad():
            predictions = torch.cat([model(some).argmax(1) for some in images.split(1000)])
        return (predictions == labels).sum()

    def test_accuracy(self):
        """83.97 %; with PyTorch's default activation, or the last norm after the pool, it is lower."""
        assert self.count_correct(activation="gelu") == 8397
        assert self.count_correct() == 8339
        assert self.count_correct(activation="gelu", pool_norm="after") == 8368

    def test_a_complete_table_needs_no_family(self):
        around = [("pos_embed", "position.table", "lead")]
        around += [(f"norm.{kind}", f"norm.{kind}") for kind in ("weight", "bias")]
        around += [(f"classifier.{kind}", f"head.{kind}") for kind in ("weight", "bias")]
        with pytest.raises(FileError, match=r"unknown tensors: pos_embed, norm\.weight"):
            load(self.path, keys=self.keys, channels=1, heads=1)
        overrides = dict(channels=1, heads=1, block="post-norm", activation="gelu", eps=1e-5)
        alone, images = (
            load(self.path, keys=[*self.keys, *around], **overrides).model,
            torch.randn(2, 1, 28, 28),
        )
        assert torch.equal(alone(images), self.load(activation="gelu").model(images))

    def test_it_is_unknown_without_the_table(self):
        with pytest.raises(FileError, match="is not a file of the family torch"):
            load(self.path, family="torch", channels=1, heads=1)

    def test_bit_equal_round_trip(self, tmp_path):
        self.load().save(tmp_path / "ours.safetensors")  # the table is saved with it
        convert(tmp_path / "ours.safetensors", tmp_path / "out.safetensors", to="torch")
        before, after = (
            torch.load(self.path, "cpu"),
            safetensors.torch.load_file(tmp_path / "out.safetensors"),
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
