"""Attribution maps, against plain loops and a model with known attribution, in every layout."""

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.answer_models import (
    LAYOUTS,
    assert_legible,
    build,
    images_for,
    log_p,
    one_patch_model,
    painted,
    to_pixels,
)
from vitrail.views import attribution, rollout


@pytest.mark.parametrize("name", LAYOUTS)
def test_occlusion_equals_covering_each_patch_in_a_loop(name):
    model = build(name)
    images = images_for(model)
    found = attribution.compute(model, images, methods="occlusion")
    target = model(images).argmax(1)
    assert found.target.tolist() == target.tolist()
    positions = list(np.ndindex(*model.config.grid))
    for n, image in enumerate(images):
        covered = torch.stack([painted(image, position, model.config.patch_pixels) for position in positions])
        drop = log_p(model, images, target)[n] - log_p(model, covered, [target[n]] * len(positions))
        assert found.maps["occlusion"][n].ravel() == pytest.approx(drop.numpy(), abs=2e-5)


def test_occlusion_takes_one_forward_per_patch_and_one_for_the_image():
    model = build("oblong")
    batches = []
    model.register_forward_pre_hook(lambda module, args: batches.append(len(args[0])))
    attribution.compute(model, images_for(model, 3), methods=["occlusion"])
    assert sum(batches) == 3 * (model.config.patches + 1)
    assert len(batches) < 6


def test_the_target_is_used():
    model = build()
    images = images_for(model)
    found = attribution.compute(model, images, methods=["occlusion"], target=[3, 0])
    covered = torch.stack([painted(one, (1, 2), (8, 8)) for one in images])
    drop = log_p(model, images, [3, 0]) - log_p(model, covered, [3, 0])
    assert found.maps["occlusion"][:, 1, 2] == pytest.approx(drop.numpy(), abs=1e-5)
    assert found.probability == pytest.approx(log_p(model, images, [3, 0]).exp().numpy(), abs=1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradient_attention_is_the_gradient_rollout_of_the_class(name):
    """test_inspect_rollout.py compares that with finite differences. More images than one backward pass."""
    model = build(name)
    images = images_for(model, 10)
    target = torch.arange(10) % 5
    found = attribution.compute(model, images, methods="gradient-attention", target=target)
    expected = rollout.compute(model, images, method="gradient", target=target).maps[0]
    assert found.maps["gradient-attention"] == pytest.approx(expected, abs=1e-6)
    assert found.maps["gradient-attention"].shape == (10, *model.config.grid)


def test_gradient_attention_is_not_empty_where_the_mean_over_heads_and_queries_is():
    """With mean pooling the mean over heads and queries is often negative for every patch."""
    model = build("mean pool")
    images = 0.05 * images_for(model, 60) + torch.linspace(-2, 2, 60)[:, None, None, None]
    tap = f"blocks.{model.config.depth - 1}.attention.weights"
    with vt.record(model, tap) as tape:
        best = torch.log_softmax(model(images), dim=1).max(dim=1).values
        (gradient,) = torch.autograd.grad(best.sum(), tape[tap])
    mean_first = (tape[tap] * gradient).mean(dim=(1, 2)).relu()
    assert (mean_first == 0).all(dim=1).sum() > 5
    found = attribution.compute(model, images, methods="gradient-attention")
    assert (found.maps["gradient-attention"] > 0).any(axis=(1, 2)).all()


def test_caption_names_empty_maps():
    model = build()
    with torch.no_grad():
        model.head.weight.zero_()
    found = attribution.compute(model, images_for(model), methods="gradient-attention")
    assert "gradient-attention is zero everywhere for 2 of 2" in attribution.caption(found)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "hybrid stem"])
def test_integrated_gradients_sum_to_the_change(name):
    model = build(name)
    images = images_for(model)
    found = attribution.compute(model, images, methods="integrated", steps=200)
    baseline = images.clone()
    (h, w), (down, across) = model.config.grid, model.config.patch_pixels
    baseline[:, :, : h * down, : w * across] = 0
    change = log_p(model, images, found.target) - log_p(model, baseline, found.target)
    assert found.change == pytest.approx(change.numpy(), abs=1e-5)
    assert found.maps["integrated"].sum(axis=(1, 2)) == pytest.approx(change.numpy(), abs=0.05)
    assert found.gap == pytest.approx(found.maps["integrated"].sum(axis=(1, 2)) - found.change, abs=1e-6)


def test_caption_warns_if_integrated_gradients_do_not_sum_to_the_change():
    """The norms of a stem divide by the contrast, so almost all of the change is at the end of the path."""
    model = build("hybrid stem")
    found = attribution.compute(model, images_for(model), methods="integrated")
    assert np.abs(found.gap).mean() > 0.1 * np.abs(found.change).mean()
    assert "unreliable" in attribution.caption(found)
    model = build()
    found = attribution.compute(model, images_for(model), methods="integrated")
    assert "unreliable" not in attribution.caption(found)


