"""Each likely slip, made in a student's file, is told in its own words; and the reference is right."""

from pathlib import Path

import made_slips
import pytest
import torch

from vitrail.exercises.exercise import EXERCISES
from vitrail.exercises.mark import mark
from vitrail.exercises.run import STUDENT

SOLUTION = Path(made_slips.__file__).with_name("solution.py").read_text()
OTHER = Path(made_slips.__file__).with_name("other_solution.py").read_text()
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}


@pytest.fixture(autouse=True)
def one_thread():
    """On tensors this small more of them only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def student(*changes, text=SOLUTION):
    """The names of a student's file: a solution with some of its text changed."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    names = {}
    exec(compile(text, STUDENT, "exec"), names)
    return names


@pytest.mark.parametrize("text", [SOLUTION, OTHER], ids=["solution", "other"])
def test_a_solution_is_right(text):
    names = student(text=text)
    for exercise in EXERCISES:
        made = mark(exercise, names)
        assert made == (exercise.name, "right", exercise.must, "")


@pytest.mark.parametrize(
    ("name", "changes", "words"), made_slips.MADE, ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_slip_is_told(name, changes, words):
    exercise = BY_NAME[name]
    sentences = {slip.words for slip in exercise.slips if slip.words.startswith(words)}
    assert len(sentences) == 1, sentences
    made = mark(exercise, student(*changes))
    assert (made.verdict, made.likely) == ("wrong", sentences.pop()), made
    assert made.words.startswith(exercise.must)


def test_every_slip_is_made():
    for exercise in EXERCISES:
        made = [words for name, _, words in made_slips.MADE if name == exercise.name]
        assert len(made) == len(exercise.slips)
        for slip in exercise.slips:
            assert any(slip.words.startswith(words) for words in made), slip.words


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_no_slip_is_near_the_right_answer_or_near_another(exercise):
    torch.set_default_dtype(torch.float64)
    try:
        cases = exercise.cases(torch.Generator().manual_seed(2017))
        right = [exercise.reference(*case) for case in cases]
        wrong = [[slip.function(*case) for case in cases] for slip in exercise.slips]
    finally:
        torch.set_default_dtype(torch.float32)

    def apart(one, other):
        return max(
            1.0 if a.shape != b.shape else (a - b).nan_to_num(nan=1.0).abs().max().item()
            for a, b in zip(one, other, strict=True)
        )

    for i, one in enumerate(wrong):
        assert apart(one, right) > 1e-5, exercise.slips[i].words
        for j, other in enumerate(wrong[:i]):
            assert apart(one, other) > 1e-5, (exercise.slips[i].words, exercise.slips[j].words)
