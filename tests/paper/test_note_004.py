"""Lecture note 004 (CMU 10-417): self-attention with p_ij, both six-step blocks, flatten + linear."""

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support import oracle
from tests.support.models import add_noise

BASE = dict(width=12, depth=1, heads=3, patch=4, size=8, channels=2, classes=5)


def build(**fields):
    model = add_noise(vt.ViT(vt.ViTConfig(**{**BASE, **fields}))).double()
    return model, {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def multi_head(v, w, p, heads):
    """ "Multi-Head Attention Layer": v'_i = C concat_r(V_r sum_j alpha^r_ij v_j) + b, where
    alpha^r_ij = softmax_j(v_i^T Q_r K_r^T v_j + p^r_ij): one token, one head, one sum at a time."""
    Q, K, V = np.split(w["blocks.0.attention.qkv.weight"], 3)  # no bias on q, k, v in the note
    m = len(Q) // heads
    rows = []
    for v_i, token in zip(v, range(len(v)), strict=True):
        parts = []
        for r in range(heads):
            of_head = slice(r * m, (r + 1) * m)
            scores = [(Q[of_head] @ v_i) @ (K[of_head] @ v_j) + p[r, token, j] for j, v_j in enumerate(v)]
            alpha = oracle.softmax(np.array(scores))
            parts.append(V[of_head] @ sum(a * v_j for a, v_j in zip(alpha, v, strict=True)))
        rows.append(
            w["blocks.0.attention.out.weight"] @ np.concatenate(parts) + w["blocks.0.attention.out.bias"]
        )
    return np.stack(rows)


NOTE = dict(qkv_bias="none", scale="none")  # the note's formula has neither a bias nor a scale


def relative_p(model):
    """p_ij from the table of relative offsets, pair by pair; the last three are for the prefix."""
    table = model.blocks[0].attention.bias.table.detach().numpy()
    (h, w), n = model.config.grid, model.config.prefix
    p = np.empty((len(table), n + h * w, n + h * w))
    for i in range(n + h * w):
        for j in range(n + h * w):
            if i >= n and j >= n:
                (a, b), (c, d) = divmod(i - n, w), divmod(j - n, w)
                p[:, i, j] = table[:, (a - c + h - 1) * (2 * w - 1) + (b - d + w - 1)]
            else:
                p[:, i, j] = table[:, (2 * h - 1) * (2 * w - 1) + (0 if j >= n else 1 if i >= n else 2)]
    return p


@pytest.mark.parametrize("position", ["pairwise", "relative"])
def test_self_attention_with_a_bias_for_each_pair(position):
    """ "Self Attention Layer": "p_ij is a bias term, also known as relative positional encoding"."""
    model, w = build(**NOTE, position=position, size=(8, 12))
    bias = model.blocks[0].attention.bias
    p = bias.table.detach().numpy() if position == "pairwise" else relative_p(model)
    z = torch.randn(1, model.config.tokens, 12, dtype=torch.float64)
    with torch.no_grad():
        ours = model.blocks[0].attention(z)[0].numpy()
    assert np.abs(ours - multi_head(z[0].numpy(), w, p, heads=3)).max() < 1e-10


def test_attention_by_position_only():
    """ "Self-Attention can learn convolution": alpha_ij = softmax(p_ij), independent of the tokens."""
    model, w = build(**{**NOTE, "scale": 0.0}, position="pairwise")
    p = w["blocks.0.attention.bias.table"]
    with vt.record(model, "blocks.0.attention.weights") as tape:
        model(torch.randn(2, 2, 8, 8, dtype=torch.float64))
    assert np.abs(tape["blocks.0.attention.weights"].detach().numpy() - oracle.softmax(p)).max() < 1e-12


def six_steps(z, w, order):
    """Both lists of "Transformer Architecture", step by step, with our attention and MLP as oracle."""

    def MSA(v):
        return oracle.msa(v, w, "blocks.0", heads=3)

    def h(v):
        return oracle.mlp(v, w, "blocks.0")

    def LN(v, name):
        return oracle.layer_norm(v, w[f"blocks.0.{name}.weight"], w[f"blocks.0.{name}.bias"], 1e-6)

    if order == "post-layernorm":
        v1 = MSA(z)
        v2 = LN(v1, "norm1")
        v3 = v2 + z
        v4 = h(v3)
        v5 = LN(v4, "norm2")
        return v5 + v3
    v1 = LN(z, "norm1")
    v2 = MSA(v1)
    v3 = v2 + z
    v4 = LN(v3, "norm2")
    v5 = h(v4)
    return v5 + v3


@pytest.mark.parametrize("order", ["post-layernorm", "pre-layernorm"])
def test_both_blocks_in_six_steps(order):
    model, w = build(block=order)
    z = torch.randn(1, 5, 12, dtype=torch.float64)
    with torch.no_grad():
        ours = model.blocks[0](z)[0].numpy()
    assert np.abs(ours - six_steps(z[0].numpy(), w, order)).max() < 1e-10


def test_post_layernorm_of_the_note_is_not_that_of_vaswani():
    assert vt.ViTConfig(**BASE, block="post-layernorm").block == "res-post-norm"
    model, w = build(block="post-norm")
    z = torch.randn(1, 5, 12, dtype=torch.float64)
    LN = {n: (w[f"blocks.0.{n}.weight"], w[f"blocks.0.{n}.bias"], 1e-6) for n in ("norm1", "norm2")}
    v = oracle.layer_norm(z[0].numpy() + oracle.msa(z[0].numpy(), w, "blocks.0", 3), *LN["norm1"])
    vaswani = oracle.layer_norm(v + oracle.mlp(v, w, "blocks.0"), *LN["norm2"])
    with torch.no_grad():
        ours = model.blocks[0](z)[0].numpy()
    assert np.abs(ours - vaswani).max() < 1e-10
    assert np.abs(ours - six_steps(z[0].numpy(), w, "post-layernorm")).max() > 1e-2


def test_embedding_blocks_flatten_linear():
    """The last "Transformer Architecture": linear embedding + layer-normalization, blocks, Flatten +
    Linear. Without a class token, and with the pre-layernorm block."""
    model, w = build(
        embedding_norm="after", class_token=False, pool="flatten", pool_norm="none", position="none"
    )
    image = torch.randn(2, 8, 8, dtype=torch.float64)
    E = w["tokens.proj.weight"].reshape(12, -1).T
    z = oracle.patches(image.numpy(), 4, 4) @ E + w["tokens.proj.bias"]
    z = oracle.layer_norm(z, w["tokens.norm_after.weight"], w["tokens.norm_after.bias"], 1e-6)
    z = six_steps(z, w, "pre-layernorm")
    expected = w["head.weight"] @ z.reshape(-1) + w["head.bias"]
    with torch.no_grad():
        assert np.abs(model(image[None])[0].numpy() - expected).max() < 1e-10


def test_an_mlp_on_each_patch():
    """ "Basic structure of ViT", step 2.1: flatten each patch, apply an MLP on it."""
    model, w = build(embedding="mlp")
    image = torch.randn(2, 8, 8, dtype=torch.float64)
    hidden = (
        oracle.patches(image.numpy(), 4, 4) @ w["tokens.proj.weight"].reshape(12, -1).T
        + w["tokens.proj.bias"]
    )
    expected = oracle.gelu(hidden) @ w["tokens.fc.weight"].T + w["tokens.fc.bias"]
    with torch.no_grad():
        assert np.abs(model.tokens(image[None])[0].numpy() - expected).max() < 1e-10


def test_vit_large_has_256_tokens_at_256_pixels_and_304_million_parameters():
    """ "VIT Large": 16x16 patches, 256 vectors, 1024 -> 4096 -> 1024, 24 blocks, 16 heads: 304M, not 307M."""
    with torch.device("meta"):
        model = vt.create("L/16@256")
    assert (model.config.patches, model.config.F, model.config.depth, model.config.heads) == (
        256,
        4096,
        24,
        16,
    )
    assert sum(p.numel() for p in model.parameters()) == 304_388_072
