"""Attention rollout and gradient rollout, against plain loops and on attention set by hand."""

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.attention_models import (
    LAYOUTS,
    build,
    clipped,
    explicit_weights,
    random_images,
    random_pixels,
)
from vitrail.base.errors import InputError
from vitrail.views import rollout


def pooled_by_hand(model, B, pool_weights):
    """The weights of the pooled tokens, (B, T)."""
    config = model.config
    row, n, N = np.zeros((B, config.tokens)), config.prefix, config.patches
    match config.pool:
        case "class" if config.head == "distilled":
            row[:, :2] = 1 / 2
        case "class":
            row[:, 0] = 1
        case "mean" | "flatten":
            row[:, n:] = 1 / N
        case "mean-all":
            row[:] = 1 / (n + N)
        case "class-mean":
            row[:, 0] = 1 / 2
            row[:, n:] += 1 / 2 / N
        case "attention":
            row[:, n:] = pool_weights
    return row


def by_hand(model, images):
    """Rollout in plain loops: maps and prefix fractions."""
    n, T = model.config.prefix, model.config.tokens
    pool = None
    if model.config.pool == "attention":
        with torch.no_grad(), vt.record(model, "pool.attention.weights") as tape:
            model(images)
        pool = tape["pool.attention.weights"][:, :, 0].double().numpy().mean(axis=1)
    rows = pooled_by_hand(model, len(images), pool)
    blocks = explicit_weights(model, images)
    maps, prefix = [], []
    for image in range(len(images)):
        flow = np.eye(T)
        for weights in blocks:
            step = weights[image].mean(axis=0)
            for row in range(T):
                step[row, row] += model.config.block != "no-residual"
                step[row] /= step[row].sum()
            flow = step @ flow
        relevance = rows[image] @ flow
        maps.append((relevance[n:] / relevance[n:].sum()).reshape(model.config.grid))
        prefix.append(relevance[:n] / relevance.sum())
    return np.stack(maps), np.stack(prefix)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rollout_equals_plain_loops(layout):
    model = build(layout)
    images = random_images(model)
    found = rollout.compute(model, images)
    maps, prefix = by_hand(model, images)
    np.testing.assert_allclose(found.maps[0], maps, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found.prefix[0], prefix, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found.maps.sum((-1, -2)), 1, atol=1e-5)
    assert found.targets is None


def test_rollout_of_attention_set_by_hand():
    """All tokens attend to patch 4 of 9 in layer 0 and to patch 7 in layer 1."""
    model = build(depth=2)

    def attend_to(patch):
        def attend(weights):
            weights = torch.zeros_like(weights)
            weights[..., 1 + patch] = 1
            return weights

        return attend

    edits = {"blocks.0.attention.weights": attend_to(4), "blocks.1.attention.weights": attend_to(7)}
    with vt.edit(model, edits):
        found = rollout.compute(model, random_images(model))
    # Half of the class token is patch 7 after layer 0: a quarter patch 7, a quarter patch 4. The other half is
    # the class token after layer 0: a quarter itself, a quarter patch 4.
    expected = np.zeros(9)
    expected[[4, 7]] = 2 / 3, 1 / 3
    np.testing.assert_allclose(found.maps[0].reshape(2, 9), [expected, expected], atol=1e-6)
    np.testing.assert_allclose(found.prefix[0], [[0.25], [0.25]], atol=1e-6)


def gradients_by_hand(model, images, target):
    """dlogit/dA by central differences, weight by weight, in float64: a list of (k, T, T) for one image."""
    names = [f"blocks.{n}.attention.weights" for n in range(model.config.depth)]
    with torch.no_grad(), vt.record(model, *names) as tape:
        model(images)
    found = []
    for name in names:
        weights = tape[name][0].clone()
        slope = np.zeros(weights.shape)
        for place in np.ndindex(weights.shape):
            for sign in (1, -1):
                moved = tape[name].clone()
                moved[(0, *place)] += sign * 1e-5
                with torch.no_grad(), vt.edit(model, {name: lambda weights, moved=moved: moved}):
                    slope[place] += sign * float(model(images)[0, target]) / 2e-5
        found.append((weights.numpy(), slope))
    return found


@pytest.mark.parametrize("layout", ["class token", "mean pool", "post-norm"])
def test_gradient_rollout_equals_finite_differences_and_loops(layout):
    model = build(layout, width=8, heads=2, depth=2, size=16).double()
    images, n, T = random_images(model, 1).double(), model.config.prefix, model.config.tokens
    flow = np.eye(T)
    for weights, slope in gradients_by_hand(model, images, target=3):
        centered = slope - (weights * slope).sum(axis=-1, keepdims=True)  # the gradient of softmax
        flow = flow + np.maximum(0, weights * centered).mean(axis=0) @ flow
    row = pooled_by_hand(model, 1, None)[0]
    relevance = row @ (flow - np.eye(T))
    found = rollout.compute(model, images, method="gradient", target=3)
    np.testing.assert_allclose(found.maps[0, 0].ravel(), relevance[n:] / relevance[n:].sum(), atol=1e-5)
    np.testing.assert_allclose(found.prefix[0, 0], relevance[:n] / relevance.sum(), atol=1e-5)
    assert found.targets.tolist() == [3]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_rollout_works_in_every_layout(layout):
    model = build(layout)
    images = random_images(model)
    found = rollout.compute(model, images, method="both")
    assert found.methods == ("rollout", "gradient")
    assert found.maps.shape == (2, 2, *model.config.grid)
    np.testing.assert_allclose(found.maps.sum((-1, -2)), 1, atol=1e-5)
    assert (found.maps >= 0).all()
    assert found.targets.tolist() == model(images).argmax(1).tolist()
    np.testing.assert_array_equal(found.maps[0], rollout.compute(model, images).maps[0])


