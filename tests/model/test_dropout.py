"""Each dropout acts where it should, in training and only there."""

import pytest
import torch

import vitrail as vt
from conftest import shake

SHAPE = dict(width=32, depth=2, heads=2, patch=4, size=16, channels=1, classes=0)


def model_with(**fields):
    return shake(vt.ViT(vt.ViTConfig(**SHAPE, **fields)))


def zeros(tensor):
    return (tensor == 0).double().mean().item()


@pytest.mark.parametrize(
    ("place", "share"),
    [("drop", 0.5), ("blocks.0.drop", 0.5), ("blocks.1.drop", 0.5), ("blocks.0.mlp.drop", 0.5)],
)
def test_dropout_zeroes_its_share(place, share):
    model, images = model_with(dropout=0.5), torch.randn(8, 1, 16, 16)
    with vt.record(model, place) as tape:
        model(images)
        assert zeros(tape[place]) == 0
        model.train()
        model(images)
    assert zeros(tape[place]) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("branch", ["attended", "thought"])
def test_dropout_falls_on_both_branches(branch):
    """The last thing in each branch, so that a dropped channel adds nothing."""
    block = model_with(dropout=0.5).blocks[0].train()
    z = torch.randn(8, 17, 32)
    added = block.thought(z) if branch == "thought" else block.attended(z, None, lambda x: x)
    assert zeros(added) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("explicit", [0, 1], ids=["fused", "explicit"])
def test_attention_dropout_falls_on_the_weights(explicit):
    attention = model_with(attention_dropout=0.5).blocks[0].attention
    attention.explicit = explicit
    z = torch.randn(4, 17, 32)
    assert torch.equal(attention(z), attention(z))
    attention.train()
    assert not torch.equal(attention(z), attention(z))


def test_drop_path_leaves_a_branch_out_for_some_pictures():
    model = model_with(drop_path=0.6)
    assert [block.path.rate for block in model.blocks] == [0, 0.6]
    path, branch = model.blocks[1].path.train(), torch.ones(4000, 2, 3)
    kept = path(branch)
    assert set(kept.unique().tolist()) == {0.0, 2.5}
    assert (kept.amax((1, 2)) == kept.amin((1, 2))).all()  # a picture keeps all of it or nothing
    assert kept.mean().item() == pytest.approx(1, abs=0.1)
    assert path.eval()(branch) is branch


def test_patch_dropout_keeps_the_prefix_and_the_order():
    model = model_with(patch_dropout=0.25, registers=2)
    images = torch.randn(6, 1, 16, 16)
    z = torch.arange(19.0).expand(6, -1)[..., None].expand(-1, -1, 32)  # each token holds its number
    kept = model.drop_patches.train()(z)[..., 0]
    assert kept.shape == (6, 3 + 12)
    assert (kept[:, :3] == torch.arange(3)).all()
    assert (kept.diff(dim=1) > 0).all()
    assert len({tuple(row.tolist()) for row in kept}) > 1  # another draw for each picture
    model.train()
    with pytest.raises(
        vt.InputError, match=r"laid out as a grid only .* Got 12 of 16, after patch dropout. Use .tokens"
    ):
        _ = model.encode(images).patches
    assert model.eval().encode(images).patches.shape == (6, 4, 4, 32)
