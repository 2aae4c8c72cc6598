"""Position schemes: which token gets which row, what is fixed, rotated, or added to the scores."""

import math
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.models import add_noise
from vitrail.model.config import POSITIONS as CONFIG_POSITIONS
from vitrail.model.position import POSITIONS

BASE = dict(width=16, depth=3, heads=2, patch=4, size=(8, 12), channels=1, classes=0)


def build(**fields):
    return add_noise(vt.ViT(vt.ViTConfig(**{**BASE, **fields})))


@pytest.mark.parametrize(
    ("rows", "with_row"), [("all", [1, 1, 1, 1]), ("class", [1, 0, 0, 0]), ("patches", [0, 0, 0, 0])]
)
def test_rows_are_added_to_the_tokens_that_have_one(rows, with_row):
    model = build(rows=rows, distillation_token=True, registers=2)
    table = model.position.table
    assert len(table) == sum(with_row) + 6
    added = model.position(torch.zeros(1, 10, 16), (2, 3))[0]
    assert torch.equal(added[4:], table[-6:])
    assert torch.equal(added[:4].abs().sum(1) > 0, torch.tensor(with_row, dtype=torch.bool))
    assert torch.equal(added[:4][torch.tensor(with_row) == 1], table[: sum(with_row)])


def test_sincos1d():
    """Vaswani et al.: PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos(the same)."""
    table = build(position="sincos1d").position.fixed.numpy()
    for token in range(7):
        for i in range(8):
            angle = token / 10_000 ** (2 * i / 16)
            assert table[token, 2 * i] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[token, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-6)


def test_sincos1d_of_an_odd_width_ends_with_a_sine():
    table = build(position="sincos1d", width=9, heads=3).position.fixed.numpy()
    assert table.shape == (7, 9)
    assert table[3, 8] == pytest.approx(math.sin(3 / 10_000 ** (8 / 9)), abs=1e-6)
    assert table[3, 7] == pytest.approx(math.cos(3 / 10_000 ** (6 / 9)), abs=1e-6)


def test_sincos2d():
    table = build(position="sincos2d").position.fixed.numpy()
    assert (table[0] == 0).all()  # the class token
    patches = table[1:].reshape(2, 3, 16)
    assert (patches[:, :, :8] == patches[:, :1, :8]).all()  # the first half depends on the row
    assert (patches[:, :, 8:] == patches[:1, :, 8:]).all()  # the second on the column
    assert patches[1, 0, 2] == pytest.approx(math.sin(10_000 ** (-2 / 8)), abs=1e-6)
    assert np.unique(patches.reshape(6, 16), axis=0).shape[0] == 6


def test_fixed_positions_are_neither_saved_nor_trained():
    model = build(position="sincos2d")
    assert not [name for name in model.state_dict() if "position" in name]
    assert not list(model.position.parameters())


def test_learned2d():
    model = build(position="learned2d")
    rows = model.position.rows((2, 3))[1:].unflatten(0, (2, 3))
    assert torch.equal(rows[1, 2], torch.cat([model.position.down[1], model.position.across[2]]))
    assert torch.equal(model.position.rows((2, 3))[:1], model.position.front)


@pytest.mark.parametrize("position", ["learned", "learned2d", "sincos1d", "sincos2d"])
def test_positions_before_every_block(position):
    once, every = build(position=position), build(position=position, position_at="every")
    every.load_state_dict(once.state_dict())
    images = torch.randn(1, 1, 8, 12)
    with torch.no_grad(), vt.record(every, "blocks.*.out", "embed") as tape:
        every(images)
        z = tape["embed"]
        for index, block in enumerate(every.blocks):
            z = block(z if index == 0 else z + every.position.all_rows((2, 3)))
            assert (
                torch.equal(z, tape[f"blocks.{index}.out"])
                or (z - tape[f"blocks.{index}.out"]).abs().max() < 1e-5
            )
        assert (every(images) - once(images)).abs().max() > 1e-3


@pytest.mark.parametrize("position", ["rotary", "rotary-dinov3", "rotary-eva02", "rotary-pe"])
def test_rotary_scores_depend_on_offsets_only(position):
    rotate = build(position=position, size=(16, 20), head_width=8).position.rotation((4, 5))
    q, k = torch.randn(8), torch.randn(8)
    tokens = 1 + 4 * 5
    rotated_q, rotated_k = (
        rotate(x.expand(1, 1, tokens, 8).double())[0, 0, 1:].view(4, 5, 8) for x in (q, k)
    )
    scores = torch.einsum("abd,xyd->abxy", rotated_q, rotated_k)
    for down, across in [(0, 1), (1, 0), (2, 3), (1, -2)]:
        same = [
            scores[r, c, r + down, c + across]
            for r in range(4 - down)
            for c in range(max(0, -across), 5 - max(0, across))
        ]
        assert max(same) - min(same) < 1e-6
    assert abs(scores[0, 0, 0, 1] - scores[0, 1, 0, 0]) > 1e-3  # the direction matters
    assert abs(scores[0, 0, 0, 1] - scores[0, 0, 1, 0]) > 1e-3  # and the axis


def test_rotary_does_not_change_the_prefix_and_the_norms():
    model = build(position="rotary", registers=1)
    heads = torch.randn(2, 2, 8, 8)
    rotated = model.position.rotation((2, 3))(heads)
    assert torch.equal(rotated[:, :, :2], heads[:, :, :2])
    assert torch.allclose(rotated.norm(dim=-1), heads.norm(dim=-1), atol=1e-5)
    assert not torch.allclose(rotated[:, :, 3:], heads[:, :, 3:], atol=1e-3)


