"""Which patches made the answer: against loops, a model whose answer is known, and every layout."""

import numpy as np
import pytest
import torch

import vitrail as vt
from answer_models import LAYOUTS, assert_legible, build, levels, log_p, painted, pictures_for
from vitrail.inspect import attribution


@pytest.mark.parametrize("name", LAYOUTS)
def test_occlusion_is_what_covering_each_patch_does(name):
    model = build(name)
    images = pictures_for(model)
    found = attribution.compute(model, images, methods="occlusion")
    target = model(images).argmax(1)
    assert found.target.tolist() == target.tolist()
    places = list(np.ndindex(*model.config.grid))
    for n, picture in enumerate(images):
        covered = torch.stack([painted(picture, place, model.config.patch_pixels) for place in places])
        drop = log_p(model, images, target)[n] - log_p(model, covered, [target[n]] * len(places))
        assert found.maps["occlusion"][n].ravel() == pytest.approx(drop.numpy(), abs=2e-5)


def test_occlusion_takes_one_forward_for_each_patch_and_one_for_the_picture():
    model = build("oblong")
    seen = []
    model.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    attribution.compute(model, pictures_for(model, 3), methods=["occlusion"])
    assert sum(seen) == 3 * (model.config.patches + 1)
    assert len(seen) < 6  # in batches


def test_the_target_and_the_baseline_are_those_that_were_asked_for():
    model = build()
    images = pictures_for(model)
    found = attribution.compute(
        model, images, methods=["occlusion"], target=[3, 0], baseline=[1.0, 0.0, -2.0]
    )
    colour = torch.tensor([1.0, 0.0, -2.0])[:, None, None]
    covered = torch.stack([painted(one, (1, 2), (8, 8), colour) for one in images])
    drop = log_p(model, images, [3, 0]) - log_p(model, covered, [3, 0])
    assert found.maps["occlusion"][:, 1, 2] == pytest.approx(drop.numpy(), abs=1e-5)
    assert found.probability == pytest.approx(log_p(model, images, [3, 0]).exp().numpy(), abs=1e-6)


def queries_of(model):
    """The tokens that the pool uses, by the config's own words."""
    c = model.config
    match c.pool:
        case "class":
            return [0, 1] if c.head == "distilled" else [0]
        case "class-mean":
            return [0, *range(c.prefix, c.tokens)]
        case "mean-all":
            return range(c.tokens)
        case "attention":
            return [0]
        case _:
            return range(c.prefix, c.tokens)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradient_attention_is_attention_times_its_gradient(name):
    """The gradient by small changes of single weights, for the patch that counts most."""
    model = build(name).double()
    images = pictures_for(model, 1).double()
    c = model.config
    found = attribution.compute(model, images, methods="gradient-attention").maps["gradient-attention"]
    pooled = c.pool == "attention"
    tap = "pool.attention.weights" if pooled else f"blocks.{c.depth - 1}.attention.weights"
    target = model(images).argmax(1)
    with torch.no_grad(), vt.record(model, tap) as tape:
        model(images)
    patch = int(found.argmax())
    key = patch + (0 if pooled else c.prefix)
    total = 0.0
    for head in range(c.heads):
        for query in queries_of(model):

            def nudged(by, head=head, query=query):
                def change(weights):
                    weights = weights.clone()
                    weights[0, head, query, key] += by
                    return weights

                with vt.edit(model, {tap: change}):
                    return float(log_p(model, images, target))

            slope = (nudged(1e-4) - nudged(-1e-4)) / 2e-4
            total += slope * float(tape[tap][0, head, query, key]) / c.heads
    assert found.max() > 0
    assert found.max() == pytest.approx(total, rel=1e-4)
    assert found.shape == (1, *c.grid)
    assert (found >= 0).all()


