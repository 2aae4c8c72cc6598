"""CLIP's visual tower by OpenAI and OpenCLIP, compared with a forward pass in plain PyTorch."""

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer as Timm
from torch import nn

from tests.support.bits import same_file
from tests.support.model_files import save_state
from tests.support.models import add_noise
from vitrail.base.errors import ConfigError, FileError
from vitrail.weights.conversion import convert
from vitrail.weights.load import load

TEXT = {
    "token_embedding.weight": (11, 12), "positional_embedding": (7, 12), "text_projection": (12, 6),
    "transformer.resblocks.0.attn.in_proj_weight": (36, 12), "transformer.resblocks.0.attn.in_proj_bias": (36,),
    "transformer.resblocks.0.mlp.c_fc.weight": (48, 12), "ln_final.weight": (12,), "ln_final.bias": (12,),
    "attn_mask": (7, 7), "logit_scale": (),
}  # fmt: skip


def tower(width=32, depth=2, patch=8, grid=(4, 4), out=6, hidden=64, channels=3, pre=True, scaled=False):
    """A visual tower of random values, under its own names."""
    shapes = {
        "conv1.weight": (width, channels, patch, patch), "class_embedding": (width,),
        "positional_embedding": (1 + grid[0] * grid[1], width), "ln_post.weight": (width,), "ln_post.bias": (width,),
    }  # fmt: skip
    if pre:
        shapes |= {"ln_pre.weight": (width,), "ln_pre.bias": (width,)}
    if out:
        shapes |= {"proj": (width, out)}
    for block in range(depth):
        layers = {"attn.out_proj": (width, width), "mlp.c_fc": (hidden, width), "mlp.c_proj": (width, hidden)}
        parts = {f"{name}.weight": shape for name, shape in layers.items()}
        parts |= {f"{name}.bias": shape[:1] for name, shape in layers.items()}
        parts |= {f"{name}.{kind}": (width,) for name in ("ln_1", "ln_2") for kind in ("weight", "bias")}
        parts |= {"attn.in_proj_weight": (3 * width, width), "attn.in_proj_bias": (3 * width,)}
        parts |= {"ls_1.gamma": (width,), "ls_2.gamma": (width,)} if scaled else {}
        shapes |= {f"transformer.resblocks.{block}.{name}": shape for name, shape in parts.items()}
    return {name: 0.2 * torch.randn(shape) + name.startswith("ln_post.w") for name, shape in shapes.items()}


def reference(state, images, heads, activation):
    """Images to vectors, with the tensors of a tower."""
    width, _, patch, _ = state["conv1.weight"].shape

    def norm(x, name):
        return F.layer_norm(x, (width,), state[f"{name}.weight"], state[f"{name}.bias"])

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    x = F.conv2d(images, state["conv1.weight"], stride=patch).flatten(2).mT
    first = state["class_embedding"].expand(len(x), 1, width)
    x = torch.cat([first, x], dim=1) + state["positional_embedding"]
    x = norm(x, "ln_pre") if "ln_pre.weight" in state else x
    for block in range(sum(name.endswith("attn.in_proj_weight") for name in state)):
        at = f"transformer.resblocks.{block}."
        attention = nn.MultiheadAttention(width, heads, batch_first=True).eval()
        inside = {n.removeprefix(f"{at}attn."): t for n, t in state.items() if n.startswith(f"{at}attn.")}
        attention.load_state_dict(inside)
        z = norm(x, f"{at}ln_1")
        z = attention(z, z, z, need_weights=False)[0]
        x = x + z * state.get(f"{at}ls_1.gamma", 1)
        z = activation(linear(norm(x, f"{at}ln_2"), f"{at}mlp.c_fc"))
        x = x + linear(z, f"{at}mlp.c_proj") * state.get(f"{at}ls_2.gamma", 1)
    y = norm(x[:, 0], "ln_post")
    return y @ state["proj"] if "proj" in state else y


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def with_text_tower(state, at="visual."):
    """A file with both towers."""
    names = {at + name: tensor for name, tensor in state.items()}
    names |= {at.removesuffix("visual.") + name: torch.randn(shape) for name, shape in TEXT.items()}
    names |= {at.removesuffix("visual.") + "input_resolution": torch.tensor(32)}
    return names


def agree(bundle, state, heads, activation=quick_gelu):
    images = torch.randn(2, *bundle.model.config.input_shape)
    with torch.no_grad():
        ours, expected = bundle.model(images), reference(state, images, heads, activation)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def in_openai_dtypes(state):
    """Matrices in float16, norms and embeddings in float32."""
    small = r"conv1|in_proj|out_proj|c_fc|c_proj|(^|\.)proj$|text_projection"
    return {name: tensor.half() if re.search(small, name) else tensor for name, tensor in state.items()}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    side=st.integers(1, 4), patch=st.sampled_from([4, 8]), depth=st.integers(1, 3), heads=st.sampled_from([1, 2, 4]),
    out=st.sampled_from([0, 6, 40]), channels=st.sampled_from([1, 3]), pre=st.booleans(), scaled=st.booleans(),
    gelu=st.booleans(), at=st.sampled_from(["visual.", "module.visual.", "", "model."]),
)  # fmt: skip
def test_same_vectors(tmp_path_factory, side, patch, depth, heads, out, channels, pre, scaled, gelu, at):
    state = tower(
        patch=patch, grid=(side, side), depth=depth, out=out, channels=channels, pre=pre, scaled=scaled
    )
    names = (
        with_text_tower(state, at)
        if at.endswith("visual.")
        else {at + name: tensor for name, tensor in state.items()}
    )
    path = tmp_path_factory.mktemp("clip") / "model.pt"
    torch.save(names, path)
    bundle = load(path, heads=heads, **(dict(activation="gelu") if gelu else {}))
    assert bundle.source.family == ("clip" if at.endswith("visual.") else "clip-visual")
    agree(bundle, state, heads, F.gelu if gelu else quick_gelu)


