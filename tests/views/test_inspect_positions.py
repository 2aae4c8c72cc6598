"""Similarity of position embeddings (ViT paper, Fig. 7 center and Fig. 10)."""

import math

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.figure_checks import LAYOUTS, build, check_figure
from vitrail.views import positions

KINDS = [
    "learned",
    "learned2d",
    "sincos1d",
    "sincos2d",
    "rotary",
    "rotary-dinov3",
    "rotary-eva02",
    "rotary-pe",
]
KINDS += ["pairwise", "relative"]


def build_random(**fields):
    model = build(**fields)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(
        sum(x * x for x in a) * sum(y * y for y in b)
    )


@pytest.mark.parametrize("position", ["learned", "learned2d", "sincos1d", "sincos2d"])
@pytest.mark.parametrize(
    "prefix", [{}, dict(registers=2, rows="class"), dict(class_token=False, pool="mean")]
)
def test_added_positions_are_compared_by_cosine(position, prefix):
    model = build_random(position=position, size=(16, 24), **prefix)  # 2 x 3 patches
    found = positions.compute(model)
    rows = model.position.rows(model.config.grid).tolist()
    patches = rows[-6:]
    for i in range(6):
        for j in range(6):
            assert found.similarity[i, j] == pytest.approx(cosine(patches[i], patches[j]), abs=1e-6)
    if prefix.get("class_token") is False or position == "sincos2d":  # none, or a row of zeros
        assert found.class_row is None
    else:
        expected = [cosine(rows[0], patch) for patch in patches]
        np.testing.assert_allclose(found.class_row, expected, atol=1e-6)


@pytest.mark.parametrize("position", ["rotary", "rotary-dinov3"])
def test_rotary_positions_are_compared_by_the_product_of_rotated_vectors(position):
    model = build(position=position, size=(24, 40))
    found = positions.compute(model)
    ones = torch.ones(1, 1, model.config.tokens, model.config.d)
    rotated = model.position.rotation(model.config.grid)(ones)[0, 0, 1:]
    np.testing.assert_allclose(found.similarity, rotated @ rotated.T / model.config.d, atol=1e-5)
    assert found.class_row is None
    np.testing.assert_allclose(np.diagonal(found.similarity), 1, atol=1e-6)


@pytest.mark.parametrize("position", ["pairwise", "relative"])
def test_a_bias_is_selected_by_head_or_averaged(position):
    model = build_random(position=position)
    tables = torch.stack([block.attention.bias() for block in model.blocks]).detach().numpy()
    one = positions.compute(model, head=-1).similarity
    np.testing.assert_allclose(one, tables[:, 1].mean(0)[1:, 1:], atol=1e-6)
    assert positions.compute(model, head=-1).where == "mean over blocks, head 1"
    mean = positions.compute(model)
    np.testing.assert_allclose(mean.similarity, tables.mean((0, 1))[1:, 1:], atol=1e-6)
    np.testing.assert_allclose(mean.class_row, tables.mean((0, 1))[0, 1:], atol=1e-6)


def test_nearness_by_plain_loops():
    grid, rng = (4, 6), np.random.default_rng(0)
    similarity = rng.standard_normal((24, 24))
    found = positions._nearness(similarity, grid)
    patches_ = [(y, x) for y in range(4) for x in range(6)]
    pairs = [
        (math.dist(a, b), a[0] == b[0] or a[1] == b[1], similarity[i, j])
        for i, a in enumerate(patches_)
        for j, b in enumerate(patches_)
        if i != j
    ]
    distance, line, value = (np.array(column) for column in zip(*pairs, strict=True))
    assert found["correlation"] == pytest.approx(np.corrcoef(distance, value)[0, 1])
    assert found["same_line"] == pytest.approx(value[line].mean())
    assert found["other"] == pytest.approx(value[~line].mean())
    excess = [
        value_here - value[~line & (distance.round() == round(step))].mean()
        for step, here, value_here in pairs
        if here and step >= 2 and (~line & (distance.round() == round(step))).any()
    ]
    assert found["line_excess"] == pytest.approx(np.mean(excess))


