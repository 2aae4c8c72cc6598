"""Head ablation, against models whose output projection has zero columns for that head."""

import copy

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.answer_models import LAYOUTS, assert_legible, build, images_for
from vitrail.views import ablation
from vitrail.views.ablation import Ablation


def without(model, block, head):
    """A copy whose output projection has zero columns for this head."""
    other = copy.deepcopy(model)
    d = model.config.d
    with torch.no_grad():
        other.blocks[block].attention.out.weight[:, head * d : (head + 1) * d] = 0
    return other


@pytest.mark.parametrize("name", LAYOUTS)
def test_ablation_equals_zero_columns_in_the_output_projection(name):
    model = build(name)
    images = images_for(model, 6)
    labels = [0, 1, 2, 3, 4, 0]
    found = ablation.compute(model, images, labels)
    unlabeled = ablation.compute(model, images)
    with torch.no_grad():
        full = model(images).log_softmax(1)
        predicted = full.argmax(1)
        for block, head in np.ndindex(model.config.depth, model.config.heads):
            ablated = without(model, block, head)(images).log_softmax(1)
            drop = (full - ablated)[range(6), predicted].mean()
            assert found.drop[block, head] == pytest.approx(float(drop), abs=1e-5)
            assert found.changed[block, head] == float((ablated.argmax(1) != predicted).double().mean())
            accuracy = (ablated.argmax(1) == torch.tensor(labels)).double().mean()
            assert found.accuracy[block, head] == pytest.approx(float(accuracy))
    assert found.full_accuracy == pytest.approx(float((predicted == torch.tensor(labels)).double().mean()))
    assert np.array_equal(found.effect, found.accuracy - found.full_accuracy)
    assert unlabeled.accuracy is unlabeled.full_accuracy is None
    assert np.array_equal(unlabeled.effect, unlabeled.drop)
    assert np.array_equal(unlabeled.drop, found.drop)
    assert found.images == 6


def test_several_batches_give_the_same_result_as_one():
    model = build()
    images = images_for(model, 70)
    labels = torch.arange(70) % 5
    one = ablation.compute(model, images, labels)
    parts = ablation.compute(model, (part for part in images.split([1, 30, 39])), labels)
    for name in ("drop", "changed", "accuracy"):
        assert np.allclose(getattr(one, name), getattr(parts, name), atol=1e-6)
    assert (one.full_accuracy, one.images) == (parts.full_accuracy, parts.images)


def test_a_head_with_zero_output_has_no_effect():
    model = without(build(), 1, 0)
    found = ablation.compute(model, images_for(model, 8))
    assert found.drop[1, 0] == pytest.approx(0, abs=1e-6)
    assert found.idle[1, 0]
    assert np.abs(np.delete(found.drop.ravel(), 2)).min() > 1e-4


def test_the_model_is_unchanged_afterwards():
    model = build(dropout=0.5).train()
    images = images_for(model)
    ablation.compute(model, images)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def make_result(accuracy=None, images=5000):
    drop = np.array([[0.1, 2.0, 0.0], [-0.3, 0.0, 0.2]])
    changed = np.array([[0.01, 0.2, 0.0], [0.05, 0.0005, 0.001]])
    whole = None if accuracy is None else 0.9
    return Ablation(drop, changed, None if accuracy is None else np.array(accuracy), whole, images)


def test_caption_names_the_most_important_head():
    text = ablation.caption(make_result())
    assert "(n = 5000)" in text
    assert "Head 1 of block 0 matters most" in text
    assert "drops by 2 nats and 20.0% of the predictions change" in text
    assert "2 of the 6 heads" in text
    assert "One image" not in text
    text = ablation.caption(make_result([[0.9, 0.8995, 0.91], [0.5, 0.9, 0.88]], images=200))
    assert "Head 0 of block 1 matters most: without it, accuracy goes from 90.0% to 50.0%" in text
    assert "3 of the 6 heads changes the accuracy by less than 0.1%" in text
    assert "One image is 0.5% of the sample" in text
    tied = ablation.caption(make_result(np.full((2, 3), 0.8)))
    assert "Head 1 of block 0 matters most" in tied  # by the log-probability


@pytest.mark.parametrize(("depth", "heads"), [(1, 1), (2, 4), (12, 12), (32, 16)])
@pytest.mark.parametrize("labeled", [True, False])
def test_figure_is_legible_and_red_means_worse(depth, heads, labeled):
    rng = np.random.default_rng(0)
    drop = rng.standard_normal((depth, heads))
    found = Ablation(
        drop, np.abs(drop) / 10, 0.8 - drop / 10 if labeled else None, 0.8 if labeled else None, 100
    )
    figure = ablation.draw(found)
    assert_legible(figure)
    axis = figure.axes[0]
    assert len(axis.texts) == (depth * heads if max(depth, heads) <= 12 else 0)
    image = axis.images[0]
    assert image.norm.vmin == -image.norm.vmax
    worst = found.effect.ravel()[np.argmax(found.harm)] * (100 if labeled else 1)
    red, _, blue, _ = image.cmap(image.norm(worst))
    assert (red > blue) == (found.harm.max() > 0)
    header, rows = ablation.table(found)
    assert len(rows) == depth * heads
    assert {len(row) for row in rows} == {len(header)} == {5 if labeled else 4}


def test_small_effects_are_printed_with_more_digits():
    drop = np.array([[0.0123, -0.0000004]])
    found = Ablation(drop, drop * 0, None, None, 10)
    assert [text.get_text() for text in ablation.draw(found).axes[0].texts] == ["+0.0123", "+0.0000"]
    found = Ablation(drop, drop * 0, np.array([[0.5, 0.912]]), 0.9, 10)
    assert [text.get_text() for text in ablation.draw(found).axes[0].texts] == ["-40.0", "+1.2"]
    nothing = Ablation(drop * 0, drop * 0, None, None, 10)
    assert_legible(ablation.draw(nothing))


def test_invalid_inputs_are_rejected():
    model = build()
    images = images_for(model, 4)

    def message(*args):
        with pytest.raises(vt.InputError) as error:
            ablation.compute(model, *args)
        return str(error.value)

    assert "3 labels do not match 4" in message(images, [0, 1, 2])
    assert "5 labels do not match 4 images" in message(images.split(2), [0, 1, 2, 3, 4])
    assert "3 labels do not match 4 or more images" in message(iter(images.split(2)), [0, 1, 2])
    assert "class indices from 0 to 4, not 7" in message(images, [0, 1, 2, 7])
    assert "no batches" in message([])
    assert "not a tuple" in message([(images, [0, 1, 2, 3])])
    assert "batch (B, C, H, W)" in message(images[0])
    assert "batch (B, C, H, W)" in message(images[:0])
