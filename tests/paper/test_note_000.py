"""Lecture note 000 (DKRZ slides): Eq. 1-4, and its scale 1/sqrt(d_model)."""

import numpy as np
import torch

import vitrail as vt
from tests.support import oracle
from tests.support.models import add_noise

BASE = dict(width=12, depth=1, heads=3, patch=4, size=8, channels=2, classes=0)


def test_parameter_counts_of_the_table_except_large():
    """Slide "Introduction", Table 1: 86M, 307M, 632M. The second is not that of L/16, which has 304M."""

    def millions(name):
        with torch.device("meta"):
            return sum(p.numel() for p in vt.create(name).parameters()) / 1e6

    assert round(millions("B/16"), 1) == 86.6  # 85.8 without the head
    assert round(millions("H/14")) == 632
    assert round(millions("L/16")) == 304
    assert round(millions("L/32")) == 307


def test_number_of_patches():
    """Slide "Breaking the equations down - 1": N = HW/P^2, x_p in R^(N x (P^2 C)), E_pos in R^((N+1) x D)."""
    config = vt.preset("B/16")
    H, W = config.pixels
    assert config.patches == H * W // 16**2 == 196
    with torch.device("meta"):
        model = vt.ViT(config)
    assert model.tokens.proj.weight.flatten(1).T.shape == (16**2 * 3, 768)  # E
    assert model.position.table.shape == (196 + 1, 768)


def test_scale_by_the_model_width():
    """Slide "Breaking the equations down - 2" divides by sqrt(d_model), not sqrt(d) as the paper does."""
    model = add_noise(vt.ViT(vt.ViTConfig(**BASE, scale="width"))).double()
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    z = torch.randn(1, 5, 12, dtype=torch.float64)
    # sqrt(D) instead of sqrt(d): the oracle's head with q scaled by sqrt(d / D).
    scaled = dict(weights)
    factor = np.sqrt(4 / 12)
    for kind in ("weight", "bias"):
        matrix = weights[f"blocks.0.attention.qkv.{kind}"].copy()
        matrix[:12] *= factor
        scaled[f"blocks.0.attention.qkv.{kind}"] = matrix
    expected = oracle.msa(z[0].numpy(), scaled, "blocks.0", heads=3)
    with torch.no_grad():
        ours = model.blocks[0].attention(z)[0].numpy()
        paper = add_noise(vt.ViT(vt.ViTConfig(**BASE))).double()
        paper.load_state_dict(model.state_dict())
        others = paper.blocks[0].attention(z)[0].numpy()
    assert np.abs(ours - expected).max() < 1e-10
    assert np.abs(ours - others).max() > 1e-3  # so the two scales differ


def test_the_attention_matrix_is_tokens_by_tokens():
    """The same slide: "The dimension results into (T, T)"."""
    model = add_noise(vt.ViT(vt.ViTConfig(**BASE)))
    with vt.record(model, "blocks.0.attention.weights") as tape:
        model(torch.randn(2, 2, 8, 8))
    assert tape["blocks.0.attention.weights"].shape == (2, 3, 5, 5)


def test_several_hidden_layers():
    """Slide "Breaking the equations down - 3&4": "We could have multiple hidden layer"."""
    model = add_noise(vt.ViT(vt.ViTConfig(**BASE, mlp_hidden=3))).double()
    w = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    z = torch.randn(1, 5, 12, dtype=torch.float64)
    hidden = z[0].numpy()
    for layer in ("fc1", "middle.0", "middle.1"):
        hidden = oracle.gelu(hidden @ w[f"blocks.0.mlp.{layer}.weight"].T + w[f"blocks.0.mlp.{layer}.bias"])
    expected = hidden @ w["blocks.0.mlp.fc2.weight"].T + w["blocks.0.mlp.fc2.bias"]
    with torch.no_grad():
        assert np.abs(model.blocks[0].mlp(z)[0].numpy() - expected).max() < 1e-10
