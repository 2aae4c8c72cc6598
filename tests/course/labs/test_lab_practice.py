"""Lab `practice`: the steps are those of the lecture notes, each compared with the one that it changes."""

import numpy as np
import pytest
import torch

from vitrail.course.labs import practice as lab
from vitrail.course.labs.datasets import load_dataset
from vitrail.course.labs.lab import Verdict
from vitrail.experiment.study import Difference
from vitrail.experiment.trial import one_thread
from vitrail.model.position import sincos


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with one_thread():
        return lab.run(tmp_path_factory.mktemp("practice"), "small")


def test_small_run_gives_number_figure_and_verdict(result):
    names = [step.name for step in (lab.START, *lab.STEPS, *lab.VARIANTS)]
    assert list(result.numbers["scores"]) == names
    assert list(result.numbers["gains"]) == names[1:]
    scores = result.numbers["scores"]
    assert result.number == pytest.approx(
        100 * np.mean(np.subtract(scores["more training"], scores["start"]))
    )
    variant_gain = np.mean(np.subtract(scores["no class token"], scores["weight decay"]))
    assert result.numbers["gains"]["no class token"][0] == pytest.approx(variant_gain)
    assert result.verdict.word in ("holds", "partly", "does not hold")
    assert "48 training images" in result.sentence
    assert len(result.figure.axes) == 2


def test_E_is_the_projection_weight(result):
    E = result.numbers["E"]
    assert E["name"] == "tokens.proj.weight"
    assert E["stored"] == (64, 1, 4, 4)
    assert E["as a matrix"] == (16, 64)
    assert E["difference"] < 1e-5


def test_steps_are_those_of_the_lecture_notes():
    steps = {step.name: step for step in lab.cumulative_steps(1, 1)}
    start, solution = steps["start"], steps["more training"]
    assert {key: start.model[key] for key in ("width", "heads", "depth", "patch", "size")} == dict(
        width=9, heads=3, depth=3, patch=16, size=32
    )
    assert (start.train["lr"], start.train["batch"], start.train["weight_decay"]) == (5e-3, 128, 0)
    assert {key: solution.model[key] for key in ("width", "heads", "depth", "patch", "size")} == dict(
        width=64, heads=4, depth=2, patch=4, size=28
    )
    assert (solution.train["lr"], solution.train["batch"], solution.train["weight_decay"]) == (
        1e-3,
        256,
        0.05,
    )
    assert solution.model["attention_dropout"] == 0.1
    assert (steps["10 epochs"].train["epochs"], solution.train["epochs"]) == (10, 30)
    assert steps["no class token"].base == steps["trainable positions"].base == "weight decay"
    assert "position" not in steps["no class token"].model  # each variant separately
    assert steps["no class token"].train["epochs"] == 10
    main_steps = list(steps.values())[:-2]
    assert [step.base for step in main_steps] == ["", *(step.name for step in main_steps[:-1])]
    for step, before in zip(main_steps[1:], main_steps, strict=False):  # one change at a time
        assert (step.model != before.model) != (step.train != before.train)
    divided = {step.name: step for step in lab.cumulative_steps(8, 5)}
    assert (divided["start"].train["batch"], divided["10 epochs"].train["epochs"]) == (16, 2)


def test_start_model_and_its_fixed_positions():
    data = load_dataset(None, 40, 20)
    recipe = lab.recipe_for(lab.cumulative_steps(8, 5)[0], data, 3)
    assert (recipe.model.grid, recipe.model.width, recipe.train.seed) == ((2, 2), 9, 3)
    positions = lab.sinusoidal_positions(5, 9)
    assert positions.shape == (5, 9)
    assert np.allclose(positions[3, :2], [np.sin(3), np.cos(3)])
    assert np.allclose(positions[3, 2], np.sin(3 / 10_000 ** (2 / 9)))
    assert np.array_equal(lab.sinusoidal_positions(50, 64), sincos(torch.arange(50), 64).numpy())


def clear(mean):
    return Difference(mean, (mean - 0.01, mean + 0.01), 3)


def test_verdict_for_every_outcome():
    names = [step.name for step in lab.STEPS]
    all_better = dict.fromkeys(names, clear(0.1))
    assert lab.decide_verdict(clear(0.5), all_better, 0.985, 60_000) == Verdict("holds")
    assert lab.decide_verdict(clear(0.5), all_better, 0.961, 20_000).condition.endswith(
        "gain (with 20,000 images the final accuracy is 96.1%, not 98%)"
    )
    unclear = dict.fromkeys(names, Difference(0.01, (-0.1, 0.12), 3))
    steps = lab.decide_verdict(
        clear(0.5), unclear | {"2 layers": clear(-0.1), "batch 256": clear(0.1)}, 0.985, 60_000
    )
    assert steps.word == "partly"
    assert "batch 256 gains, 2 layers costs, the others" in steps.condition
    assert "weight decay and batch 256 gain" not in steps.condition
    assert "none gains clearly" in lab.decide_verdict(clear(0.5), unclear, 0.985, 60_000).condition
    three_better = unclear | {"10 epochs": clear(0.1), "lr 0.001": clear(0.1), "batch 256": clear(0.1)}
    assert (
        "lr 0.001, batch 256 and 10 epochs gain,"
        in lab.decide_verdict(clear(0.5), three_better, 0.985, 60_000).condition
    )
    for no_gain in (clear(-0.5), Difference(0.5, (-0.1, 1.1), 2), Difference(0.5, None, 1)):
        assert lab.decide_verdict(no_gain, all_better, 0.985, 60_000).word == "does not hold"
