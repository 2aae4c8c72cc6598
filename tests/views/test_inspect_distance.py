"""Attention distance, entropy and prefix weight, against plain loops; streaming in constant memory."""

import math
import weakref

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.attention_models import (
    LAYOUTS,
    build,
    clipped,
    count_alive,
    explicit_weights,
    random_images,
)
from vitrail.base.errors import InputError
from vitrail.views import distance


def by_hand(model, images):
    """Distance, entropy and prefix weight, each (B, L, k), in plain loops."""
    config = model.config
    n, (h, w), (down, across) = config.prefix, config.grid, config.patch_pixels
    centers = [((row + 0.5) * down, (column + 0.5) * across) for row in range(h) for column in range(w)]
    found = np.zeros((3, len(images), config.depth, config.heads))
    for layer, weights in enumerate(explicit_weights(model, images)):
        for image, head in np.ndindex(*weights.shape[:2]):
            far = entropy = prefix = 0.0
            for query, row in enumerate(weights[image, head, n:]):
                on_patches = row[n:] / row[n:].sum()
                far += sum(
                    weight * math.dist(centers[query], center)
                    for weight, center in zip(on_patches, centers, strict=True)
                )
                entropy -= sum(weight * math.log(weight) for weight in row if weight > 0)
                prefix += row[:n].sum()
            found[:, image, layer, head] = np.array([far, entropy, prefix]) / (h * w)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_equal_plain_loops(layout):
    model = build(layout)
    images = random_images(model, 3)
    found = distance.compute(model, images)
    expected = by_hand(model, images)
    for measure, values in zip((found.distance, found.entropy, found.prefix), expected, strict=True):
        np.testing.assert_allclose(measure.mean, values.mean(axis=0), atol=1e-4)
        np.testing.assert_allclose(measure.error, values.std(axis=0, ddof=1) / math.sqrt(3), atol=1e-4)
    assert found.max_entropy == pytest.approx(math.log(model.config.tokens))
    assert found.images == 3


def with_attention(model, change):
    """The model with its attention weights set by hand in every block."""
    return vt.edit(model, {"blocks.*.attention.weights": change})


@pytest.mark.parametrize("layout", ["class token", "registers", "oblong patches", "mean pool"])
def test_uniform_attention_has_the_uniform_distance_and_maximum_entropy(layout):
    model = build(layout)
    with with_attention(model, lambda weights: torch.full_like(weights, 1 / weights.shape[-1])):
        found = distance.compute(model, random_images(model))
    np.testing.assert_allclose(found.distance.mean, found.uniform, rtol=1e-5)
    np.testing.assert_allclose(found.entropy.mean, found.max_entropy, rtol=1e-5)
    np.testing.assert_allclose(found.prefix.mean, model.config.prefix / model.config.tokens, rtol=1e-5)


def test_attention_to_itself_has_zero_distance_and_entropy():
    model = build("registers")
    with with_attention(model, lambda weights: torch.eye(weights.shape[-1]).expand_as(weights)):
        found = distance.compute(model, random_images(model))
    assert not found.distance.mean.any()
    assert not found.entropy.mean.any()
    assert not found.prefix.mean.any()


def test_attention_to_the_right_neighbor_is_one_patch_width():
    model = build("not square")
    h, w = model.config.grid

    def shifted(weights):
        weights = torch.zeros_like(weights)
        for row in range(h):
            for column in range(w):
                weights[:, :, 1 + row * w + column, 1 + row * w + (column + 1) % w] = 1
        return weights

    with with_attention(model, shifted):
        found = distance.compute(model, random_images(model))
    # The last column attends to the first, w - 1 patches away.
    np.testing.assert_allclose(found.distance.mean, 8 * ((w - 1) + (w - 1)) / w, rtol=1e-6)


