"""`vt.check(globals())` in a notebook."""

import pytest
import torch

import vitrail as vt
from tests.support.notebooks import execute
from vitrail_course.exercises import reference
from vitrail_course.exercises.run import NAMES


def wrong_layer_norm(x, weight, bias, eps=1e-6):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + eps).sqrt() * weight + bias


def test_functions_are_found_by_name_and_marked():
    names = {"layer_norm": wrong_layer_norm, "attention": reference.attention, "mlp": 3, "other": print}
    marks = vt.check(names)
    assert [(mark.name, mark.verdict) for mark in marks] == [
        ("layer_norm", "wrong"),
        ("attention", "correct"),
    ]
    assert not marks.all_correct
    text = repr(marks)
    assert "Likely mistake: The variance is the unbiased one" in text
    assert text.endswith("1 of 2 correct.")
    assert "<td" in marks._repr_html_()
    assert vt.check(names, "attention").all_correct
    assert names["layer_norm"] is wrong_layer_norm  # the notebook's names are as they were
    assert torch.get_default_dtype() == torch.float32


def test_all_eight_at_once():
    assert vt.check({name: getattr(reference, name) for name in NAMES} | vars(reference)).all_correct


def test_a_missing_exercise_is_not_written_yet():
    (mark,) = vt.check({}, "mlp")
    assert (mark.verdict, mark.message) == ("not yet", "There is no function mlp.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({},), "no exercise to check: define a function named patches, .* or vit"),
        (({}, "atention"), "Unknown exercise 'atention'. Did you mean 'attention'"),
        (([],), r"vt.check\(globals\(\)\), not a list"),
    ],
)
def test_wrong_use_is_explained(arguments, message):
    with pytest.raises(vt.InputError, match=message):
        vt.check(*arguments)


def test_in_a_notebook_the_line_of_an_error_is_named(tmp_path):
    cell = "def mlp(z, weights):\n    hidden = z @ weights['fc1.weight']\n    return hidden\n"
    (_, [output]) = execute(tmp_path, cell, "import vitrail as vt\nvt.check(globals())")
    assert "Line 2, in mlp: RuntimeError" in output["data"]["text/plain"]
    assert "Line 2, in mlp" in output["data"]["text/html"]
