"""Positions: which token gets which row, what is fixed, what turns, what is added to scores."""

import math

import numpy as np
import pytest
import torch

import vitrail as vt
from conftest import shake

BASE = dict(width=16, depth=3, heads=2, patch=4, size=(8, 12), channels=1, classes=0)


def build(**fields):
    return shake(vt.ViT(vt.ViTConfig(**{**BASE, **fields})))


@pytest.mark.parametrize(
    ("rows", "with_row"), [("all", [1, 1, 1, 1]), ("class", [1, 0, 0, 0]), ("patches", [0, 0, 0, 0])]
)
def test_rows_are_added_to_the_tokens_that_have_one(rows, with_row):
    model = build(rows=rows, distillation_token=True, registers=2)
    table = model.position.table
    assert len(table) == sum(with_row) + 6
    added = model.position(torch.zeros(1, 10, 16))[0]
    assert torch.equal(added[4:], table[-6:])
    assert torch.equal(added[:4].abs().sum(1) > 0, torch.tensor(with_row, dtype=torch.bool))
    assert torch.equal(added[:4][torch.tensor(with_row) == 1], table[: sum(with_row)])


def test_sines_and_cosines_in_one_dimension():
    """Vaswani et al.: PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos(the same)."""
    table = build(position="sincos1d").position.fixed.numpy()
    for token in range(7):
        for i in range(8):
            angle = token / 10_000 ** (2 * i / 16)
            assert table[token, 2 * i] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[token, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-6)


def test_sines_and_cosines_in_two_dimensions():
    table = build(position="sincos2d").position.fixed.numpy()
    assert (table[0] == 0).all()  # the class token
    patches = table[1:].reshape(2, 3, 16)
    assert (patches[:, :, :8] == patches[:, :1, :8]).all()  # the first half knows the row
    assert (patches[:, :, 8:] == patches[:1, :, 8:]).all()  # the second the column
    assert patches[1, 0, 2] == pytest.approx(math.sin(10_000 ** (-2 / 8)), abs=1e-6)
    assert np.unique(patches.reshape(6, 16), axis=0).shape[0] == 6


def test_fixed_positions_are_not_saved_and_do_not_learn():
    model = build(position="sincos2d")
    assert not [name for name in model.state_dict() if "position" in name]
    assert not list(model.position.parameters())


def test_rows_and_columns_apart():
    model = build(position="learned2d")
    rows = model.position.given_rows()[1:].unflatten(0, (2, 3))
    assert torch.equal(rows[1, 2], torch.cat([model.position.down[1], model.position.across[2]]))
    assert torch.equal(model.position.given_rows()[:1], model.position.front)


@pytest.mark.parametrize("position", ["learned", "learned2d", "sincos1d", "sincos2d"])
def test_positions_before_every_block(position):
    once, every = build(position=position), build(position=position, position_at="every")
    every.load_state_dict(once.state_dict())
    images = torch.randn(1, 1, 8, 12)
    with torch.no_grad(), vt.record(every, "blocks.*.out", "embed") as tape:
        every(images)
        z = tape["embed"]
        for index, block in enumerate(every.blocks):
            z = block(z if index == 0 else z + every.position.all_rows())
            assert (
                torch.equal(z, tape[f"blocks.{index}.out"])
                or (z - tape[f"blocks.{index}.out"]).abs().max() < 1e-5
            )
        assert (every(images) - once(images)).abs().max() > 1e-3


@pytest.mark.parametrize("position", ["rotary", "rotary-dinov3"])
def test_rotary_scores_depend_on_distances_alone(position):
    turn = build(position=position, size=(16, 20), head_width=8).position.turn
    q, k = torch.randn(8), torch.randn(8)
    tokens = 1 + 4 * 5
    turned_q, turned_k = (turn(x.expand(1, 1, tokens, 8).double())[0, 0, 1:].view(4, 5, 8) for x in (q, k))
    scores = torch.einsum("abd,xyd->abxy", turned_q, turned_k)
    for down, across in [(0, 1), (1, 0), (2, 3), (1, -2)]:
        same = [
            scores[r, c, r + down, c + across]
            for r in range(4 - down)
            for c in range(max(0, -across), 5 - max(0, across))
        ]
        assert max(same) - min(same) < 1e-6
    assert abs(scores[0, 0, 0, 1] - scores[0, 1, 0, 0]) > 1e-3  # direction counts
    assert abs(scores[0, 0, 0, 1] - scores[0, 0, 1, 0]) > 1e-3  # and axis


def test_rotary_leaves_prefix_and_lengths_alone():
    model = build(position="rotary", registers=1)
    heads = torch.randn(2, 2, 8, 8)
    turned = model.position.turn(heads)
    assert torch.equal(turned[:, :, :2], heads[:, :, :2])
    assert torch.allclose(turned.norm(dim=-1), heads.norm(dim=-1), atol=1e-5)
    assert not torch.allclose(turned[:, :, 3:], heads[:, :, 3:], atol=1e-3)


def test_relative_numbers_are_shared_by_equal_distances():
    bias = build(position="relative").blocks[0].attention.bias()
    patches = bias[:, 1:, 1:].view(2, 2, 3, 2, 3)
    assert torch.equal(patches[:, 0, 0, 1, 1], patches[:, 0, 1, 1, 2])
    assert not torch.equal(patches[:, 0, 0, 1, 1], patches[:, 1, 1, 0, 0])
    assert bias[:, 0, 1:].unique(dim=1).shape == (2, 1)


@pytest.mark.parametrize("position", ["rotary", "pairwise", "relative", "none"])
def test_other_positions_add_nothing_to_the_tokens(position):
    model = build(position=position)
    z = torch.randn(2, 7, 16)
    assert model.position(z) is z
    assert model.position.again(z) is z
