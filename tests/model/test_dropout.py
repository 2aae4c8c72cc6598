"""Each kind of dropout acts where it should, and in training only."""

import pytest
import torch

import vitrail as vt
from tests.support.models import add_noise

SHAPE = dict(width=32, depth=2, heads=2, patch=4, size=16, channels=1, classes=0)


def model_with(**fields):
    return add_noise(vt.ViT(vt.ViTConfig(**SHAPE, **fields)))


def zeros(tensor):
    return (tensor == 0).double().mean().item()


@pytest.mark.parametrize(
    ("module", "fraction"),
    [("drop", 0.5), ("blocks.0.drop", 0.5), ("blocks.1.drop", 0.5), ("blocks.0.mlp.drop", 0.5)],
)
def test_dropout_zeroes_a_fraction(module, fraction):
    model, images = model_with(dropout=0.5), torch.randn(8, 1, 16, 16)
    with vt.record(model, module) as tape:
        model(images)
        assert zeros(tape[module]) == 0
        model.train()
        model(images)
    assert zeros(tape[module]) == pytest.approx(fraction, abs=0.05)


@pytest.mark.parametrize("branch", ["attention", "mlp"])
def test_dropout_acts_on_both_branches(branch):
    """It is last in each branch, so that a dropped channel adds nothing."""
    block = model_with(dropout=0.5).blocks[0].train()
    z = torch.randn(8, 17, 32)
    added = block.mlp_branch(z) if branch == "mlp" else block.attention_branch(z, None, lambda x: x)
    assert zeros(added) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("explicit", [0, 1], ids=["fused", "explicit"])
def test_attention_dropout_acts_on_the_weights(explicit):
    attention = model_with(attention_dropout=0.5).blocks[0].attention
    attention.explicit = explicit
    z = torch.randn(4, 17, 32)
    assert torch.equal(attention(z), attention(z))
    attention.train()
    assert not torch.equal(attention(z), attention(z))


def test_drop_path_skips_a_branch_for_some_images():
    model = model_with(drop_path=0.6)
    assert [block.path.p for block in model.blocks] == [0, 0.6]
    path, branch = model.blocks[1].path.train(), torch.ones(4000, 2, 3)
    out = path(branch)
    assert set(out.unique().tolist()) == {0.0, 2.5}
    assert (out.amax((1, 2)) == out.amin((1, 2))).all()  # all of an image or nothing
    assert out.mean().item() == pytest.approx(1, abs=0.1)
    assert path.eval()(branch) is branch


def test_patch_dropout_does_not_change_the_prefix_and_the_order():
    model = model_with(patch_dropout=0.25, registers=2)
    images = torch.randn(6, 1, 16, 16)
    z = torch.arange(19.0).expand(6, -1)[..., None].expand(-1, -1, 32)  # each token holds its index
    index = model.drop_patches.train()(z)[..., 0]
    assert index.shape == (6, 3 + 12)
    assert (index[:, :3] == torch.arange(3)).all()
    assert (index.diff(dim=1) > 0).all()
    assert len({tuple(row.tolist()) for row in index}) > 1  # another sample for each image
    model.train()
    with pytest.raises(vt.InputError, match=r"12 of 16 patches .* patch dropout.*use .tokens"):
        _ = model.encode(images).patches
    assert model.eval().encode(images).patches.shape == (6, 4, 4, 32)