def test_gradient_attention_of_a_mean_is_not_all_zero():
    found = attribution.compute(
        build("mean pool"), pictures_for(build("mean pool")), methods="gradient-attention"
    )
    assert (found.maps["gradient-attention"] > 0).any(axis=(1, 2)).all()


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "hybrid stem"])
def test_integrated_gradients_add_up(name):
    model = build(name)
    images = pictures_for(model)
    found = attribution.compute(model, images, methods="integrated", steps=200)
    nothing = images.clone()
    (h, w), (down, across) = model.config.grid, model.config.patch_pixels
    nothing[:, :, : h * down, : w * across] = 0
    change = log_p(model, images, found.target) - log_p(model, nothing, found.target)
    assert found.change == pytest.approx(change.numpy(), abs=1e-5)
    assert found.maps["integrated"].sum(axis=(1, 2)) == pytest.approx(change.numpy(), abs=0.05)
    assert found.gap == pytest.approx(found.maps["integrated"].sum(axis=(1, 2)) - found.change, abs=1e-6)


def test_where_integrated_gradients_do_not_add_up_the_caption_says_so():
    """A stem's norms divide by the contrast: along the way nothing changes until all of it is gone."""
    model = build("hybrid stem")
    found = attribution.compute(model, pictures_for(model), methods="integrated")
    assert np.abs(found.gap).mean() > 0.1 * np.abs(found.change).mean()
    assert "not to be relied on" in attribution.caption(found)
    model = build()
    found = attribution.compute(model, pictures_for(model), methods="integrated")
    assert "not to be relied on" not in attribution.caption(found)


def test_integrated_gradients_are_those_of_a_loop_over_the_midpoints():
    model = build("oblong")
    images = pictures_for(model, 3)
    found = attribution.compute(model, images, methods="integrated", steps=5, baseline=0.5)
    for n, picture in enumerate(images):
        nothing = torch.full_like(picture, 0.5)
        total = torch.zeros_like(picture)
        for step in range(5):
            point = (nothing + (step + 0.5) / 5 * (picture - nothing)).requires_grad_()
            answer = torch.log_softmax(model(point[None]), dim=1)[0, found.target[n]]
            total += torch.autograd.grad(answer, point)[0]
        map_ = ((picture - nothing) * total / 5).sum(0)
        for row, column in np.ndindex(7, 9):
            here = map_[8 * row : 8 * row + 8, 8 * column : 8 * column + 8].sum()
            assert found.maps["integrated"][n, row, column] == pytest.approx(float(here), abs=1e-5)


def one_patch_model(place):
    """A model that answers by the first pixel of one patch alone: logits are (0, that pixel)."""
    config = vt.ViTConfig(
        **dict(width=4, depth=1, heads=1, patch=4, size=12, channels=1, classes=2),
        **dict(class_token=False, pool="flatten", pool_norm="none", position="none", norm="none"),
    )
    model = vt.ViT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.tokens.proj.weight[0, 0, 0, 0] = 1  # token channel 0 is the first pixel of its patch
        model.head.weight[1, (place[0] * 3 + place[1]) * 4] = 1
    return model


@pytest.mark.parametrize("method", ["occlusion", "integrated"])
def test_a_model_that_looks_at_one_patch_is_seen_to(method):
    model = one_patch_model((1, 2))
    images = torch.rand(2, 1, 12, 12) + 0.5
    found = attribution.compute(model, images, methods=method).maps[method]
    change = torch.log_softmax(model(images), 1)[:, 1] - np.log(0.5)
    assert found[:, 1, 2] == pytest.approx(change.detach().numpy(), abs=1e-3)
    found[:, 1, 2] = 0
    assert np.abs(found).max() < 1e-6


