"""Mark one exercise: right, wrong, not yet, or an error, and in which words."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import printable
from vitrail.exercises.calls import first_wrong_input, first_wrong_part, right_calls, with_right_parts
from vitrail.exercises.compare import alike, copied, problem, same, unchanged
from vitrail.exercises.exercise import Case, Exercise
from vitrail.exercises.run import STUDENT, Mark

SEED = 2017  # any will do


def mark(exercise: Exercise, names: dict[str, Any]) -> Mark:
    """Mark the function of that name in a student's file, whose names these are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # so that torch.arange(...) / 3 is exact enough as well
    try:
        return marked(exercise, names)
    finally:
        torch.set_default_dtype(before)


def marked(exercise: Exercise, names: dict[str, Any]) -> Mark:
    function = names.get(exercise.name)
    if function is None:
        return Mark(exercise.name, "not yet", f"There is no function {exercise.name} in the file.")
    cases = exercise.cases(torch.Generator().manual_seed(SEED))
    right = [exercise.reference(*case) for case in cases]
    came = []
    for case in cases:
        given = copied(case)
        try:
            came.append(function(*given))
        except BaseException as error:  # the student's sys.exit() is no reason for us to stop
            return failed(exercise, error)
        if not all(unchanged(*pair) for pair in zip(given, case, strict=True)):
            words = (
                "It must leave its inputs as they are, and changes one in place. Write x = x - y, not x -= y."
            )
            return Mark(exercise.name, "wrong", f"{exercise.must}\n{words}")
    for index, (result, expected) in enumerate(zip(came, right, strict=True)):
        if wrong := problem(result, expected):
            where, likely = explained(exercise, names, cases, came, right, index)
            first = f" First wrong tensor: {where}." if where else ""
            return Mark(exercise.name, "wrong", f"{exercise.must}\n{wrong}{first}", likely)
    return Mark(exercise.name, "right", exercise.must)


def failed(exercise: Exercise, error: BaseException) -> Mark:
    if isinstance(error, NotImplementedError) and not error.args:
        frames = student_frames(error)
        by = frames[-1].name if frames else exercise.name
        waits = "" if by == exercise.name else f" It waits for {by}."
        return Mark(exercise.name, "not yet", f"{exercise.must}{waits}")
    return Mark(exercise.name, "error", described(error))


def described(error: BaseException) -> str:
    """An error in a student's code: the line in their file, its kind, its message."""
    words = f"{type(error).__name__}: {printable(' '.join(str(error).split()), 300)}".removesuffix(": ")
    frames = student_frames(error)
    if isinstance(error, SyntaxError) and error.filename == STUDENT:
        return f"Line {error.lineno or 1}: {type(error).__name__}: {printable(error.msg)}"
    if not frames:
        return words  # called with arguments that it does not take
    inside = "" if frames[-1].name == "<module>" else f", in {frames[-1].name}"
    return f"Line {frames[-1].lineno}{inside}: {words}"


def student_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if frame.filename == STUDENT]


def explained(
    exercise: Exercise,
    names: dict[str, Any],
    cases: list[Case],
    came: list[Any],
    right: list[Tensor],
    index: int,
) -> tuple[str, str]:
    """The first wrong tensor in the case of that index, if it can be told, and the likely slip."""
    where = ""
    if exercise.calls:
        asked = right_calls(exercise, cases[index])
        again = [with_right_parts(exercise, names, case) for case in cases]
        if None not in again:
            runs = [run for run in again if run is not None]
            came = [result for result, _ in runs]
            if all(same(result, expected) for result, expected in zip(came, right, strict=True)):
                return first_wrong_part(exercise, names, asked), ""
            where = first_wrong_input(exercise, runs[index][1], asked)
    return where, likely(exercise, cases, came)


def likely(exercise: Exercise, cases: list[Case], came: list[Any]) -> str:
    """The words of the first slip that gives what came, in every case."""
    for words, slip in exercise.slips:
        if all(alike(result, slip(*copied(case))) for result, case in zip(came, cases, strict=True)):
            return words
    return ""
