"""A new model is initialized as the table of model/init.py says."""

import math
from fnmatch import fnmatchcase

import pytest
import torch

import vitrail as vt
from bench.peers import PEERS
from vitrail.model.init import ROWS

SCHEMES = ("paper", "timm", "torchvision")
OPTIONS = dict(
    width=192, depth=2, heads=3, patch=16, size=64, channels=3, classes=10, layer_scale=0.3,
    embedding="mlp", embedding_norm="both", qk_norm=True, pool="attention", head="tanh", position="relative",
)  # fmt: skip


def close(tensor, sigma):
    """Mean and standard deviation within five standard errors of those of a normal."""
    error = sigma / math.sqrt(tensor.numel())
    assert abs(tensor.mean().item()) < 5 * error
    assert abs(tensor.std().item() - sigma) < 5 * error


def check(scheme, tensor):
    """Check that a tensor was initialized with a scheme of the table."""
    match scheme:
        case "0" | "1":
            assert (tensor == float(scheme)).all()
        case "layer-scale":
            assert (tensor == 0.3).all()
        case "normal-0.02" | "normal-1e-6":
            close(tensor, float(scheme.removeprefix("normal-")))
            if tensor.numel() > 5000:
                assert tensor.abs().max() > 3 * tensor.std()  # not truncated
        case "xavier" | "torch":
            fan_out, fan_in = tensor.shape[0], tensor[0].numel()
            limit = math.sqrt(6 / (fan_in + fan_out)) if scheme == "xavier" else 1 / math.sqrt(fan_in)
            assert limit * 0.95 < tensor.abs().max() <= limit
            close(tensor, limit / math.sqrt(3))
        case "xavier-by-3":
            for matrix in tensor.chunk(3):
                check("xavier", matrix)
        case "lecun":
            sigma = math.sqrt(1 / tensor[0].numel())
            close(tensor, sigma)
            assert 2.1 * sigma < tensor.abs().max() < 2.28 * sigma  # 2 sigma before truncation
        case "unchanged":
            pass
        case _:
            pytest.fail(f"no check for {scheme!r} of the table")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("change", [{}, dict(position="learned", head="linear", embedding="linear")])
def test_parameters_are_initialized_as_in_the_table(scheme, change):
    model = vt.ViT(vt.ViTConfig(**{**OPTIONS, **change}, init=scheme))
    for name, parameter in model.named_parameters():
        row = next(row for row in ROWS if fnmatchcase(name, row[0]))
        check(row[1 + SCHEMES.index(scheme)], parameter.detach())


def test_every_row_is_used():
    """No pattern matches nothing or is shadowed by another."""
    models = [OPTIONS, {**OPTIONS, "position": "learned", "head": "linear"}, {**OPTIONS, "embedding": "conv"}]
    names = [name for fields in models for name, _ in vt.ViT(vt.ViTConfig(**fields)).named_parameters()]
    used = {next(row[0] for row in ROWS if fnmatchcase(name, row[0])) for name in names}
    assert used == {row[0] for row in ROWS}


PAIRS = {  # ours: timm's, torchvision's
    "tokens.proj.weight": ("patch_embed.proj.weight", "conv_proj.weight"),
    "tokens.proj.bias": ("patch_embed.proj.bias", "conv_proj.bias"),
    "prefix": ("cls_token", "class_token"),
    "position.table": ("pos_embed", "encoder.pos_embedding"),
    "blocks.0.attention.qkv.weight": (
        "blocks.0.attn.qkv.weight",
        "encoder.layers.encoder_layer_0.self_attention.in_proj_weight",
    ),
    "blocks.0.attention.out.weight": (
        "blocks.0.attn.proj.weight",
        "encoder.layers.encoder_layer_0.self_attention.out_proj.weight",
    ),
    "blocks.0.mlp.fc1.weight": ("blocks.0.mlp.fc1.weight", "encoder.layers.encoder_layer_0.mlp.0.weight"),
    "blocks.0.mlp.fc1.bias": ("blocks.0.mlp.fc1.bias", "encoder.layers.encoder_layer_0.mlp.0.bias"),
    "head.weight": ("head.weight", "heads.head.weight"),
}


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_schemes_agree_with_the_libraries(library):
    config = vt.ViTConfig(width=192, depth=1, heads=3, patch=16, size=64, classes=100, init=library)
    ours = dict(vt.ViT(config).named_parameters())
    theirs = dict(PEERS[library](config).named_parameters())
    for name, peer_names in PAIRS.items():
        mine, other = ours[name].detach(), theirs[peer_names[library == "torchvision"]].detach()
        assert mine.std().item() == pytest.approx(other.std().item(), rel=0.25, abs=1e-9), name
        assert (mine.abs().max() == 0) == (other.abs().max() == 0), name


def test_the_same_seed_gives_the_same_model():
    def state(seed):
        torch.manual_seed(seed)
        return vt.create("mu/4").state_dict()

    one, same, other = state(1), state(1), state(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["tokens.proj.weight"], other["tokens.proj.weight"])