def test_a_constant_in_the_gradient_of_a_row_does_not_empty_the_map():
    """All values push the logit down, so every dlogit/dA is negative; attending less to some still helps."""
    model = build("mean pool", depth=1)
    images = random_images(model, 4)
    with torch.no_grad():
        model.blocks[0].attention.qkv.bias[-model.config.width :] = 5.0  # of the values
        direction = model.head.weight @ model.blocks[0].attention.out.weight.sum(dim=1)
    found = rollout.compute(model, images, method="gradient", target=int(direction.argmin()))
    np.testing.assert_allclose(found.maps.sum((-1, -2)), 1, atol=1e-5)


def test_gradient_rollout_of_an_attention_pool():
    """If no block contributes, the map is the relevance of the pool."""
    model = build("attention pool", depth=1)
    images = random_images(model)
    for parameter in (model.blocks[0].attention.out.weight, model.blocks[0].attention.out.bias):
        parameter.data.zero_()  # so the logits do not depend on the block's weights
    with vt.record(model, "pool.attention.weights") as tape:
        score = model(images)[:, 2].sum()
    weights = tape["pool.attention.weights"]
    (slope,) = torch.autograd.grad(score, [weights])
    centered = slope - (weights * slope).sum(dim=-1, keepdim=True)
    relevance = (weights * centered).clamp_min(0).mean(1)[:, 0].detach().numpy()
    found = rollout.compute(model, images, method="gradient", target=2)
    expected = relevance / relevance.sum(-1, keepdims=True)
    np.testing.assert_allclose(found.maps[0].reshape(2, -1), expected, atol=1e-5)


def test_gradient_rollout_depends_on_the_target():
    model = build()
    images = random_images(model, 3)
    each = [rollout.compute(model, images, method="gradient", target=n).maps[0] for n in range(5)]
    assert all(np.abs(each[n] - each[m]).max() > 1e-3 for n in range(5) for m in range(n))
    mixed = rollout.compute(model, images, method="gradient", target=torch.tensor([4, 0, 2]))
    np.testing.assert_allclose(mixed.maps[0], np.stack([each[4][0], each[0][1], each[2][2]]), atol=1e-6)
    plain = [rollout.compute(model, images, target=n).maps for n in (0, 1)]
    np.testing.assert_array_equal(*plain)  # rollout does not depend on the class


def test_parameters_gradients_and_modes_are_unchanged():
    model = build().train()
    model.blocks[0].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    images = random_images(model)
    found = rollout.compute(model, images, method="gradient")
    assert all((parameter.grad == 1).all() for parameter in model.parameters())
    assert (model.training, model.blocks[0].training, model.blocks[1].training) == (True, False, True)
    assert not images.requires_grad
    frozen = rollout.compute(model.requires_grad_(False), images, method="gradient")
    np.testing.assert_array_equal(found.maps, frozen.maps)
    with torch.no_grad():
        np.testing.assert_array_equal(found.maps, rollout.compute(model, images, method="gradient").maps)


def test_a_zero_head_gives_a_zero_map():
    model = build()
    torch.nn.init.zeros_(model.head.weight)
    found = rollout.compute(model, random_images(model), method="both")
    assert not found.maps[1].any()
    text = rollout.caption(found)
    assert "2 of 2 images all patches have zero relevance" in text
    assert "cannot be compared" in text
    assert not clipped(rollout.draw(found, random_pixels(model)))


def test_invalid_inputs_are_rejected():
    model = build()
    images = random_images(model)
    with pytest.raises(InputError, match=r"unknown method.*gradient"):
        rollout.compute(model, images, method="gradients")
    for target in (5, -1, torch.tensor([1]), torch.tensor([0.0, 1.0])):
        with pytest.raises(InputError, match="target must hold"):
            rollout.compute(model, images, method="gradient", target=target)
    with pytest.raises(InputError, match="has no head"):
        rollout.compute(build(classes=0), images, method="gradient")
    with pytest.raises(InputError, match="Attention weights must be finite"):
        rollout.compute(model, images * torch.nan)


@pytest.mark.parametrize("layout", ["registers", "not square", "attention pool and registers", "distilled"])
@pytest.mark.parametrize(("method", "count"), [("rollout", 1), ("both", 4)])
def test_figure_is_legible(layout, method, count):
    model = build(layout)
    found = rollout.compute(model, random_images(model, count), method=method)
    assert not clipped(rollout.draw(found, random_pixels(model, count)))


def test_caption_and_table():
    maps = np.zeros((2, 1, 4, 5), np.float32)
    maps[0] = 1 / 20
    maps[1, 0, 0, :2] = 0.5
    prefix = np.array([[[0.25]], [[0.0]]], np.float32)
    fields = dict(names=("class",), targets=np.array([7]), to="the class token")
    found = rollout.Rollout(methods=("rollout", "gradient"), maps=maps, prefix=prefix, **fields)
    text = rollout.caption(found)
    assert "the top 2 of 20 patches have 10.0% of the relevance (uniform: 10.0%)" in text
    assert "prefix tokens have 25.0% of the total" in text
    assert "have 100.0% of the relevance (uniform: 10.0%); prefix tokens have 0.0%" in text
    header, rows = rollout.table(found)
    assert header == ["method", "image", "token", "fraction"]
    assert len(rows) == 2 * 21
    assert rows[0] == ["rollout", 0, "class", 0.25]
    assert rows[22] == ["gradient", 0, "patch 0,0", 0.5]


def test_pooled_weights_sum_to_one():
    for layout in LAYOUTS:
        config = build(layout).config
        expected = 0 if config.pool == "attention" else 1
        assert float(rollout.pooled_tokens(config)[0].sum()) == pytest.approx(expected)
