"""The two forms of attention are one function."""

import pytest
import torch

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


def test_scores_are_scaled_by_the_width_of_a_head():
    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    seen = []
    attend_explicitly(q, k, q, scale=0.25, see_scores=lambda scores: seen.append(scores) or scores)
    torch.testing.assert_close(seen[0], torch.einsum("bkid,bkjd->bkij", q, k) / 4)


@pytest.mark.parametrize("form", [attend, attend_explicitly])
def test_dropout_falls_on_the_weights_and_keeps_the_mean(form):
    q = k = torch.zeros(1, 1, 2000, 1)
    v = torch.ones(1, 1, 2000, 1)
    heads = form(q, k, v, scale=1.0, dropout=0.25)
    assert not torch.equal(heads, v)
    assert heads.mean().item() == pytest.approx(1, abs=0.01)
