"""The model without each head: against models whose output matrix forgets that head."""

import copy

import numpy as np
import pytest
import torch

import vitrail as vt
from answer_models import LAYOUTS, assert_legible, build, pictures_for
from vitrail.inspect import ablation
from vitrail.inspect.ablation import Ablation


def without(model, block, head):
    """A copy whose output matrix takes nothing from this head."""
    other = copy.deepcopy(model)
    d = model.config.d
    with torch.no_grad():
        other.blocks[block].attention.out.weight[:, head * d : (head + 1) * d] = 0
    return other


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_silent_head_is_one_whose_columns_are_zero(name):
    model = build(name)
    images = pictures_for(model, 6)
    labels = [0, 1, 2, 3, 4, 0]
    found = ablation.compute(model, images, labels)
    bare = ablation.compute(model, images)
    with torch.no_grad():
        whole = model(images).log_softmax(1)
        own = whole.argmax(1)
        for block, head in np.ndindex(model.config.depth, model.config.heads):
            less = without(model, block, head)(images).log_softmax(1)
            drop = (whole - less)[range(6), own].mean()
            assert found.drop[block, head] == pytest.approx(float(drop), abs=1e-5)
            assert found.changed[block, head] == float((less.argmax(1) != own).double().mean())
            right = (less.argmax(1) == torch.tensor(labels)).double().mean()
            assert found.accuracy[block, head] == pytest.approx(float(right))
    assert found.whole == pytest.approx(float((own == torch.tensor(labels)).double().mean()))
    assert np.array_equal(found.effect, found.accuracy - found.whole)
    assert bare.accuracy is bare.whole is None
    assert np.array_equal(bare.effect, bare.drop)
    assert np.array_equal(bare.drop, found.drop)
    assert found.pictures == 6


def test_batches_one_after_the_other_are_the_same_as_one():
    model = build()
    images = pictures_for(model, 70)
    labels = torch.arange(70) % 5
    one = ablation.compute(model, images, labels)
    parts = ablation.compute(model, (part for part in images.split([1, 30, 39])), labels)
    for name in ("drop", "changed", "accuracy"):
        assert np.allclose(getattr(one, name), getattr(parts, name), atol=1e-6)
    assert (one.whole, one.pictures) == (parts.whole, parts.pictures)


def test_a_head_that_writes_nothing_changes_nothing():
    model = without(build(), 1, 0)
    found = ablation.compute(model, pictures_for(model, 8))
    assert found.drop[1, 0] == pytest.approx(0, abs=1e-6)
    assert found.idle[1, 0]
    assert np.abs(np.delete(found.drop.ravel(), 2)).min() > 1e-4


def test_the_model_is_left_as_it_was():
    model = build(dropout=0.5).train()
    images = pictures_for(model)
    ablation.compute(model, images)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def made_up(accuracy=None, pictures=5000):
    drop = np.array([[0.1, 2.0, 0.0], [-0.3, 0.0, 0.2]])
    changed = np.array([[0.01, 0.2, 0.0], [0.05, 0.0005, 0.001]])
    whole = None if accuracy is None else 0.9
    return Ablation(drop, changed, None if accuracy is None else np.array(accuracy), whole, pictures)


def test_the_caption_names_the_head_that_matters_most():
    text = ablation.caption(made_up())
    assert "(n = 5000)" in text
    assert "Head 1 of block 0 matters most" in text
    assert "falls by 2 nats and 20.0% of them change" in text
    assert "2 of 6 heads change less than 0.1 % of the answers" in text
    assert "One picture" not in text
    text = ablation.caption(made_up([[0.9, 0.8995, 0.91], [0.5, 0.9, 0.88]], pictures=200))
    assert "Head 0 of block 1 matters most: without it the accuracy goes from 90.0% to 50.0%" in text
    assert "3 of 6 heads change the accuracy by less than 0.1 %" in text
    assert "One picture is 0.5% here" in text
    tied = ablation.caption(made_up(np.full((2, 3), 0.8)))
    assert "Head 1 of block 0 matters most" in tied  # by the log-probability


@pytest.mark.parametrize(("depth", "heads"), [(1, 1), (2, 4), (12, 12), (32, 16)])
@pytest.mark.parametrize("known", [True, False])
def test_the_figure_is_legible_and_red_is_worse(depth, heads, known):
    rng = np.random.default_rng(0)
    drop = rng.standard_normal((depth, heads))
    found = Ablation(drop, np.abs(drop) / 10, 0.8 - drop / 10 if known else None, 0.8 if known else None, 100)
    figure = ablation.draw(found)
    assert_legible(figure)
    axis = figure.axes[0]
    assert len(axis.texts) == (depth * heads if max(depth, heads) <= 12 else 0)
    image = axis.images[0]
    assert image.norm.vmin == -image.norm.vmax
    worst = found.effect.ravel()[np.argmax(found.harm)] * (100 if known else 1)
    red, _, blue, _ = image.cmap(image.norm(worst))
    assert (red > blue) == (found.harm.max() > 0)
    header, rows = ablation.table(found)
    assert len(rows) == depth * heads
    assert {len(row) for row in rows} == {len(header)} == {5 if known else 4}


def test_small_effects_are_written_with_more_digits():
    drop = np.array([[0.0123, -0.0000004]])
    found = Ablation(drop, drop * 0, None, None, 10)
    assert [text.get_text() for text in ablation.draw(found).axes[0].texts] == ["+0.0123", "+0.0000"]
    found = Ablation(drop, drop * 0, np.array([[0.5, 0.912]]), 0.9, 10)
    assert [text.get_text() for text in ablation.draw(found).axes[0].texts] == ["-40.0", "+1.2"]
    nothing = Ablation(drop * 0, drop * 0, None, None, 10)
    assert_legible(ablation.draw(nothing))


def test_what_does_not_fit_is_named():
    model = build()
    images = pictures_for(model, 4)

    def refused(*given):
        with pytest.raises(vt.InputError) as error:
            ablation.compute(model, *given)
        return str(error.value)

    assert "a label for each picture. Got 3 labels for 4 pictures" in refused(images, [0, 1, 2])
    assert "Got 5 labels for 4 pictures." in refused(images.split(2), [0, 1, 2, 3, 4])
    assert "Got 3 labels for 4 pictures and more." in refused(iter(images.split(2)), [0, 1, 2])
    assert "labels must be class numbers from 0 to 4. Got 7." in refused(images, [0, 1, 2, 7])
    assert "There must be pictures to look at. Got no batch." in refused([])
    assert "a tuple among the batches" in refused([(images, [0, 1, 2, 3])])
    assert "batch (B, C, H, W)" in refused(images[0])
    assert "batch (B, C, H, W)" in refused(images[:0])
