"""Lab `attention-distance`: the slope over layers, the heads of the first layer, and known cases."""

import numpy as np
import pytest
import torch

from vitrail.course.labs import attention_distance as lab
from vitrail.course.labs.datasets import lecture_model_fields, load_dataset
from vitrail.course.labs.lab import Verdict
from vitrail.experiment.study import resolve_arm
from vitrail.experiment.trial import one_thread


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with one_thread():
        return lab.run(tmp_path_factory.mktemp("distance"), "small")


def test_small_run_gives_number_figure_and_verdict(result):
    heads = np.array(result.numbers["fraction of the uniform distance, by seed, layer and head"])
    assert heads.shape == (2, 6, 2)
    assert (heads > 0).all()
    assert result.number == pytest.approx(np.mean([100 * lab.slope_per_layer(one) for one in heads]))
    assert result.numbers["nearest and farthest head of the first layer"][0] == (
        heads[0, 0].min(),
        heads[0, 0].max(),
    )
    assert result.n == 2
    assert result.verdict.word in ("holds", "partly", "does not hold")
    assert "6 layers" in result.sentence
    assert len(result.figure.axes) == 2


def test_slope_of_a_straight_line():
    heads = np.array([[0.5, 0.7], [0.6, 0.8], [0.7, 0.9]])
    assert lab.slope_per_layer(heads) == pytest.approx(0.1)
    assert lab.slope_per_layer(heads[::-1]) == pytest.approx(-0.1)


def test_uniform_attention_has_distance_one():
    """With q and k zero, attention is uniform in every layer."""
    data = load_dataset(None, 20, 10)
    recipe = resolve_arm(
        "mnist-notes", data, {}, {"model": {**lecture_model_fields(data), "depth": 3}}, 1e-3, 0
    )
    torch.manual_seed(0)
    state = {name: tensor.numpy().copy() for name, tensor in lab.ViT(recipe.model).state_dict().items()}
    for name in state:
        if "attention.qkv" in name:
            state[name][: 2 * recipe.model.width] = 0
    assert lab.measure_distances(recipe, data, state) == pytest.approx(np.ones((3, 4)))
    assert lab.measure_distances(recipe, data, None) != pytest.approx(np.ones((3, 4)))


def test_verdict_for_every_outcome():
    up, flat, down = [5.0, 5.2, 5.1], [5.0, -5.0, 0.1], [-5.0, -5.2, -5.1]
    both, far = [(0.2, 0.95)] * 3, [(0.8, 0.95)] * 3
    assert lab.decide_verdict(up, both) == Verdict("holds")
    assert lab.decide_verdict(up, far).condition.endswith(
        "heads of the first layer reach from 80% to 95% of the uniform distance"
    )
    assert "shrinks" in lab.decide_verdict(down, both).condition
    assert "neither clearly grows" in lab.decide_verdict(flat, both).condition
    assert lab.decide_verdict(down, far).word == lab.decide_verdict(flat, far).word == "does not hold"
    assert lab.decide_verdict([5.0], both).word == "partly"  # one seed shows no trend
    assert lab.decide_verdict(up, [(0.2, 0.95), *far[:2]]).word == "partly"  # most seeds, not one of them
