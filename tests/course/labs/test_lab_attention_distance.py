"""Lab `attention-distance`: the slope over layers, the heads of the first layer, and known cases."""

import numpy as np
import pytest
import torch

from vitrail.experiment.study import resolve_arm
from vitrail.experiment.trial import one_thread
from vitrail_course.labs import attention_distance as lab
from vitrail_course.labs.datasets import lecture_model_fields, load_dataset


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with one_thread():
        return lab.run(tmp_path_factory.mktemp("distance"), "small")


def test_small_run_gives_number_figure_and_verdict(result):
    heads = np.array(result.numbers["fraction of the uniform distance, by seed, layer and head"])
    assert heads.shape == (2, 6, 2)
    assert (heads > 0).all()
    before = np.array(result.numbers["before training"])
    slopes = [[100 * lab.slope_per_layer(one) for one in group] for group in (heads, before)]
    assert result.number == pytest.approx(np.mean(np.subtract(*slopes)))
    assert result.n == 2
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


def distances(slope, nearest, farthest, noise=0.001):
    """Two heads in three layers: the nearest and the farthest one, moved by the slope in each layer."""
    layers = [[nearest + slope * n + noise, farthest + slope * n - noise] for n in range(3)]
    return layers


def test_verdict_for_every_outcome():
    def verdict(trained, untrained=((0.0, 0.97, 0.98),) * 3):
        return lab.decide_verdict(
            {
                "fraction of the uniform distance, by seed, layer and head": [
                    distances(*one) for one in trained
                ],
                "before training": [distances(*one) for one in untrained],
            }
        )

    up, local = (0.05, 0.051, 0.052), (0.2, 0.95)
    assert verdict([(slope, *local) for slope in up]).word == "holds"
    far = verdict([(slope, 0.8, 0.95, n / 100) for n, slope in enumerate(up)])
    assert far.word == "partly"
    assert "Not true: in its lowest layers, the first 1 of 3, some heads attend locally (the" in far.condition
    assert "(the nearest head: 81.0 [" in far.condition
    assert "local below 50%" in far.condition
    assert (
        "Not true: in this small ViT, attention distance grows"
        in verdict([(-slope, *local) for slope in up]).condition
    )
    before = [(0.0, 0.8, 0.95, n / 200) for n in range(3)]
    as_before = verdict([(slope, 0.8, 0.95, n / 200) for n, slope in enumerate((0.05, 0.052, 0.051))], before)
    assert (
        "Not clear: in the lowest layers some heads attend globally, others nearer" in as_before.condition
    ), "untrained heads attend globally, too"
    assert "global above 90%, but 94.5 % before training" in as_before.condition
    unclear = verdict([(slope, *local) for slope in (0.05, -0.05, 0.001)])
    assert "Not clear: in this small ViT, attention distance grows" in unclear.condition
    already = [(slope, 0.97, 0.98) for slope in (0.05, 0.0508, 0.0521)]
    same = verdict([(slope, *local) for slope in up], already)
    assert "Not clear: in this small ViT, attention distance grows" in same.condition, (
        "it grew as much before training"
    )


def test_the_lowest_third_of_the_layers_counts():
    """A local head in layer 1 of 6 is one of the lowest layers, a local head in layer 2 is not."""
    for layer, word in ((1, "True"), (2, "Not true")):
        heads = np.full((3, 6, 2), 0.8) + np.arange(3)[:, None, None] / 1000
        heads[:, layer, 0] = 0.2
        numbers = {"fraction of the uniform distance, by seed, layer and head": heads.tolist()}
        condition = lab.decide_verdict({**numbers, "before training": heads.tolist()}).condition
        assert f"{word}: in its lowest layers, the first 2 of 6, some heads attend locally" in condition