def test_rectangular_images(tmp_path):
    state = tower(grid=(3, 5))
    agree(
        load(save_state(with_text_tower(state), tmp_path / "model.safetensors"), heads=2, size=(24, 40)),
        state,
        2,
    )


def test_the_profile(tmp_path):
    path = save_state(with_text_tower(tower(width=128)), tmp_path / "model.safetensors")
    bundle = load(path)
    config = bundle.model.config
    assert (config.eps, config.activation, config.heads, config.pool_norm) == (1e-5, "quick-gelu", 2, "after")
    assert (config.norm_pre, config.embedding_bias, config.head_bias, config.classes) == (
        True,
        False,
        False,
        6,
    )
    assert bundle.preprocess.mean == (0.48145466, 0.4578275, 0.40821073)
    assert sorted(bundle.extras) == sorted([*TEXT, "input_resolution"])


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "mixed"])
@pytest.mark.parametrize("lone", [False, True])
def test_bit_equal_round_trip(tmp_path, kind, lone):
    state = tower(scaled=True) if lone else with_text_tower(tower())
    if kind == "mixed":
        state = in_openai_dtypes(state)
        assert {tensor.dtype for tensor in state.values()} >= {torch.float16, torch.float32}
    else:
        dtype = getattr(torch, kind)
        state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    path = save_state(state, tmp_path / "model.safetensors")
    report = convert(path, tmp_path / "again.safetensors", to="clip", heads=2)
    same_file(path, tmp_path / "again.safetensors")
    assert report.target == ("clip-visual" if lone else "clip")
    assert sorted(report.extras) == ([] if lone else sorted([*TEXT, "input_resolution"]))

    bundle, images = load(path, heads=2), torch.randn(2, 3, 32, 32)
    bundle.save(tmp_path / "ours.safetensors")
    again = load(tmp_path / "ours.safetensors")
    assert torch.equal(again.model(images), bundle.model(images))
    assert again.extras.keys() == bundle.extras.keys()
    convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", to="clip")
    same_file(path, tmp_path / "back.safetensors")


def test_positions_are_resized(tmp_path):
    state = tower()
    bundle = load(save_state(with_text_tower(state), tmp_path / "model.safetensors"), heads=2, size=48)
    rows = state["positional_embedding"]
    grid = rows[1:].T.reshape(1, 32, 4, 4)
    grid = F.interpolate(grid, size=(6, 6), mode="bicubic", antialias=True, align_corners=False)
    state["positional_embedding"] = torch.cat([rows[:1], grid[0].flatten(1).T])
    agree(bundle, state, 2)


def test_clip_is_only_written_back(tmp_path):
    timm = Timm(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=5)
    path = save_state(timm.state_dict(), tmp_path / "timm.safetensors")
    with pytest.raises(ConfigError, match="not a family that can be written"):
        convert(path, tmp_path / "clip.safetensors", to="clip", heads=2)


def test_unknown_and_missing_tensors(tmp_path):
    state = with_text_tower(tower())
    more = save_state(state | {"visual.attn_pool.query": torch.ones(2, 32)}, tmp_path / "more.safetensors")
    with pytest.raises(FileError, match=r"visual\.attn_pool\.query"):
        load(more, heads=2)
    del state["visual.transformer.resblocks.1.mlp.c_proj.bias"]
    with pytest.raises(FileError, match=r"is missing blocks\.1\.mlp\.fc2\.bias"):
        load(save_state(state, tmp_path / "less.safetensors"), heads=2)
    alone = tower() | {"transformer.resblocks.0.ln_3.weight": torch.ones(32)}
    with pytest.raises(FileError, match=r"transformer\.resblocks\.0\.ln_3\.weight"):  # there is no text tower
        load(save_state(alone, tmp_path / "alone.safetensors"), heads=2)


def test_a_convolutional_tower_is_refused(tmp_path):
    state = with_text_tower(tower())
    state = {name: tensor for name, tensor in state.items() if not name.startswith("visual.")}
    state |= {
        "visual.conv1.weight": torch.randn(8, 3, 3, 3),
        "visual.attnpool.positional_embedding": torch.randn(5, 8),
    }
    with pytest.raises(FileError, match="is of no known family"):
        load(save_state(state, tmp_path / "resnet.safetensors"))


def timm_tower():
    """timm's model, a projection after it, and the tensors that OpenCLIP saves of both."""
    trunk = add_noise(Timm(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=0))
    proj = torch.randn(6, 32)
    state = {f"visual.trunk.{name}": tensor for name, tensor in trunk.state_dict().items()}
    state |= {"visual.head.proj.weight": proj, "logit_bias": torch.randn(1)}
    return trunk, proj, state | {name: torch.randn(shape) for name, shape in TEXT.items()}


def test_openclip_with_a_tower_from_timm(tmp_path):
    trunk, proj, state = timm_tower()
    path = save_state(state, tmp_path / "model.safetensors")
    bundle, images = load(path, heads=2), torch.randn(2, 3, 32, 32)
    assert bundle.source.family == "clip-timm"
    with torch.no_grad():
        torch.testing.assert_close(bundle.model(images), trunk(images) @ proj.T, rtol=0, atol=1e-5)
    convert(path, tmp_path / "again.safetensors", to="clip", heads=2)
    same_file(path, tmp_path / "again.safetensors")

    lone = {name.removeprefix("visual."): tensor for name, tensor in state.items() if "trunk" in name}
    assert load(save_state(lone, tmp_path / "trunk.safetensors"), heads=2).source.family == "timm"
