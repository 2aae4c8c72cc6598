"""The logit lens, against models truncated after each block."""

import dataclasses

import numpy as np
import pytest
import torch

import vitrail as vt
from tests.support.answer_models import LAYOUTS, assert_legible, build, images_for
from vitrail.views import lens
from vitrail.views.lens import Lens


def truncated(model, depth):
    """The same model with only its first blocks."""
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("blocks.") or int(name.split(".")[1]) < depth
    }
    short = vt.ViT(dataclasses.replace(model.config, depth=depth))
    short.load_state_dict(state)
    return short.eval()


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_block_equals_the_truncated_model(name):
    model = build(name)
    images = images_for(model, 3)
    found = lens.compute(model, images)
    target = model(images).argmax(1)
    assert found.target.tolist() == target.tolist()
    for depth in range(model.config.depth):
        with torch.no_grad():
            p = truncated(model, depth + 1)(images).softmax(1)
        assert found.probability[depth] == pytest.approx(p[range(3), target].numpy(), abs=1e-5)
        assert found.top[depth].tolist() == p.argmax(1).tolist()
        assert found.top_probability[depth] == pytest.approx(p.max(1).values.numpy(), abs=1e-5)


def make_result(top):
    top = np.array(top)
    p = np.linspace(0.1, 0.9, top.size, dtype=np.float32).reshape(top.shape)
    return Lens(top[-1], p, top, p)


# four blocks by four images: settled at once, changed in the last block, in the middle, and changed back
TOP = [[7, 1, 1, 3], [7, 1, 2, 5], [7, 1, 2, 3], [7, 4, 2, 3]]


def test_settled_is_the_block_after_which_predictions_stop_changing():
    found = make_result(TOP)
    assert found.settled.tolist() == [0, 3, 1, 2]
    assert found.agreement.tolist() == [0.5, 0.5, 0.75, 1.0]
    text = lens.caption(found)
    assert "The prediction stops changing after block 1.5 on average over 4 images" in text
    assert "(earliest 0, latest 3); blocks are numbered 0 to 3" in text
    assert "50% of the predictions" in text
    one = lens.caption(make_result([[7], [1]]))
    assert "The prediction stops changing after block 1; blocks" in one


def test_the_target_is_tracked():
    model = build()
    images = images_for(model)
    found = lens.compute(model, images, target=3)
    assert found.target.tolist() == [3, 3]
    with torch.no_grad():
        assert found.probability[-1] == pytest.approx(model(images).softmax(1)[:, 3].numpy(), abs=1e-5)


def test_many_images_are_processed_in_chunks_and_modes_are_restored():
    model = build(dropout=0.5).train()
    images = images_for(model, 70)
    found = lens.compute(model, images)
    assert model.training
    assert model.blocks[1].training
    assert found.top.shape == (2, 70)
    assert found.top[-1].tolist() == model.eval()(images).argmax(1).tolist()


@pytest.mark.parametrize(
    ("depth", "count"), [(1, 1), (2, 3), (32, 12)], ids=["one block", "two blocks", "32 blocks"]
)
def test_figure_is_legible(depth, count):
    model = build(depth=depth)
    found = lens.compute(model, images_for(model, count))
    names = [f"an image with a long name {n}" for n in range(count)]
    figure = lens.draw(found, ["a class with a long name"] * 5, names)
    assert_legible(figure)
    assert_legible(lens.draw(found))
    table = figure.axes[2]
    assert len(table.texts) == depth * min(count, 8)
    assert ("the first 8 of 12 images" in table.get_title()) == (count == 12)
    bold = sum(text.get_fontweight() == "bold" for text in table.texts)
    assert bold == sum(depth - settled for settled in found.settled[:8])
    header, rows = lens.table(found)
    assert header == ["block", "probability", "agreement"]
    assert len(rows) == depth
    assert rows[-1][1:3] == [pytest.approx(found.probability[-1].mean()), 1.0]


def test_the_thick_line_is_the_mean():
    found = make_result(TOP)
    lines = lens.draw(found).axes[0].lines
    assert lines[4].get_label() == "mean"
    assert lines[4].get_ydata() == pytest.approx(found.probability.mean(axis=1))
    assert lines[4].get_linewidth() > 2 * lines[0].get_linewidth()


def test_invalid_inputs_are_rejected():
    model = build()
    images = images_for(model)
    with pytest.raises(vt.InputError, match="target must hold class indices from 0 to 4, not -1, 9"):
        lens.compute(model, images, target=[-1, 9])
    with pytest.raises(vt.InputError, match="target must hold one integer class index for each of 2 images"):
        lens.compute(model, images, target=[0])
    with pytest.raises(vt.InputError, match="needs a classifier"):
        lens.compute(build(classes=0), images)
    with pytest.raises(vt.InputError, match="1 names do not match 2 images"):
        lens.draw(lens.compute(model, images), names=["one"])