def test_attention_to_prefix_tokens_does_not_change_distances():
    """Half of all attention goes to the class token; distances are over patches only."""
    model, images = build(), random_images(build())
    plain = distance.compute(model, images)

    def halve(weights):
        weights = weights.clone()
        patches = weights[..., 1:] / weights[..., 1:].sum(-1, keepdim=True)
        return torch.cat([torch.full_like(weights[..., :1], 0.5), patches / 2], dim=-1)

    with vt.edit(model, {"blocks.0.attention.weights": halve}):
        found = distance.compute(model, images)
    np.testing.assert_allclose(found.distance.mean[0], plain.distance.mean[0], rtol=1e-5)
    np.testing.assert_allclose(found.prefix.mean[0], 0.5, rtol=1e-6)


def test_a_head_that_attends_to_no_patch_has_no_distance():
    model = build()

    def to_class_token(weights):
        weights = weights.clone()
        weights[:, 1] = 0
        weights[:, 1, :, 0] = 1
        return weights

    with with_attention(model, to_class_token):
        found = distance.compute(model, random_images(model))
    assert np.isnan(found.distance.mean[:, 1]).all()
    assert np.isfinite(found.distance.mean[:, [0, 2, 3]]).all()
    assert (found.prefix.mean[:, 1] == 1).all()
    assert "nan" not in distance.caption(found)
    assert not clipped(distance.draw(found))


def test_result_does_not_depend_on_the_batch_size():
    model = build("registers")
    images = random_images(model, 7)
    whole = distance.compute(model, images)
    for cut in (1, 3, 7):
        parts = distance.compute(model, (part for part in images.split(cut)))
        assert parts.images == 7
        for name in ("distance", "entropy", "prefix"):
            np.testing.assert_allclose(getattr(parts, name).mean, getattr(whole, name).mean, rtol=1e-5)
            np.testing.assert_allclose(
                getattr(parts, name).error, getattr(whole, name).error, rtol=1e-3, atol=1e-9
            )


def test_weights_of_one_block_are_alive_at_a_time():
    model = build(depth=6)
    images, seen = random_images(model, 3), []
    shape = (3, model.config.heads, model.config.tokens, model.config.tokens)
    most = 0

    def watch(weights):
        nonlocal most
        assert all(one() is None for one in seen), "the weights of an earlier block are still alive"
        seen.append(weakref.ref(weights))
        most = max(most, count_alive(shape))
        return weights

    with vt.edit(model, {"blocks.*.attention.weights": watch}):
        distance.compute(model, [images] * 2)
    assert len(seen) == 12
    assert most <= 3  # scores, weights, and the view passed to the hook
    assert count_alive(shape) == 0


def test_the_model_is_unchanged_afterwards():
    model = build().train()
    images = random_images(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        logits = model.eval()(images)
    model.train()
    distance.compute(model, images)
    assert model.training
    assert all(block.attention.explicit == 0 for block in model.blocks)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model.eval()(images), logits)


def test_invalid_inputs_are_rejected():
    model = build()
    with pytest.raises(InputError, match="at least one image"):
        distance.compute(model, [])
    with pytest.raises(InputError, match=r"Every batch must be a tensor.*tuple"):
        distance.compute(model, [(random_images(model), torch.zeros(2))])
    with pytest.raises(InputError, match="batch"):
        distance.compute(model, random_images(model)[0])
    with pytest.raises(InputError, match="Attention weights must be finite"):
        distance.compute(model, random_images(model) * torch.nan)
    with pytest.raises(InputError, match="shape"):
        distance.compute(model, torch.zeros(1, 1, 8, 8))
    text = vt.ViT(
        vt.ViTConfig(width=8, depth=1, heads=1, input="text", vocabulary=9, patch=1, size=4, classes=2)
    )
    with pytest.raises(InputError, match="takes text"):
        distance.compute(text, torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    "changes",
    [{}, dict(class_token=False, pool="mean"), dict(depth=1, heads=1), dict(depth=32, heads=16)],
    ids=str,
)
def test_figure_is_legible(changes):
    model = build(**changes)
    figure = distance.draw(distance.compute(model, random_images(model, 1)))
    assert len(figure.axes) == 2 + (model.config.prefix > 0)
    assert all(tick == int(tick) for axis in figure.axes for tick in axis.get_xticks())
    assert not clipped(figure)


