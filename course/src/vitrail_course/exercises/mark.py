"""Check one exercise: correct, wrong, not yet written, or an error, with an explanation."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from vitrail.base.errors import printable
from vitrail_course.exercises.calls import (
    first_wrong_argument,
    first_wrong_function,
    reference_calls,
    run_with_reference,
)
from vitrail_course.exercises.compare import (
    copy_value,
    describe_difference,
    is_same,
    is_same_mistake,
    is_unchanged,
)
from vitrail_course.exercises.exercise import Case, CommonMistake, Exercise
from vitrail_course.exercises.run import STUDENT, ExerciseResult

_SEED = 2017
_NOTEBOOK_CELL = "ipykernel_"  # in the file name of a notebook's cell


def check_exercise(exercise: Exercise, namespace: dict[str, Any]) -> ExerciseResult:
    """Check the function of an exercise in the namespace of a student's file."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # so that torch.arange(...) / 3 is exact enough, too
    try:
        return _check_exercise(exercise, namespace)
    finally:
        torch.set_default_dtype(before)


def _check_exercise(exercise: Exercise, namespace: dict[str, Any]) -> ExerciseResult:
    function = namespace.get(exercise.name)
    if function is None:
        return ExerciseResult(exercise.name, "not yet", f"There is no function {exercise.name}.")
    cases = exercise.cases(torch.Generator().manual_seed(_SEED))
    expected = [exercise.reference(*case) for case in cases]
    results = []
    for case in cases:
        arguments = copy_value(case)
        try:
            results.append(function(*arguments))
        except BaseException as error:  # also a student's sys.exit()
            return _error_mark(exercise, error)
        if not all(is_unchanged(*pair) for pair in zip(arguments, case, strict=True)):
            message = "It must not change its inputs but changes one in place. Write x = x - y, not x -= y."
            return ExerciseResult(exercise.name, "wrong", f"{exercise.task}\n{message}")
    pairs = zip(cases, results, strict=True)
    if any(
        isinstance(result, Tensor) and not is_same_mistake(function(*copy_value(case)), result)
        for case, result in pairs
    ):
        message = (
            "It gives another result when it is called again. Is dropout left on? Use no random numbers."
        )
        return ExerciseResult(exercise.name, "wrong", f"{exercise.task}\n{message}")
    for index, (result, value) in enumerate(zip(results, expected, strict=True)):
        if difference := describe_difference(result, value):
            tensor, mistake = _explain(exercise, namespace, cases, results, expected, index)
            first = f" First wrong tensor: {tensor}." if tensor else ""
            return ExerciseResult(exercise.name, "wrong", f"{exercise.task}\n{difference}{first}", mistake)
    return ExerciseResult(exercise.name, "correct", exercise.task)


def _error_mark(exercise: Exercise, error: BaseException) -> ExerciseResult:
    if isinstance(error, NotImplementedError) and not error.args:
        frames = _student_frames(error)
        missing = frames[-1].name if frames else exercise.name
        reason = "" if missing == exercise.name else f" It calls {missing}, which is not written yet."
        return ExerciseResult(exercise.name, "not yet", f"{exercise.task}{reason}")
    return ExerciseResult(exercise.name, "error", describe_error(error))


def describe_error(error: BaseException) -> str:
    """An error in a student's code: the line in the file, its type and its message."""
    message = f"{type(error).__name__}: {printable(' '.join(str(error).split()), 300)}".removesuffix(": ")
    frames = _student_frames(error)
    if isinstance(error, SyntaxError) and error.filename == STUDENT:
        return f"Line {error.lineno or 1}: {type(error).__name__}: {printable(error.msg)}"
    if not frames:
        return message  # the function does not take these arguments
    where = "" if frames[-1].name == "<module>" else f", in {frames[-1].name}"
    return f"Line {frames[-1].lineno}{where}: {message}"


def _student_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if frame.filename == STUDENT or _NOTEBOOK_CELL in frame.filename]


def _explain(
    exercise: Exercise,
    namespace: dict[str, Any],
    cases: list[Case],
    results: list[Any],
    expected: list[Tensor],
    index: int,
) -> tuple[str, str]:
    """The first wrong tensor in the case of that index, and the likely mistake; each empty if unknown."""
    tensor = ""
    if exercise.calls:
        expected_calls = reference_calls(exercise, cases[index])
        runs = [run_with_reference(exercise, namespace, case) for case in cases]
        complete = [run for run in runs if run is not None]
        if len(complete) == len(cases):
            results = [result for result, _ in complete]
            if all(is_same(result, value) for result, value in zip(results, expected, strict=True)):
                return first_wrong_function(exercise, namespace, expected_calls), ""
            tensor = first_wrong_argument(exercise, complete[index][1], expected_calls)
    return tensor, _likely_mistake(exercise, cases, results)


def _likely_mistake(exercise: Exercise, cases: list[Case], results: list[Any]) -> str:
    """The explanation of the first common mistake, or pair of them, with the same results in all cases."""
    for explanation, function in [*exercise.mistakes, *_pairs(exercise.mistakes)]:
        pairs = zip(results, cases, strict=True)
        if all(is_same_mistake(result, function(*copy_value(case))) for result, case in pairs):
            return explanation
    return ""


def _pairs(mistakes: Sequence[CommonMistake]) -> Iterator[CommonMistake]:
    """Two mistakes at once, where both are other choices of the same function."""
    for one, other in combinations(mistakes, 2):
        first, second = one.function, other.function
        if not (isinstance(first, partial) and isinstance(second, partial)):
            continue
        if first.func is second.func and not first.keywords.keys() & second.keywords.keys():
            both = partial(first.func, **first.keywords, **second.keywords)
            yield CommonMistake(f"Two mistakes. {one.explanation} And: {other.explanation}", both)
