"""Lab `practice`: the ladder is the notes', and each step is compared with the one it goes on from."""

import numpy as np
import pytest
import torch

from vitrail.labs import practice as lab
from vitrail.labs.given import opened
from vitrail.labs.lab import Verdict
from vitrail.labs.study import Difference
from vitrail.labs.trial import one_thread
from vitrail.model.position import sincos


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with one_thread():
        return lab.run(tmp_path_factory.mktemp("practice"), "small")


def test_a_number_a_picture_a_verdict(result):
    names = [step.name for step in (lab.WEAK, *lab.STEPS, *lab.ASIDE)]
    assert list(result.numbers["scores"]) == names
    assert list(result.numbers["gains"]) == names[1:]
    scores = result.numbers["scores"]
    assert result.number == pytest.approx(
        100 * np.mean(np.subtract(scores["more training"], scores["the start"]))
    )
    aside = np.mean(np.subtract(scores["no class token"], scores["weight decay"]))
    assert result.numbers["gains"]["no class token"][0] == pytest.approx(aside)
    assert result.verdict.word in ("holds", "holds if", "does not hold")
    assert "48 pictures" in result.sentence
    assert len(result.figure.axes) == 2


def test_where_E_is(result):
    E = result.numbers["E"]
    assert E["name"] == "tokens.proj.weight"
    assert E["stored"] == (64, 1, 4, 4)
    assert E["as a matrix"] == (16, 64)
    assert E["difference"] < 1e-5


def test_the_ladder_is_the_notes():
    found = {step.name: step for step in lab.climbed(1, 1)}
    start, solved = found["the start"], found["more training"]
    assert {key: start.model[key] for key in ("width", "heads", "depth", "patch", "size")} == dict(
        width=9, heads=3, depth=3, patch=16, size=32
    )
    assert (start.train["lr"], start.train["batch"], start.train["weight_decay"]) == (5e-3, 128, 0)
    assert {key: solved.model[key] for key in ("width", "heads", "depth", "patch", "size")} == dict(
        width=64, heads=4, depth=2, patch=4, size=28
    )
    assert (solved.train["lr"], solved.train["batch"], solved.train["weight_decay"]) == (1e-3, 256, 0.05)
    assert solved.model["attention_dropout"] == 0.1
    assert (found["10 epochs"].train["epochs"], solved.train["epochs"]) == (10, 30)
    assert found["no class token"].after == found["trainable positions"].after == "weight decay"
    assert "position" not in found["no class token"].model  # each question by itself
    assert found["no class token"].train["epochs"] == 10
    steps = list(found.values())[:-2]
    assert [step.after for step in steps] == ["", *(step.name for step in steps[:-1])]
    for step, before in zip(steps[1:], steps, strict=False):  # one thing at a time
        assert (step.model != before.model) != (step.train != before.train)
    fewer = {step.name: step for step in lab.climbed(8, 5)}
    assert (fewer["the start"].train["batch"], fewer["10 epochs"].train["epochs"]) == (16, 2)


def test_the_weak_model_is_weak_and_its_positions_are_fixed():
    data = opened(None, 40, 20)
    recipe = lab.recipe_for(lab.climbed(8, 5)[0], data, 3)
    assert (recipe.model.grid, recipe.model.width, recipe.train.seed) == ((2, 2), 9, 3)
    rows = lab.sines(5, 9)
    assert rows.shape == (5, 9)
    assert np.allclose(rows[3, :2], [np.sin(3), np.cos(3)])
    assert np.allclose(rows[3, 2], np.sin(3 / 10_000 ** (2 / 9)))
    assert np.array_equal(lab.sines(50, 64), sincos(torch.arange(50), 64).numpy())


def clear(mean):
    return Difference(mean, (mean - 0.01, mean + 0.01), 3)


def test_the_verdict_can_go_every_way():
    names = [step.name for step in lab.STEPS]
    up = dict.fromkeys(names, clear(0.1))
    assert lab.judge(clear(0.5), up, 0.985, 60_000) == Verdict("holds")
    assert lab.judge(clear(0.5), up, 0.961, 20_000).condition.endswith(
        "gain (with 20,000 pictures the end is 96.1%, not 98%)"
    )
    flat = dict.fromkeys(names, Difference(0.01, (-0.1, 0.12), 3))
    found = lab.judge(clear(0.5), flat | {"2 layers": clear(-0.1), "batch 256": clear(0.1)}, 0.985, 60_000)
    assert found.word == "holds if"
    assert "batch 256 gains, 2 layers costs, the others" in found.condition
    assert "weight decay and batch 256 gain" not in found.condition
    assert "no step alone" in lab.judge(clear(0.5), flat, 0.985, 60_000).condition
    both = flat | {"10 epochs": clear(0.1), "rate 0.001": clear(0.1), "batch 256": clear(0.1)}
    assert "rate 0.001, batch 256 and 10 epochs gain," in lab.judge(clear(0.5), both, 0.985, 60_000).condition
    for bad in (clear(-0.5), Difference(0.5, (-0.1, 1.1), 2), Difference(0.5, None, 1)):
        assert lab.judge(bad, up, 0.985, 60_000).word == "does not hold"