def test_random_maps_are_the_same_again_and_others_with_another_seed():
    model = build()
    images = pictures_for(model)
    first, again, other = (
        attribution.compute(model, images, methods="random", seed=seed).maps["random"] for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert 0 <= first.min() < first.max() <= 1


def test_the_model_is_left_as_it_was():
    model = build(dropout=0.5).train()
    model.requires_grad_(False)
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    images = pictures_for(model)
    found = attribution.compute(model, images)
    assert modes == [module.training for module in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not images.requires_grad
    again = attribution.compute(model.eval(), images)  # dropout was off the first time as well
    assert all(np.allclose(found.maps[method], again.maps[method], atol=1e-6) for method in found.maps)
    assert all(isinstance(maps, np.ndarray) for maps in found.maps.values())


@pytest.mark.parametrize("name", ["class token", "oblong", "attention pool", "pixels left over"])
def test_the_figure_is_legible(name):
    model = build(name)
    images = pictures_for(model)
    found = attribution.compute(model, images, steps=4)
    figure = attribution.draw(found, levels(images))
    assert_legible(figure)
    words = [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]
    assert all(method in words for method in attribution.METHODS)
    limits = [axis.images[-1].get_clim() for axis in figure.axes[1:5]]
    assert limits == [(-1, 1), (0, 1), (-1, 1), (0, 1)]
    header, rows = attribution.table(found)
    assert len(rows) == 2 * 4 * model.config.patches
    assert all(len(row) == len(header) for row in rows)
    assert rows[0][5] == found.maps["occlusion"][0, 0, 0]


def test_one_picture_and_many_pictures_and_long_names():
    model = build()
    for count in (1, 9):
        images = pictures_for(model, count)
        found = attribution.compute(model, images, methods=["integrated"], steps=2)
        figure = attribution.draw(found, levels(images), ["a class with a very long name"] * 5)
        assert_legible(figure)
        assert len(figure.axes) == 2 * min(count, 8) + 1
        assert ("the first 8 of 9" in figure.get_suptitle()) == (count == 9)


def test_the_caption_holds_the_gap_and_the_agreement():
    maps = {
        "occlusion": np.array([[[1.0, 2.0], [3.0, 4.0]]], np.float32),
        "integrated": np.array([[[2.0, 4.0], [6.0, 8.0]]], np.float32),
        "gradient-attention": np.zeros((1, 2, 2), np.float32),
    }
    found = attribution.Attribution(maps, np.array([3]), np.array([0.5]), np.array([19.5]), 7)
    text = attribution.caption(found)
    assert "19.5 nats in the mean; with 7 steps they miss it by 0.5." in text
    assert "occlusion and integrated 1.00" in text
    assert "occlusion and gradient-attention 0.00" in text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            dict(methods=["oclusion"]),
            "A method must be one there is. Got 'oclusion'. Did you mean 'occlusion'?",
        ),
        (dict(target=5), "target must be class numbers from 0 to 4. Got 5, 5."),
        (dict(target=[1]), "one class number for each of 2 pictures. Got int64 of shape (1,)."),
        (dict(target=[0.5, 1]), "one class number for each of 2 pictures. Got float64 of shape (2,)."),
        (
            dict(baseline=[0, 1]),
            "baseline must be one finite number, or one for each of 3 channels. Got [0, 1].",
        ),
        (dict(baseline=float("nan")), "baseline must be one finite number"),
        (dict(steps=0), "steps must be a whole number from 1 up. Got 0."),
    ],
)
def test_what_does_not_fit_is_named(fields, words):
    model = build()
    with pytest.raises(vt.InputError) as error:
        attribution.compute(model, pictures_for(model), **fields)
    assert words in str(error.value)


def test_models_without_answers_and_pixels_of_other_pictures_are_refused():
    model = build(classes=0)
    with pytest.raises(vt.InputError, match=r"must choose between classes. Got one with classes=0"):
        attribution.compute(model, pictures_for(model))
    model = build()
    images = pictures_for(model)
    with pytest.raises(vt.InputError, match="batch"):
        attribution.compute(model, images[0])
    found = attribution.compute(model, images, methods="random")
    with pytest.raises(vt.InputError, match="must be those of the 2 pictures"):
        attribution.draw(found, levels(images)[:1])
