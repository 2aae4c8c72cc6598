"""Lab `practice`: the steps are those of the lecture notes, each compared with the one that it changes."""

import numpy as np
import pytest
import torch

from vitrail.experiment.trial import one_thread
from vitrail.model import ViT
from vitrail.training.recipes import recipes
from vitrail_course.labs import practice as lab
from vitrail_course.labs.datasets import load_dataset


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with one_thread():
        return lab.run(tmp_path_factory.mktemp("practice"), "small")


def test_small_run_gives_number_figure_and_verdict(result):
    names = [step.name for step in (lab.START, *lab.STEPS, *lab.VARIANTS)]
    assert list(result.numbers["scores"]) == names
    scores = result.numbers["scores"]
    assert result.number == pytest.approx(
        100 * np.mean(np.subtract(scores["more training"], scores["start"]))
    )
    assert "48 training images" in result.setting
    assert len(result.figure.axes) == 2


def test_steps_are_those_of_the_lecture_notes():
    steps = {step.name: step for step in lab.cumulative_steps(1, 1)}
    start, solution = steps["start"], steps["more training"]
    assert start.model == dict(patch=16, size=32)  # the rest is the recipe's
    assert (start.train["lr"], start.train["batch"]) == (5e-3, 128)
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


def test_start_model():
    data = load_dataset(None, 40, 20)
    recipe = lab.recipe_for(lab.cumulative_steps(8, 5)[0], data, 3)
    assert (recipe.model.grid, recipe.model.width, recipe.train.seed) == ((2, 2), 9, 3)
    solution = lab.recipe_for(lab.cumulative_steps(1, 1)[9], data, 0)
    assert (solution.model.position, solution.train.schedule, solution.train.lr) == (
        "sincos1d",
        "constant",
        1e-3,
    )


def test_weak_model_is_a_recipe():
    recipe = recipes()["mnist-weak"](load_dataset(None, 40, 20))
    model, train = recipe.model, recipe.train
    assert (model.width, model.heads, model.depth, model.position) == (9, 3, 3, "sincos1d")
    assert (model.patch_pixels, model.pixels, recipe.preprocess.size) == ((16, 16), (32, 32), (32, 32))
    assert (train.lr, train.batch, train.epochs, train.weight_decay) == (5e-3, 128, 5, 0.0)
    assert (train.schedule, train.warmup, train.clip) == ("constant", 0.0, 0.0)
    table = ViT(model).position.fixed
    assert table.shape == (5, 9)
    assert torch.allclose(table[3, :2], torch.tensor([np.sin(3.0), np.cos(3.0)], dtype=torch.float32))
    assert table[3, 8].item() == pytest.approx(np.sin(3 / 10_000 ** (8 / 9)))
