"""Attention maps, against an explicit softmax in every layout."""

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
from vitrail.model import attention as model_attention
from vitrail.views import attention_maps as attention


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recorded_attention_is_the_explicit_softmax(layout):
    model = build(layout)
    images = random_images(model)
    with torch.no_grad(), vt.record(model, "blocks.*.attention.weights") as tape:
        model(images)
    for n, weights in enumerate(explicit_weights(model, images)):
        np.testing.assert_allclose(tape[f"blocks.{n}.attention.weights"].numpy(), weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_maps_are_the_rows_of_the_explicit_weights(layout):
    model = build(layout)
    config, images = model.config, random_images(model)
    n, (h, w) = config.prefix, config.grid
    queries = {name: index for index, name in enumerate(config.prefix_names)}
    queries |= {(h - 1, 0): n + (h - 1) * w}
    for layer in {0, config.depth - 1}:
        weights = explicit_weights(model, images)[layer]
        for query, index in queries.items():
            found = attention.compute(model, images, layer=layer, query=query)
            close(found.maps, weights[:, :, index, n:].reshape(2, config.heads, h, w))
            close(found.prefix, weights[:, :, index, :n])
        found = attention.compute(model, images, layer=layer, query="mean")
        close(found.maps, weights[:, :, n:, n:].mean(axis=2).reshape(2, config.heads, h, w))
        close(found.prefix, weights[:, :, n:, :n].mean(axis=2))
        close(found.maps.sum((2, 3)) + found.prefix.sum(2), np.ones((2, config.heads)))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", ["attention pool", "attention pool and registers"])
def test_query_of_the_attention_pool(layout):
    model = build(layout)
    pool, images = model.pool.attention, random_images(model)
    encoded = model.encode(images).patches.flatten(1, 2).detach().double()
    inner, k = model.config.heads_width, model.config.heads
    weight, bias = pool.qkv.weight.detach().double(), pool.qkv.bias.detach().double()
    q = (model.pool.probe.detach().double()[0] @ weight[:inner].T + bias[:inner]).reshape(k, -1)
    keys = (encoded @ weight[inner : 2 * inner].T + bias[inner : 2 * inner]).unflatten(-1, (k, -1))
    powers = np.exp(np.einsum("kd,bnkd->bkn", q, keys) / np.sqrt(model.config.d))
    found = attention.compute(model, images)  # without a class token, the default is the query of the pool
    close(found.maps.reshape(2, k, -1), powers / powers.sum(-1, keepdims=True))
    assert not found.prefix.any()
    assert found.query == "the learned query"
    assert found.location == "the attention pool"


def test_default_query():
    queries = {layout: attention._default_query(build(layout).config) for layout in LAYOUTS}
    assert queries["class token"] == queries["registers"] == "class"
    assert queries["attention pool and registers"] == "pool"
    assert queries["mean pool"] == queries["registers alone"] == "mean"


def test_names_of_prefix_tokens():
    config = build("distilled", registers=2).config
    assert config.prefix_names == ["class", "distillation", "register 0", "register 1"]


def test_maps_show_attention_set_by_hand():
    model = build("registers")

    def attend(weights):
        weights = torch.zeros_like(weights)
        weights[:, 1, :, 3 + 5] = 1  # head 1: patch 5, row 1 column 2
        weights[:, (0, 2, 3), :, 1] = 1  # the others: the first register
        return weights

    with vt.edit(model, {"blocks.1.attention.weights": attend}):
        found = attention.compute(model, random_images(model), layer=1)
    assert (found.maps[:, 1, 1, 2] == 1).all()
    assert found.maps.sum() == 2
    assert (found.prefix[:, (0, 2, 3), 1] == 1).all()


def test_only_the_requested_layer_computes_explicit_weights(monkeypatch):
    model, calls = build(), []
    explicit = model_attention.attend_explicitly

    def count(*args, **options):
        calls.append(1)
        return explicit(*args, **options)

    monkeypatch.setattr(model_attention, "attend_explicitly", count)
    attention.compute(model, random_images(model), layer=1)
    assert len(calls) == 1


def test_single_head_leaves_modes_and_gradients_alone():
    model = build().train()
    model.blocks[1].eval()
    images = random_images(model)
    found = attention.compute(model, images, head=-1, layer=0)
    assert model.training
    assert model.blocks[0].training
    assert not model.blocks[1].training
    assert found.heads == (3,)
    close(found.maps, attention.compute(model, images, layer=0).maps[:, 3:])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_invalid_inputs_are_rejected():
    model = build("registers alone")
    images = random_images(model)
    with pytest.raises(InputError, match=r"no query 'class'.*register 0, register 1, register 2, mean"):
        attention.compute(model, images, query="class")
    with pytest.raises(InputError, match="a patch as"):
        attention.compute(model, images, query="pool")
    with pytest.raises(InputError, match="row must be an integer from 0 to 2"):
        attention.compute(model, images, query=(3, 0))
    with pytest.raises(InputError, match="layer must be an integer from 0 to 2"):
        attention.compute(model, images, layer=3)
    with pytest.raises(InputError, match="head must be an integer from 0 to 3"):
        attention.compute(model, images, head=4)
    with pytest.raises(InputError, match="batch"):
        attention.compute(model, images[0])
    with pytest.raises(InputError, match="Attention weights must be finite"):
        attention.compute(model, images * torch.nan)
    with pytest.raises(InputError, match="the same 2 images"):
        attention.draw(attention.compute(model, images), random_pixels(model, 3))


@pytest.mark.parametrize(
    "layout", ["class token", "not square", "attention pool", "distilled", "one layer, one head"]
)
def test_figure_is_legible(layout):
    model = build(layout)
    found = attention.compute(model, random_images(model))
    assert not clipped(attention.draw(found, random_pixels(model)))


@pytest.mark.parametrize(("heads", "count"), [(16, 1), (1, 3)])
def test_figure_of_many_heads_and_of_several_images(heads, count):
    model = build(heads=heads, registers=4)
    found = attention.compute(model, random_images(model, count), query=(0, 1))
    figure = attention.draw(found, random_pixels(model, count))
    assert not clipped(figure)
    assert figure.get_figwidth() < 13


def test_color_scale_ends_below_a_single_peak_and_the_label_gives_the_maximum():
    maps = np.full((1, 2, 14, 14), 0.001, dtype=np.float32)
    maps[0, 0, 3, 3] = 0.8
    limit, label = attention.color_limit(maps, "weight")
    assert limit == pytest.approx(0.001)
    assert label == "weight\n(top color:\n0.001 to 0.8)"
    assert attention.color_limit(np.ones((1, 1, 2, 2), np.float32), "weight") == (1.0, "weight")


def test_caption_and_table():
    maps = np.zeros((1, 2, 2, 2), np.float32)
    maps[0, 0, 0, 0] = 0.5  # one patch, and half to the class token
    maps[0, 1] = 0.25  # all four alike
    prefix = np.array([[[0.5], [0.0]]], np.float32)
    found = attention.AttentionMaps(maps, prefix, ("class",), (0, 1), "the class token", "layer 3")
    text = attention.caption(found)
    assert "the class token in layer 3" in text
    assert "from 1.0 (head 0, the narrowest) to 4.0 (head 1, the widest), out of 4" in text
    assert "class 25.0%" in text
    header, rows = attention.table(found)
    assert header == ["image", "head", "token", "weight"]
    assert len(rows) == 2 * 5
    assert rows[:2] == [[0, 0, "class", 0.5], [0, 0, "patch 0,0", 0.5]]
    assert rows[-1] == [0, 1, "patch 1,1", 0.25]
