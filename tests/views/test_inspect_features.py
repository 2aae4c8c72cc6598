"""Patch features: components as colors, foreground, norms and cosine similarity."""

import math

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.figure_checks import LAYOUTS, build, check_figure, random_images
from vitrail.views import features


def plain_otsu(values):
    """Otsu's method by trying every threshold."""
    ordered = sorted(values)
    best, cut = 0.0, ordered[-1]
    for n in range(1, len(ordered)):
        low, high = ordered[:n], ordered[n:]
        between = n * len(high) * (np.mean(high) - np.mean(low)) ** 2
        if low[-1] < high[0] and between > best:
            best, cut = between, (low[-1] + high[0]) / 2
    return cut


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_a_plain_computation(layout):
    model = build(**LAYOUTS[layout]).train()
    images = random_images(model)
    found = features.compute(model, images.images)
    assert model.training
    model.eval()
    depth, prefix = model.config.depth, model.config.prefix
    with torch.no_grad(), vt.record(model, "blocks.*.out") as tape:
        tokens = model.encode(images.images).patches.double().numpy()
    h, w = model.config.grid
    flat = tokens.reshape(-1, tokens.shape[-1])
    flat = flat - flat.mean(axis=0)
    _, sizes, directions = np.linalg.svd(flat, full_matrices=False)
    np.testing.assert_allclose(found.explained_variance, (sizes**2 / (sizes**2).sum())[:3], rtol=1e-6)
    for n in range(3):
        direction = directions[n] * np.sign(max(directions[n], key=abs))
        values = flat @ direction
        low, high = np.quantile(values, [0.01, 0.99])
        expected = ((values - low) / (high - low)).clip(0, 1)
        np.testing.assert_allclose(found.colors[..., n].ravel(), expected, atol=1e-5)
    middle = tokens[1, h // 2, w // 2]
    for y in range(h):
        for x in range(w):
            one = tokens[1, y, x]
            cosine = one @ middle / math.sqrt(one @ one * (middle @ middle))
            assert found.cosine[1, y, x] == pytest.approx(cosine, abs=1e-9)
    for index in range(depth):
        lengths = tape[f"blocks.{index}.out"][:, prefix:].double().norm(dim=-1).unflatten(1, (h, w))
        np.testing.assert_allclose(found.norms[index], lengths.numpy(), rtol=1e-6)
    if layout in ("oblong", "gray", "many-channels"):
        texts = check_figure(features.draw(found, images))
        assert {"image", "foreground", "norm", "cosine"} <= set(texts)
    header, rows = features.table(found)
    assert len(rows) == depth
    assert {len(row) for row in rows} == {len(header)}


def test_the_reference_patch_can_be_chosen():
    model = build(depth=3)
    images = random_images(model)
    found = features.compute(model, images.images, patch=(0, -1))
    with torch.no_grad():
        tokens = model.eval().encode(images.images).patches.double()
    cosine = torch.cosine_similarity(tokens, tokens[:, 0, 2][:, None, None], dim=-1)
    np.testing.assert_allclose(found.cosine, cosine, atol=1e-9)
    ring = features.draw(found, images).axes[4 * 4].lines[0]  # fifth row of three images and a bar
    assert (list(ring.get_xdata()), list(ring.get_ydata())) == ([2], [0])


@pytest.mark.parametrize("seed", range(5))
def test_otsu_equals_trying_every_threshold(seed):
    rng = np.random.default_rng(seed)
    values = np.concatenate([rng.normal(0, 1, 30), rng.normal(6, 1, 11)]).round(1)
    assert features._otsu_threshold(values) == pytest.approx(plain_otsu(values))
    for equal in (np.full(5, 0.1), np.full(1, 0.1)):
        assert not (equal > features._otsu_threshold(equal)).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_central_object_is_the_foreground_for_either_sign(sign):
    first = np.random.default_rng(0).normal(0, 0.1, (2, 6, 7))
    first[:, 2:4, 2:5] += 5
    mask = features._find_foreground(sign * first)
    expected = np.zeros((2, 6, 7), dtype=bool)
    expected[:, 2:4, 2:5] = True
    assert (mask == expected).all()
    assert not features._find_foreground(0 * first).any()


def test_at_a_tie_the_smaller_side_is_the_foreground():
    first = np.array([[[5.0, 0, 0.1, 0.2]]])
    for sign in (1, -1):
        assert features._find_foreground(sign * first).ravel().tolist() == [True, False, False, False]


def test_tokens_of_large_norm_are_artifacts():
    model = build(size=64, block="pre-norm")
    images = random_images(model).images
    plain = features.compute(model, images)
    token = model.config.prefix + 8 * 3 + 5

    def lengthen(z):
        longer = z.clone()
        longer[1, token] *= 30
        return longer

    with vt.edit(model, {"blocks.1.out": lengthen}):
        found = features.compute(model, images)
    assert not plain.artifacts[1].any()
    assert np.argwhere(found.artifacts).tolist() == [[1, 1, 3, 5]]
    assert "1 of 192 tokens are high-norm artifacts" in features.caption(found)
    assert features.table(found)[1][1][-1] == 1
    crosses = [
        line
        for axis in features.draw(found, random_images(model)).axes
        for line in axis.lines
        if line.get_marker() == "x"
    ]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in crosses] == [([5], [3])]


def test_artifact_limit_by_hand():
    norms = np.array([1.0, 2, 3, 4, 100])
    assert features._artifact_limit(norms) == pytest.approx(3 + 5 * 1.4826 * 1)
    assert features._artifact_limit(np.full(9, 10.0)) == pytest.approx(10.5)  # equal norms have no outliers


@pytest.mark.parametrize(
    ("fields", "count"), [(dict(size=8), 1), (dict(size=(8, 72)), 2), (dict(depth=24, size=(80, 24)), 10)]
)
def test_unusual_sizes_are_drawn(fields, count):
    model = build(**fields)
    images = random_images(model, count)
    found = features.compute(model, images.images)
    texts = check_figure(features.draw(found, images))
    assert (count > 8) == any("the first 8 of 10 images" in text for text in texts)
    assert features.caption(found)


def test_invalid_inputs_are_rejected():
    model = build()
    images = random_images(model).images
    with pytest.raises(vt.InputError, match=r"patch column must be an integer from 0 to 2.*not 3"):
        features.compute(model, images, patch=(0, 3))
    with pytest.raises(vt.InputError, match="3 x 3 patch grid, not 4"):
        features.compute(model, images, patch=4)
    with pytest.raises(vt.InputError, match="batch"):
        features.compute(model, images[0])
    with torch.no_grad():
        model.norm.bias[0] = torch.nan
    with pytest.raises(vt.InputError, match="tokens must be finite"):
        features.compute(model, images)
