"""Each common mistake in a student's file gets its own explanation; correct solutions get none."""

import pytest
import torch

from tests.support.mistakes import MISTAKES
from tests.support.students import EXERCISE, OTHER_SOLUTION, SOLUTION, run_student
from vitrail.course.exercises.exercise import EXERCISES
from vitrail.course.exercises.mark import check_exercise


@pytest.mark.parametrize("text", [SOLUTION, OTHER_SOLUTION], ids=["solution", "other"])
def test_a_solution_is_correct(text):
    namespace = run_student(text=text)
    for exercise in EXERCISES:
        assert check_exercise(exercise, namespace) == (exercise.name, "correct", exercise.task, "")


@pytest.mark.parametrize(
    ("name", "changes", "beginning"), MISTAKES, ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_mistake_is_explained(name, changes, beginning):
    exercise = EXERCISE[name]
    explanations = {one.explanation for one in exercise.mistakes if one.explanation.startswith(beginning)}
    assert len(explanations) == 1, explanations
    mark = check_exercise(exercise, run_student(*changes))
    assert (mark.verdict, mark.hint) == ("wrong", explanations.pop()), mark
    assert mark.message.startswith(exercise.task)


def test_every_mistake_has_a_test():
    for exercise in EXERCISES:
        beginnings = [beginning for name, _, beginning in MISTAKES if name == exercise.name]
        assert len(beginnings) == len(exercise.mistakes)
        for mistake in exercise.mistakes:
            assert mistake.explanation.startswith(tuple(beginnings)), mistake.explanation


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_mistakes_differ_from_the_solution_and_from_each_other(exercise):
    torch.set_default_dtype(torch.float64)
    try:
        cases = exercise.cases(torch.Generator().manual_seed(2017))
        expected = [exercise.reference(*case) for case in cases]
        wrong = [[mistake.function(*case) for case in cases] for mistake in exercise.mistakes]
    finally:
        torch.set_default_dtype(torch.float32)

    def distance(one, other):
        return max(
            1.0 if a.shape != b.shape else (a - b).nan_to_num(nan=1.0).abs().max().item()
            for a, b in zip(one, other, strict=True)
        )

    for i, one in enumerate(wrong):
        assert distance(one, expected) > 1e-5, exercise.mistakes[i].explanation
        for j, other in enumerate(wrong[:i]):
            assert distance(one, other) > 1e-5, (i, j, exercise.mistakes[i].explanation)


def test_two_mistakes_at_once():
    exercise = EXERCISE["layer_norm"]
    mark = check_exercise(exercise, run_student((", correction=0", ""), (" * weight + bias", " * weight")))
    assert mark.hint.startswith("Two mistakes. The variance is the unbiased one")
    assert "And: The bias is missing." in mark.hint


def test_a_random_result():
    change = ("scores.softmax(dim=-1) @ v", "F.dropout(scores.softmax(dim=-1), 0.5) @ v")
    mark = check_exercise(EXERCISE["attention"], run_student(change))
    assert mark.verdict == "wrong"
    assert "Is dropout left on?" in mark.message


def test_a_norm_inside_the_loop_is_found_where_it_first_matters():
    loop = 'z = block(z, inside(weights, f"blocks.{index}"), config.heads)\n'
    norm = '        z = layer_norm(z, weights["norm.weight"], weights["norm.bias"])\n'
    mark = check_exercise(EXERCISE["vit"], run_student((loop, loop + norm)))
    assert "First wrong tensor: z_1" in mark.message