def test_line_excess_is_zero_for_plain_decay_and_one_for_a_cross():
    patches_ = np.stack(np.indices((9, 9)), axis=-1).reshape(-1, 2)
    offsets = np.abs(patches_[:, None] - patches_)
    decay = positions._nearness(-np.hypot(*offsets.transpose(2, 0, 1)), (9, 9))
    assert decay["correlation"] == pytest.approx(-1)
    assert decay["same_line"] > decay["other"]  # without any lines, so this number alone is not enough
    assert abs(decay["line_excess"]) < 0.1 * decay["spread"]
    cross = positions._nearness((offsets.min(axis=-1) == 0).astype(float), (9, 9))
    assert cross["line_excess"] == pytest.approx(1)


def make_result(similarity, grid):
    fields = dict(position="learned", measure="cosine similarity", class_row=None, where="")
    return positions.Positions(
        grid=grid, similarity=similarity, **fields, **positions._nearness(similarity, grid)
    )


def test_the_caption_agrees_with_the_paper_only_where_the_numbers_do():
    patches_ = np.stack(np.indices((5, 5)), axis=-1).reshape(-1, 2)
    distance = np.hypot(*np.abs(patches_[:, None] - patches_).transpose(2, 0, 1))
    near = positions.caption(make_result(1 / (1 + distance), (5, 5)))
    assert "nearby patches have more similar positions, as in the ViT paper" in near
    far = positions.caption(make_result(distance / 9, (5, 5)))
    assert "distant patches have more similar positions, unlike in the ViT paper" in far
    noise = positions.caption(make_result(np.random.default_rng(0).standard_normal((25, 25)), (5, 5)))
    assert "do not clearly have more similar positions, unlike in the ViT paper" in noise
    assert "rows and columns do not stand out" in noise
    even = positions.caption(make_result(np.ones((25, 25)), (5, 5)))
    assert "no correlation" in even


@pytest.mark.parametrize(
    ("position", "size"), [*((kind, (24, 40)) for kind in KINDS), ("learned", 8), ("relative", (8, 40))]
)
def test_every_kind_is_drawn(position, size):
    model = build_random(position=position, size=size).train()
    found = positions.compute(model)
    assert model.training
    texts = check_figure(positions.draw(found))
    assert ("class token" in texts) == (found.class_row is not None)
    caption = positions.caption(found)
    assert np.isnan(found.correlation) or f"is {found.correlation:.2f}:" in caption
    header, rows = positions.table(found)
    assert len(rows) == len(found.similarity) * (len(found.similarity) + (found.class_row is not None))
    assert {len(row) for row in rows} == {len(header)}


@pytest.mark.parametrize("layout", ["mean", "registers", "attention", "distilled"])
def test_every_layout_is_drawn(layout):
    found = positions.compute(build(**LAYOUTS[layout]))
    assert found.similarity.shape == (math.prod(found.grid),) * 2
    check_figure(positions.draw(found))


def test_of_a_large_grid_only_some_tiles_are_drawn():
    found = positions.compute(build(size=(8 * 37, 8 * 14), position="sincos2d"))
    texts = check_figure(positions.draw(found))
    assert {"0", "6", "36"} <= set(texts)
    assert "35" not in texts
    assert "Only 7 of 37 rows and 14 of 14 columns" in positions.caption(found)
    assert "Only" not in positions.caption(positions.compute(build(size=8 * 14)))


def test_tiles_are_arranged_like_the_patches():
    model = build_random(size=(16, 24))
    found = positions.compute(model)
    axis = positions.draw(found).axes[0]
    drawn = np.ma.filled(axis.images[0].get_array().astype(float), np.nan)
    assert drawn.shape == (2 * 3 - 1, 3 * 4 - 1)
    np.testing.assert_allclose(drawn[3:5, 4:7], found.similarity[4].reshape(2, 3))  # row 1, column 1
    assert np.isnan(drawn[2]).all()


def test_invalid_inputs_are_rejected():
    with pytest.raises(vt.InputError, match="position='none'"):
        positions.compute(build(position="none"))
    with pytest.raises(vt.InputError, match="all heads share"):
        positions.compute(build(), head=0)
    with pytest.raises(vt.InputError, match=r"head must be an integer from 0 to 1.*not 2"):
        positions.compute(build(position="relative"), head=2)
    broken = build()
    with torch.no_grad():
        broken.position.table[0, 0] = torch.inf
    with pytest.raises(vt.InputError, match="must be finite"):
        positions.compute(broken)
