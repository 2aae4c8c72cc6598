"""`mask=` of `ViT.forward` and `encode`: which tokens each token may attend to."""

import pytest
import torch

from vitrail.base.errors import InputError
from vitrail.model import ViT, record
from vitrail.model.config import ViTConfig
from vitrail.model.text_tower import causal_mask

CONFIG = dict(width=16, depth=2, heads=2, patch=4, size=12, channels=1, classes=5)
IMAGES = torch.randn(3, 1, 12, 12, generator=torch.Generator().manual_seed(0))


def build(**fields):
    torch.manual_seed(0)
    model = ViT(ViTConfig(**CONFIG | fields)).eval()
    torch.nn.init.normal_(model.get_parameter("head.weight"))
    return model


@pytest.mark.parametrize("block", ["pre-norm", "post-norm", "res-post-norm", "parallel", "no-residual"])
@pytest.mark.parametrize("position", ["learned", "rotary", "relative"])
def test_a_mask_of_ones_changes_nothing(block, position):
    model = build(block=block, position=position, head_width=8)
    full = torch.ones(10, 10, dtype=torch.bool)
    assert torch.allclose(model(IMAGES, mask=full), model(IMAGES), atol=1e-6)
    assert torch.allclose(model(IMAGES, full.expand(3, 10, 10)), model(IMAGES), atol=1e-6)


def test_masked_tokens_have_no_influence():
    """If no token may attend to patch 4, its pixels change no other token."""
    model, mask = build(), torch.ones(10, 10, dtype=torch.bool)
    mask[:, 5] = False
    mask[5, 5] = True
    changed = IMAGES.clone()
    changed[:, :, 4:8, 4:8] += 1
    before, after = model.encode(IMAGES, mask=mask), model.encode(changed, mask=mask)
    others = [token for token in range(10) if token != 5]
    assert torch.equal(before.tokens[:, others], after.tokens[:, others])
    assert not torch.equal(before.tokens[:, 5], after.tokens[:, 5])
    assert torch.equal(model(IMAGES, mask=mask), model(changed, mask=mask))
    assert not torch.equal(model(IMAGES), model(changed))


def test_weights_are_zero_where_masked_and_equal_the_fused_kernel():
    model, mask = build(), causal_mask(10)
    with record(model, "blocks.*.attention.weights") as tape:
        explicit = model.encode(IMAGES, mask=mask)
    for weights in tape.values():
        assert weights.masked_select(~mask).eq(0).all()
        assert torch.allclose(weights.sum(dim=-1), torch.ones(()), atol=1e-6)
    assert torch.allclose(explicit.tokens, model.encode(IMAGES, mask=mask).tokens, atol=1e-5)


def test_each_image_has_its_own_mask():
    model = build()
    masks = torch.stack([causal_mask(10), torch.ones(10, 10, dtype=torch.bool), torch.eye(10).bool()])
    together = model(IMAGES, mask=masks)
    apart = torch.cat([model(IMAGES[n : n + 1], mask=masks[n]) for n in range(3)])
    assert torch.allclose(together, apart, atol=1e-5)
    assert not torch.allclose(together[0], model(IMAGES)[0], atol=1e-5)


def test_mask_with_gradient_checkpointing():
    model, mask = build().train(), causal_mask(10)
    plain = model(IMAGES, mask=mask)
    plain.sum().backward()
    expected = model.get_parameter("tokens.proj.weight").grad.clone()
    model.zero_grad()
    again = model.set_grad_checkpointing()(IMAGES, mask=mask)
    again.sum().backward()
    assert torch.allclose(again, plain)
    assert torch.allclose(model.get_parameter("tokens.proj.weight").grad, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(10, 10), "must be a torch tensor of bool.* not torch.float32; convert with mask.bool"),
        ([[True]], "not list"),
        (torch.ones(9, 9, dtype=torch.bool), r"shape \(10, 10\), or \(3, 10, 10\).* not \(9, 9\)"),
        (torch.ones(2, 10, 10, dtype=torch.bool), r"not \(2, 10, 10\)"),
        (torch.ones(3, 10, dtype=torch.bool), r"not \(3, 10\)"),
    ],
)
def test_wrong_masks(mask, message):
    with pytest.raises(InputError, match=message):
        build()(IMAGES, mask=mask)
