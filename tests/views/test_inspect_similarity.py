"""Linear CKA between layers."""

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.figure_checks import LAYOUTS, build, check_figure, random_images
from vitrail.views import similarity


def cka_by_grams(x, y):
    """The definition: HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with K = X X^T and L = Y Y^T."""
    n = len(x)
    center = np.eye(n) - np.ones((n, n)) / n

    def hsic(a, b):
        return np.trace(a @ center @ b @ center) / (n - 1) ** 2

    k, l = x @ x.T, y @ y.T  # noqa: E741
    return hsic(k, l) / np.sqrt(hsic(k, k) * hsic(l, l))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_the_definition(layout):
    model = build(**LAYOUTS[layout]).train()
    images = random_images(model)
    found = similarity.compute(model, images.images)
    assert model.training
    model.eval()
    n, depth = model.config.prefix, model.config.depth
    with torch.no_grad(), vt.record(model, "embed", "blocks.*.out", "encoded") as tape:
        model(images.images)
    layers = ["embed", *(f"blocks.{index}.out" for index in range(depth)), "encoded"]
    rows = [tape[name][:, n:].flatten(0, 1).double().numpy() for name in layers]
    assert found.names == ["embed", *map(str, range(depth)), "final"]
    expected = [[cka_by_grams(x, y) for y in rows] for x in rows]
    np.testing.assert_allclose(found.cka, expected, atol=1e-9)
    assert (found.rows, found.width) == (3 * model.config.patches, 32)
    if layout in ("class", "one-layer"):
        assert {"embed", "final", "CKA"} <= set(check_figure(similarity.draw(found)))
    header, table = similarity.table(found)
    assert header == ["layer", *found.names]
    assert len(table) == depth + 2
    assert {len(row) for row in table} == {len(header)}


def test_cka_ignores_rotation_and_scale_and_of_noise_is_as_in_the_caption():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 20))
    rotation, _ = np.linalg.qr(rng.standard_normal((20, 20)))
    noise = rng.standard_normal((400, 20))
    features = [one - one.mean(axis=0) for one in (x, 7 * x @ rotation + 3, noise)]
    cka = similarity.linear_cka(features)
    assert cka[0, 1] == pytest.approx(1)
    assert cka[0, 2] == pytest.approx(20 / 420, abs=0.02)


def test_labels_of_deep_models_do_not_overlap():
    found = similarity.Similarity(["embed", *map(str, range(32)), "final"], np.full((34, 34), 0.5), 100, 8)
    texts = check_figure(similarity.draw(found))
    assert {"embed", "final", "0"} <= set(texts)
    assert "31" not in texts  # would overlap `final`


def test_caption_reports_the_numbers():
    cka = np.array([[1, 0.9, 0.3], [0.9, 1, 0.5], [0.3, 0.5, 1]])
    caption = similarity.caption(similarity.Similarity(["embed", "0", "final"], cka, 90, 10))
    assert "Consecutive layers have a CKA of 0.70 on average" in caption
    assert "from block 0 to final (0.50)" in caption
    assert "least similar layers are embed and final (0.30)" in caption
    assert "noise of this size would have 0.10" in caption


def test_vectors_that_are_all_equal_have_no_similarity():
    model = build(depth=1)
    with vt.edit(model, {"embed": torch.zeros_like}):
        found = similarity.compute(model, random_images(model).images)
    assert np.isnan(found.cka[0]).all()
    assert "In embed" in similarity.caption(found)
    check_figure(similarity.draw(found))


def test_invalid_inputs_are_rejected():
    model = build()
    images = random_images(model, 1).images
    alone = build(size=8)
    with pytest.raises(vt.InputError, match="only 1 patch"):
        similarity.compute(alone, random_images(alone, 1).images)
    with pytest.raises(vt.InputError, match="batch"):
        similarity.compute(model, images[0])
    with torch.no_grad():
        model.blocks[1].mlp.fc1.bias[0] = torch.nan
    with pytest.raises(vt.InputError, match="The vectors of 1 must be finite"):
        similarity.compute(model, images)