def test_integrated_gradients_equal_a_loop_over_points_that_crowd_at_the_baseline():
    model = build("oblong")
    images = images_for(model, 3)
    found = attribution.compute(model, images, methods="integrated", steps=5)
    for n, image in enumerate(images):
        total = torch.zeros_like(image)
        for step in range(5):
            t = (step + 0.5) / 5
            point = (t**4 * image).requires_grad_()
            log_probability = torch.log_softmax(model(point[None]), dim=1)[0, found.target[n]]
            total += 4 * t**3 / 5 * torch.autograd.grad(log_probability, point)[0]
        map_ = (image * total).sum(0)
        for row, column in np.ndindex(7, 9):
            here = map_[8 * row : 8 * row + 8, 8 * column : 8 * column + 8].sum()
            assert found.maps["integrated"][n, row, column] == pytest.approx(float(here), abs=1e-5)


def test_integrated_gradients_of_a_change_that_happens_next_to_the_baseline():
    """LayerNorm amplifies any deviation from an image of one color; equally spaced points are off by more than the change."""
    model = build("oblong")
    with torch.no_grad():
        model.tokens.proj.weight.mul_(10)
    found = attribution.compute(model, images_for(model, 3), methods="integrated")
    assert np.abs(found.gap).mean() < 0.1 * np.abs(found.change).mean()


@pytest.mark.parametrize("method", ["occlusion", "integrated"])
def test_only_the_patch_that_the_model_uses_has_attribution(method):
    model = one_patch_model((1, 2))
    images = torch.rand(2, 1, 12, 12) + 0.5
    found = attribution.compute(model, images, methods=method).maps[method]
    change = torch.log_softmax(model(images), 1)[:, 1] - np.log(0.5)
    assert found[:, 1, 2] == pytest.approx(change.detach().numpy(), abs=1e-3)
    found[:, 1, 2] = 0
    assert np.abs(found).max() < 1e-6


def test_random_maps_are_the_same_each_time():
    model = build()
    images = images_for(model)
    first, again = (attribution.compute(model, images, methods="random").maps["random"] for _ in range(2))
    assert np.array_equal(first, again)
    assert 0 <= first.min() < first.max() <= 1


def test_the_model_is_unchanged_afterwards():
    model = build(dropout=0.5).train()
    model.requires_grad_(False)
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    images = images_for(model)
    found = attribution.compute(model, images)
    assert modes == [module.training for module in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not images.requires_grad
    again = attribution.compute(model.eval(), images)  # dropout was off the first time as well
    assert all(np.allclose(found.maps[method], again.maps[method], atol=1e-6) for method in found.maps)
    assert all(isinstance(maps, np.ndarray) for maps in found.maps.values())


@pytest.mark.parametrize("name", ["class token", "oblong", "attention pool", "cut remainder"])
def test_figure_is_legible(name):
    model = build(name)
    images = images_for(model)
    found = attribution.compute(model, images, steps=4)
    figure = attribution.draw(found, to_pixels(images))
    assert_legible(figure)
    words = [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]
    assert all(method in words for method in attribution.METHODS)
    limits = [axis.images[-1].get_clim() for axis in figure.axes[1:5]]
    assert limits == [(-1, 1), (0, 1), (-1, 1), (0, 1)]
    header, rows = attribution.table(found)
    assert len(rows) == 2 * 4 * model.config.patches
    assert all(len(row) == len(header) for row in rows)
    assert rows[0][5] == found.maps["occlusion"][0, 0, 0]


def test_figure_of_one_image_of_many_images_and_long_names():
    model = build()
    for count in (1, 9):
        images = images_for(model, count)
        found = attribution.compute(model, images, methods=["integrated"], steps=2)
        figure = attribution.draw(found, to_pixels(images), ["a class with a very long name"] * 5)
        assert_legible(figure)
        assert len(figure.axes) == 2 * min(count, 8) + 1
        assert ("the first 8 of 9" in figure.get_suptitle()) == (count == 9)


def test_caption_reports_the_error_and_the_correlations():
    maps = {
        "occlusion": np.array([[[1.0, 2.0], [3.0, 4.0]]], np.float32),
        "integrated": np.array([[[2.0, 4.0], [6.0, 8.0]]], np.float32),
        "gradient-attention": np.zeros((1, 2, 2), np.float32),
    }
    found = attribution.Attribution(maps, np.array([3]), np.array([0.5]), np.array([19.5]), 7)
    text = attribution.caption(found)
    assert "19.5 nats on average; with 7 steps they are off by 0.5." in text
    assert "occlusion and integrated 1.00" in text
    assert "occlusion and gradient-attention 0.00" in text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(methods=["oclusion"]), "unknown method 'oclusion'. Did you mean 'occlusion'?"),
        (dict(target=5), "class indices from 0 to 4, not 5, 5."),
        (dict(target=[1]), "dtype is int64 and its shape (1,)"),
        (dict(target=[0.5, 1]), "dtype is float64 and its shape (2,)"),
        (dict(steps=0), "steps must be a positive integer, not 0"),
    ],
)
def test_invalid_arguments_are_rejected(fields, words):
    model = build()
    with pytest.raises(vt.InputError) as error:
        attribution.compute(model, images_for(model), **fields)
    assert words in str(error.value)


def test_headless_models_and_other_pixels_are_rejected():
    model = build(classes=0)
    with pytest.raises(vt.InputError, match=r"needs a classifier.*classes=0"):
        attribution.compute(model, images_for(model))
    model = build()
    images = images_for(model)
    with pytest.raises(vt.InputError, match="batch"):
        attribution.compute(model, images[0])
    found = attribution.compute(model, images, methods="random")
    with pytest.raises(vt.InputError, match="the same 2 images"):
        attribution.draw(found, to_pixels(images)[:1])
