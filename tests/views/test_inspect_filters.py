"""Principal components of the patch embedding (paper, Fig. 7 left)."""

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.figure_checks import LAYOUTS, build, check_figure
from vitrail.views import filters


def plain_components(weight):
    """Principal components by singular value decomposition."""
    flat = weight.reshape(len(weight), -1).astype(np.float64)
    _, values, directions = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    signs = [1 if max(row, key=abs) > 0 else -1 for row in directions]
    return directions * np.array(signs)[:, None], values**2 / (values**2).sum()


@pytest.mark.parametrize(
    ("width", "patch"), [(32, 8), (64, 4), (12, 4)]
)  # fewer filters than pixels, and more
def test_components_equal_singular_vectors(width, patch):
    model = build(width=width, patch=patch)
    found = filters.compute(model)
    directions, explained = plain_components(model.tokens.proj.weight.detach().numpy())
    count = min(28, width - 1, 3 * patch * patch)
    assert found.components.shape == (count, 3, patch, patch)
    np.testing.assert_allclose(found.components.reshape(count, -1), directions[:count], atol=1e-5)
    np.testing.assert_allclose(found.explained_variance, explained[:count], rtol=1e-6)
    assert found.needed == next(n for n in range(1, 99) if explained[:n].sum() >= 0.9)


def test_filters_of_two_patterns_have_two_components():
    model = build(channels=1, patch=4, size=16, width=64)
    ramp = torch.linspace(-1, 1, 4).expand(4, 4)
    with torch.no_grad():
        amounts = torch.randn(64, 2) * torch.tensor([3.0, 1.0])
        patterns = torch.stack([ramp, ramp.T])
        model.tokens.proj.weight.copy_(torch.einsum("dn,nhw->dhw", amounts, patterns)[:, None] + 5)
    found = filters.compute(model)
    assert len(found.explained_variance) == 2
    assert found.needed < found.needed_by_noise
    leading = found.components[0, 0]
    assert abs((leading * ramp.numpy()).sum()) / np.linalg.norm(ramp) > 0.98
    assert leading.max() == np.abs(leading).max()
    assert found.smoothness.min() > 0.3
    assert "a few patterns, as in the ViT paper" in filters.caption(found)


def test_smoothness_by_hand():
    tile = np.random.default_rng(0).standard_normal((2, 3, 5))
    products = [tile[c, y, x] * tile[c, y + 1, x] for c in range(2) for y in range(2) for x in range(5)]
    products += [tile[c, y, x] * tile[c, y, x + 1] for c in range(2) for y in range(3) for x in range(4)]
    assert filters.smoothness(tile) == pytest.approx(np.mean(products) / np.mean(tile**2))
    assert filters.smoothness(np.full((1, 4, 4), 0.3)) == pytest.approx(1)
    assert np.isnan(filters.smoothness(np.ones((3, 1, 1))))


def test_signs_do_not_depend_on_the_order_of_the_filters():
    model = build()
    before = filters.compute(model).components
    with torch.no_grad():
        model.tokens.proj.weight.copy_(model.tokens.proj.weight.flip(0))
    np.testing.assert_allclose(filters.compute(model).components, before, atol=1e-5)


def test_a_stem_is_shown_by_its_first_convolution():
    model = build(embedding="conv")
    found = filters.compute(model)
    directions, _ = plain_components(model.tokens.stem.conv1.weight.detach().numpy())
    assert found.components.shape == (15, 3, 3, 3)
    np.testing.assert_allclose(found.components.reshape(15, -1), directions[:15], atol=1e-5)
    assert "16 filters of the stem's first convolution" in filters.caption(found)


def test_a_resnet_stem_is_shown_with_standardized_weights():
    with torch.device("meta"):  # the rest of the stem is large and not used
        model = build(embedding="resnet", patch=16, size=32)
    model.tokens.stem.root.conv.weight = torch.nn.Parameter(torch.randn(64, 3, 7, 7))
    before = filters.compute(model).components
    with torch.no_grad():
        scale, shift = 1 + 4 * torch.rand(64, 1, 1, 1), torch.randn(64, 1, 1, 1)
        model.tokens.stem.root.conv.weight.mul_(scale).add_(shift)  # removed by standardization
    np.testing.assert_allclose(filters.compute(model).components, before, atol=1e-3)


@pytest.mark.parametrize("layout", ["class", "oblong", "hybrid", "gray", "many-channels"])
def test_every_layout_is_drawn(layout):
    fields = LAYOUTS[layout] if layout == "class" else {**LAYOUTS[layout], "width": 8}
    model = build(**fields).train()
    found = filters.compute(model)
    assert model.training
    texts = check_figure(filters.draw(found))
    assert filters._percent(found.explained_variance[0]) in texts
    assert (model.config.channels == 3) == any("mid gray is 0" in text for text in texts)
    bar = {1: "weight", 3: None}.get(model.config.channels, "weight, mean of 5 channels")
    assert bar is None or bar in texts
    header, rows = filters.table(found)
    assert len(rows) == len(found.explained_variance)
    assert {len(row) for row in rows} == {len(header)}
    assert f"takes {found.needed} components, and {found.needed_by_noise} for random" in filters.caption(
        found
    )


def test_colors_are_gray_at_zero_and_keep_the_sign():
    found = filters.compute(build())
    colors = filters.as_colors(found)
    assert colors.max() == 1
    assert colors.min() >= 0
    weights = found.components.transpose(0, 2, 3, 1)
    assert (np.sign(colors - 0.5) == np.sign(weights)).all()


def test_invalid_models_are_rejected():
    model = build()
    with torch.no_grad():
        model.tokens.proj.weight.zero_()
    with pytest.raises(vt.InputError, match="All 32 filters are equal"):
        filters.compute(model)
    with torch.no_grad():
        model.tokens.proj.weight[0, 0, 0, 0] = torch.nan
    with pytest.raises(vt.InputError, match="filters must be finite"):
        filters.compute(model)
    text = vt.ViT(vt.ViTConfig(width=8, depth=1, heads=2, patch=1, size=4, input="text", vocabulary=5))
    with pytest.raises(vt.InputError, match="takes text"):
        filters.compute(text)


def test_equal_rows_have_no_components():
    components, explained = filters.principal(np.full((5, 3), 0.1))
    assert components.shape == (0, 3)
    assert explained.shape == (0,)