def test_relative_biases_are_equal_for_equal_offsets():
    bias = build(position="relative").blocks[0].attention.bias()
    patches = bias[:, 1:, 1:].view(2, 2, 3, 2, 3)
    assert torch.equal(patches[:, 0, 0, 1, 1], patches[:, 0, 1, 1, 2])
    assert not torch.equal(patches[:, 0, 0, 1, 1], patches[:, 1, 1, 0, 0])
    assert bias[:, 0, 1:].unique(dim=1).shape == (2, 1)


@pytest.mark.parametrize("position", ["rotary", "pairwise", "relative", "none"])
def test_other_positions_add_nothing_to_the_tokens(position):
    model = build(position=position)
    z = torch.randn(2, 7, 16)
    assert model.position(z, (2, 3)) is z
    assert model.position.before_block(z, (2, 3)) is z


# One row for each scheme: add yours here.
SCHEMES = {
    "learned": dict(adds=True, rotates=False, biases=False),
    "learned2d": dict(adds=True, rotates=False, biases=False),
    "sincos1d": dict(adds=True, rotates=False, biases=False),
    "sincos2d": dict(adds=True, rotates=False, biases=False),
    "rotary": dict(adds=False, rotates=True, biases=False),
    "rotary-dinov3": dict(adds=False, rotates=True, biases=False),
    "rotary-eva02": dict(adds=True, rotates=True, biases=False),
    "rotary-pe": dict(adds=True, rotates=True, biases=False),
    "pairwise": dict(adds=False, rotates=False, biases=True),
    "relative": dict(adds=False, rotates=False, biases=True),
    "none": dict(adds=False, rotates=False, biases=False),
}


def test_every_scheme_has_a_class_a_config_row_and_a_test_row():
    values = get_args(get_type_hints(vt.ViTConfig)["position"])
    assert set(values) == set(POSITIONS) == set(CONFIG_POSITIONS) == set(SCHEMES)


@pytest.mark.parametrize("position", SCHEMES)
def test_a_scheme_does_what_its_row_says(position):
    model, grid = build(position=position), (2, 3)
    z, heads = torch.randn(2, 7, 16), torch.randn(2, 2, 7, 8)
    acts = dict(
        adds=not torch.equal(model.position(z, grid), z),
        rotates=not torch.equal(model.position.rotation(grid)(heads), heads),
        biases=model.blocks[0].attention.bias is not None,
    )
    assert acts == SCHEMES[position]
    assert bool(model.position.measure) == any(acts.values())
    if any(acts.values()):
        side = model.position.similarity(model.blocks).shape[-1]
        assert side in (6, 7)


@pytest.mark.parametrize("position", SCHEMES)
def test_any_size_equals_resizing_the_model(position):
    """`accept_any_size` resamples in the forward pass what `surgery.resize` resamples once."""
    model = build(position=position)
    images = torch.randn(2, 1, 16, 20)
    if model.position.fixed_grid:
        with pytest.raises(vt.InputError, match="takes one size only"):
            model.accept_any_size()
        return
    with torch.no_grad():
        expected = vt.surgery.resize(model, (16, 20)).encode(images)
        own = model(torch.ones(1, 1, 8, 12))
        model.accept_any_size()
        encoded = model.encode(images)
        assert (encoded.pooled - expected.pooled).abs().max() < 1e-5
        assert encoded.patches.shape == (2, 4, 5, 16)
        assert (model(torch.ones(1, 1, 8, 12)) - own).abs().max() < 1e-5
    for size in ((18, 20), (2, 20)):  # not a multiple of the patch, smaller than one
        with pytest.raises(vt.InputError, match=r"shape \(batch, 1, \d+, 20\)"):
            model(torch.randn(2, 1, *size))
    with pytest.raises(vt.InputError, match=r"shape \(batch, 1, 8, 12\), not \(2, 3, 8, 12\)"):
        model(torch.randn(2, 3, 8, 12))


OPTIONS = [
    dict(method="bilinear", antialias=False),
    dict(method="bilinear", antialias=False, corners=True),
    dict(antialias=False, offset=0.1),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("position", ["learned", "learned2d"])
def test_any_size_with_the_options_of_a_family(position, options):
    model, images = build(position=position), torch.randn(2, 1, 16, 20)
    with torch.no_grad():
        expected = vt.surgery.resize(model, (16, 20), **options)(images)
        assert model.accept_any_size(**options) is model
        assert (model(images) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (dict(input="video", size=(2, 8, 8), patch=(1, 4, 4)), r"input='video'"),
        (dict(embedding="resnet", patch=16, size=32), r"embedding='resnet'"),
        (dict(pool="flatten"), r"pool='flatten'"),
        (dict(position="pairwise"), r"position='pairwise'"),
        (dict(position="relative"), r"position='relative'"),
    ],
)
def test_models_that_take_one_size_only(fields, reason):
    with pytest.raises(vt.InputError, match=f"{reason}.*one size only; vitrail.surgery.resize"):
        build(**fields).accept_any_size()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(method="cubic"), r"unknown method 'cubic'"),
        (dict(corners=True), r"corners=True .* antialias=False"),
        (dict(offset=2.0), r"offset must be at least 0 and below 1, not 2.0"),
    ],
)
def test_any_size_checks_its_options(options, message):
    model = build()
    with pytest.raises(vt.InputError, match=message):
        model.accept_any_size(**options)
    assert not model.any_size
