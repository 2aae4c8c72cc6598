"""Each common mistake in a student's file gets its own explanation; correct solutions get none."""

import pytest
import torch

from tests.support.mistakes import (
    FIRST,
    FLAT,
    GRID,
    LAST_NORM,
    LOGITS,
    LOOP,
    MISTAKES,
    NORM1,
    NORM2,
    NORM_IN_LOOP,
    SECOND,
    TURNED,
    VAR,
)
from tests.support.students import EXERCISE, OTHER_SOLUTION, SOLUTION, run_student
from vitrail_course.exercises.exercise import EXERCISES
from vitrail_course.exercises.mark import check_exercise


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


EPS = 'layer_norm(z, weights["norm.weight"], weights["norm.bias"]'
TWO_MISTAKES = [
    (
        "layer_norm",
        [(", correction=0", ""), (" * weight + bias", " * weight")],
        ["The variance is the unbiased one", "The bias is missing."],
    ),
    (
        "patches",
        [(GRID, TURNED), (FLAT, "patch.permute(0, 2, 3, 1).reshape(B, -1)")],
        ["The grid is read column by column.", "The channels come last in a flat patch."],
    ),
    (
        "patches",
        [(FLAT, "patch.mT.reshape(B, -1)"), ("torch.stack(cut, dim=1)", "torch.stack(cut, dim=2)")],
        ["Each patch is transposed", "The last two dimensions are swapped."],
    ),
    (
        "block",
        [(FIRST, FIRST.replace(" + z\n", " + normed\n")), (SECOND, SECOND.removesuffix(" + z1"))],
        ["The second residual is missing", "The first residual adds the normalized tokens, LN(z)."],
    ),
    (
        "block",
        [(FIRST, FIRST.replace(" + z\n", "\n")), (NORM2, NORM2.replace("norm2", "norm1"))],
        ["The first residual is missing", "Both norms use the weights of norm1."],
    ),
    (
        "block",
        [
            (NORM2, NORM2.replace('bias"])', 'bias"], 1e-5)')),
            (NORM1, NORM1.replace('bias"])', 'bias"], 1e-5)')),
            (SECOND, SECOND.replace("+ z1", "+ z")),
        ],
        ["The second residual adds z.", "eps of the norms is 1e-5"],
    ),
    (
        "vit",
        [(LOOP, NORM_IN_LOOP), (EPS, f"{EPS}, 1e-5")],
        ["The last norm is applied after every block.", "eps of the last norm is 1e-5"],
    ),
    (
        "vit",
        [(LOOP, NORM_IN_LOOP), (LAST_NORM, "z[:, 0]"), (EPS, f"{EPS}, 1e-5")],
        ["The last norm is applied after every block.", "eps of the last norm is 1e-5"],
    ),
    (
        "vit",
        [(LOGITS, f"F.log_softmax({LOGITS}, dim=-1)"), (" + E_pos", "")],
        ["The position embeddings are missing.", "A softmax, log-softmax or sigmoid"],
    ),
    (
        "patches",
        [(GRID, TURNED), (FLAT, "patch.mT.reshape(B, -1)")],
        ["The grid is read column by column", "Each patch is transposed"],
    ),
    (
        "layer_norm",
        [(VAR, "x.std(dim=-1, keepdim=True)"), ("torch.sqrt(variance + eps)", "(variance + eps)")],
        ["The variance is the unbiased one", "eps is added outside"],
    ),
    ("layer_norm", [(" * weight + bias", "")], ["The weight is missing.", "The bias is missing."]),
    (
        "block",
        [(FIRST, FIRST.replace(" + z\n", "\n")), (SECOND, SECOND.removesuffix(" + z1"))],
        ["The first residual is missing", "The second residual is missing"],
    ),
    (
        "block",
        [(FIRST, FIRST.replace(" + z\n", " + normed\n")), (SECOND, SECOND.replace("+ z1", "+ normed"))],
        ["The first residual adds the normalized", "The second residual adds the normalized"],
    ),
]


@pytest.mark.parametrize(("name", "changes", "beginnings"), TWO_MISTAKES)
def test_two_mistakes_at_once(name, changes, beginnings):
    mark = check_exercise(EXERCISE[name], run_student(*changes))
    first, found, second = mark.hint.partition(" And: ")
    assert (mark.verdict, bool(found)) == ("wrong", True), mark
    assert first.startswith(f"Two mistakes. {beginnings[0]}"), mark.hint
    assert second.startswith(beginnings[1]), mark.hint


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
