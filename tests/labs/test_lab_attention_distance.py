"""Lab `attention-distance`: the trend over layers, the heads of the first, and known cases of both."""

import numpy as np
import pytest
import torch

from vitrail.labs import attention_distance as lab
from vitrail.labs.given import of_the_notes, opened
from vitrail.labs.lab import Verdict
from vitrail.labs.study import settled
from vitrail.labs.trial import one_thread


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with one_thread():
        return lab.run(tmp_path_factory.mktemp("distance"), "small")


def test_a_number_a_picture_a_verdict(result):
    heads = np.array(result.numbers["share of the uniform distance, by seed, layer and head"])
    assert heads.shape == (2, 6, 2)
    assert (heads > 0).all()
    assert result.number == pytest.approx(np.mean([100 * lab.slope(one) for one in heads]))
    assert result.numbers["nearest and farthest head of the first layer"][0] == (
        heads[0, 0].min(),
        heads[0, 0].max(),
    )
    assert result.n == 2
    assert result.verdict.word in ("holds", "holds if", "does not hold")
    assert "6 layers" in result.sentence
    assert len(result.figure.axes) == 2


def test_the_slope_is_that_of_a_straight_line():
    heads = np.array([[0.5, 0.7], [0.6, 0.8], [0.7, 0.9]])
    assert lab.slope(heads) == pytest.approx(0.1)
    assert lab.slope(heads[::-1]) == pytest.approx(-0.1)


def test_a_model_that_looks_at_all_alike_is_at_one():
    """With q and k zero, attention is uniform in every layer."""
    data = opened(None, 20, 10)
    recipe = settled("mnist-notes", data, {}, {"model": {**of_the_notes(data), "depth": 3}}, 1e-3, 0)
    torch.manual_seed(0)
    state = {name: tensor.numpy().copy() for name, tensor in lab.ViT(recipe.model).state_dict().items()}
    for name in state:
        if "attention.qkv" in name:
            state[name][: 2 * recipe.model.width] = 0
    assert lab.measure(recipe, data, state) == pytest.approx(np.ones((3, 4)))
    assert lab.measure(recipe, data, None) != pytest.approx(np.ones((3, 4)))


def test_the_verdict_can_go_every_way():
    up, flat, down = [5.0, 5.2, 5.1], [5.0, -5.0, 0.1], [-5.0, -5.2, -5.1]
    both, far = [(0.2, 0.95)] * 3, [(0.8, 0.95)] * 3
    assert lab.judge(up, both) == Verdict("holds")
    assert lab.judge(up, far).condition.startswith(
        "depth alone is meant: heads of the first layer reach from 80% to 95%"
    )
    assert "looks nearer" in lab.judge(down, both).condition
    assert "neither clearly" in lab.judge(flat, both).condition
    assert lab.judge(down, far).word == lab.judge(flat, far).word == "does not hold"
    assert lab.judge([5.0], both).word == "holds if"  # one seed shows no trend
    assert lab.judge(up, [(0.2, 0.95), *far[:2]]).word == "holds if"  # most seeds, not one of them
