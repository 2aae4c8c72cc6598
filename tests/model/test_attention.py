"""Fused and explicit attention compute the same function."""

import pytest
import torch

import vitrail as vt
from tests.support.models import add_noise
from vitrail.model import attend, attend_explicitly


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shape", [(2, 3, 17, 8), (1, 1, 1, 4), (5, 2, 50, 3), (0, 2, 4, 8)])
def test_fused_and_explicit_agree_in_value_and_gradient(shape, dtype, tolerance):
    def run(form):
        generator = torch.Generator().manual_seed(3)
        q, k, v = (torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for _ in range(3))
        heads = form(q, k, v, scale=shape[-1] ** -0.5)
        heads.square().sum().backward()
        return heads, q.grad, k.grad, v.grad

    for fused, explicit in zip(run(attend), run(attend_explicitly), strict=True):
        torch.testing.assert_close(fused, explicit, atol=tolerance, rtol=tolerance)


def test_equal_keys_give_the_mean_of_the_values():
    q, k, v = torch.randn(1, 1, 4, 8), torch.ones(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    mean = v.mean(dim=2, keepdim=True).expand_as(v)
    torch.testing.assert_close(attend(q, k, v, scale=0.5), mean)
    torch.testing.assert_close(attend_explicitly(q, k, v, scale=0.5), mean)


def test_scores_are_multiplied_by_the_scale():
    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    recorded = []
    attend_explicitly(q, k, q, scale=0.25, tap_scores=lambda scores: recorded.append(scores) or scores)
    torch.testing.assert_close(recorded[0], torch.einsum("bkid,bkjd->bkij", q, k) / 4)


@pytest.mark.parametrize("form", [attend, attend_explicitly])
def test_dropout_acts_on_the_weights_and_preserves_the_mean(form):
    q = k = torch.zeros(1, 1, 2000, 1)
    v = torch.ones(1, 1, 2000, 1)
    heads = form(q, k, v, scale=1.0, dropout=0.25)
    assert not torch.equal(heads, v)
    assert heads.mean().item() == pytest.approx(1, abs=0.01)


def random_qkv(dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(2, 3, 6, 4, dtype=dtype, generator=generator) for _ in range(3))


MASKS = {
    "causal": torch.ones(6, 6, dtype=torch.bool).tril(),
    "for each image": torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.4,
    "one token attends to nothing": torch.ones(6, 6, dtype=torch.bool).index_fill(0, torch.tensor(2), False),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("biased", [False, True])
def test_masks_and_biases_agree_in_both_forms(mask, biased):
    q, k, v = random_qkv()
    bias = torch.randn(3, 6, 6, dtype=torch.float64) if biased else None
    fused = attend(q, k, v, scale=0.7, mask=mask, bias=bias)
    explicit = attend_explicitly(q, k, v, scale=0.7, mask=mask, bias=bias)
    assert (fused - explicit).abs().max() < 1e-12
    masked = ~mask.any(-1).expand(2, 3, 6)
    assert (fused[masked] == 0).all()


def test_a_masked_token_has_no_influence():
    q, k, v = random_qkv()
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[:, 4] = False
    before = attend(q, k, v, scale=0.5, mask=mask)
    k[:, :, 4], v[:, :, 4] = 1e6, float("inf")
    v[:, :, 4] = 1e6
    assert torch.equal(attend(q, k, v, scale=0.5, mask=mask), before)


def test_cross_attention_takes_keys_and_values_from_the_context():
    attention = (
        add_noise(vt.ViT(vt.ViTConfig(width=12, depth=1, heads=3, patch=4, size=8, classes=0)))
        .blocks[0]
        .attention
    )
    z, context = torch.randn(2, 4, 12), torch.randn(2, 9, 12)
    assert attention(z, context).shape == (2, 4, 12)
    assert (attention(z, z) - attention(z)).abs().max() < 1e-6  # a context of itself is self-attention
    assert (
        attention(z, context) - attention(z, context.flip(1))
    ).abs().max() < 1e-5  # the order does not matter
    assert (attention(z, context[:, :5]) - attention(z, context)).abs().max() > 1e-3


def test_keys_without_a_bias():
    config = dict(width=12, depth=1, heads=3, patch=4, size=8, classes=0)
    model = add_noise(vt.ViT(vt.ViTConfig(**config, qkv_bias="no-k")))
    plain = vt.ViT(vt.ViTConfig(**config)).eval()
    state = model.state_dict()
    state["blocks.0.attention.qkv.bias"][12:24] = 0
    plain.load_state_dict(state)
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(model(images), plain(images))
    model(images).sum().backward()
    assert (model.blocks[0].attention.qkv.bias.grad[12:24] == 0).all()


@pytest.mark.parametrize(("scale", "value"), [("head", 0.5), ("width", 12**-0.5), ("none", 1.0), (0.3, 0.3)])
def test_scales(scale, value):
    model = vt.ViT(vt.ViTConfig(width=12, depth=1, heads=3, patch=4, size=8, classes=0, scale=scale))
    assert model.blocks[0].attention.scale == pytest.approx(value)