def make_result(means, uniform=10.0, prefix=0.25):
    """A result with these mean distances by layer and head."""
    means = np.array(means, dtype=float)
    measures = {
        name: distance.Measure(values, np.zeros_like(means))
        for name, values in dict(distance=means, entropy=means * 0 + 1.5, prefix=means * 0 + prefix).items()
    }
    return distance.Distances(**measures, uniform=uniform, max_entropy=3.0, prefix_count=1, images=4)


def test_caption_agrees_with_the_paper():
    text = distance.caption(make_result([[1.0, 9.5], [6.0, 8.0], [9.0, 10.0]]))
    assert "and 4 images" in text
    assert "uniform attention would give 10.0 pixels" in text
    assert (
        "The mean distance grows with depth, as in the ViT paper: from 5.2 pixels in layer 0 to 9.5 in layer 2"
        in text
    )
    assert "correlation with depth 0.99" in text
    assert (
        "In layer 0, head distances range from 10% to 95% of the uniform distance: 1 of 2 heads are" in text
    )
    assert "local and 1 global (local: below 50%, global: above 90%)" in text
    assert (
        "In layer 2, head distances range from 90% to 100% of the uniform distance: 0 of 2 heads are" in text
    )
    assert "also finds both kinds" in text
    assert "entropy is 50% of its maximum, and prefix tokens receive 25.0%" in text


def test_caption_disagrees_with_the_paper():
    text = distance.caption(make_result([[9.0, 9.5], [6.0, 8.0], [4.0, 3.0]]))
    assert (
        "does not grow with depth here: from 9.2 pixels in layer 0 to 3.5 in layer 2, correlation with depth -0.99"
        in text
    )
    assert "0 of 2 heads are local and 1 global (local" in text
    assert "finds both kinds in the lowest layers, here some are global and none is local." in text
    assert "too few layers" in distance.caption(make_result([[9.0], [4.0]]))
    assert "8.0 pixels in the only layer" in distance.caption(make_result([[8.0]]))
    assert "the same in every layer" in distance.caption(make_result([[8.0]] * 3))


def test_caption_is_about_the_lowest_and_the_highest_third_of_the_layers():
    """As in DeiT-Ti, whose layer 0 has neither kind and whose next layers have local heads."""
    means = [[6.0, 7.0], [2.0, 5.5], [6.0, 8.0], [8.0, 8.5], [9.5, 8.9], [9.6, 9.7]]
    text = distance.caption(make_result(means))
    assert "In layers 0 to 1, head distances range from 20% to 70% of the uniform distance: 1 of 4" in text
    assert "here some are local and none is global." in text
    assert "In layers 4 to 5, head distances range from 89% to 97%" in text
    assert "0 of 4 heads are local and 3 global." in text
    assert "here there is neither." not in text
    assert "here there is neither." in distance.caption(make_result([[6.0, 7.0], [9.0, 9.0]]))
    assert "layer 0" in (only := distance.caption(make_result([[8.0]])))
    assert only.count("head distances range") == 1


def test_table():
    header, rows = distance.table(make_result([[1.0, 9.5], [6.0, 8.0]]))
    assert len(rows) == 4
    assert all(len(row) == len(header) for row in rows)
    assert dict(zip(header, rows[1], strict=True)) == {
        "layer": 0,
        "head": 1,
        "distance_pixels": 9.5,
        "distance_error": 0.0,
        "distance_of_uniform": 0.95,
        "entropy_nats": 1.5,
        "entropy_error": 0.0,
        "entropy_of_maximum": 0.5,
        "prefix_fraction": 0.25,
        "prefix_error": 0.0,
        "images": 4,
    }
