"""The first wrong tensor of a function that calls other exercises.

A student's block calls the student's layer_norm, which may itself be wrong. So the block runs again with the
reference in place of the functions it calls, and their arguments are compared with those in the reference
block. If the block is correct with reference functions, the student's functions run one by one on correct
inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from vitrail_course.exercises import reference
from vitrail_course.exercises.compare import copy_value, is_same
from vitrail_course.exercises.exercise import EXERCISES, Case, Exercise

_DATA_ARGUMENTS = ("x", "z", "images")  # the other arguments are weights and numbers


class Call(NamedTuple):
    function: str
    arguments: dict[str, Any]
    result: Tensor


@contextmanager
def _reference_functions(namespace: dict[str, Any], exercise: Exercise) -> Iterator[list[Call]]:
    """Replace the other exercises in a namespace by the reference, and record their calls."""
    calls: list[Call] = []
    others = [other for other in EXERCISES if other.name != exercise.name and other.name in namespace]
    before = {other.name: namespace[other.name] for other in others}
    namespace |= {other.name: _recording(other, calls) for other in others}
    try:
        yield calls
    finally:
        namespace |= before


def _recording(exercise: Exercise, calls: list[Call]) -> Callable[..., Tensor]:
    function = exercise.reference  # looked up now, before it may be replaced itself
    signature = inspect.signature(function)

    def record_call(*positional: Any, **keyword: Any) -> Tensor:
        bound = signature.bind(*positional, **keyword)
        bound.apply_defaults()
        arguments, count = copy_value(dict(bound.arguments)), len(calls)
        result = function(*positional, **keyword)
        del calls[count:]  # nested calls
        calls.append(Call(exercise.name, arguments, result))
        return result

    return record_call


def run_with_reference(
    exercise: Exercise, namespace: dict[str, Any], case: Case
) -> tuple[Any, list[Call]] | None:
    """The result of a student's function that calls the reference, and its calls; None if it fails."""
    function = namespace[exercise.name]
    with _reference_functions(namespace, exercise) as calls:
        try:
            return function(*copy_value(case)), calls
        except Exception:
            return None


def reference_calls(exercise: Exercise, case: Case) -> list[Call]:
    with _reference_functions(vars(reference), exercise) as calls:
        exercise.reference(*copy_value(case))
    return calls


def first_wrong_argument(exercise: Exercise, calls: list[Call], expected_calls: list[Call]) -> str:
    """The first wrong tensor of a function that calls the reference; empty if the calls do not show it.

    Steps that the student has written without a call are skipped; so are calls that the reference does not
    make at this point, such as a norm inside the loop: the next expected call shows whether they matter.
    """
    steps = list(zip(exercise.calls, expected_calls, strict=True))
    for number, call in enumerate(calls):
        later = [other.function for other in calls[number + 1 :]]
        while steps and steps[0][1].function != call.function:
            function = steps[0][1].function
            if later.count(function) >= sum(step.function == function for _, step in steps):
                break  # all of its calls are still to come
            steps.pop(0)
        if not steps:
            return ""
        if steps[0][1].function != call.function:
            continue
        (input_name, output_name), expected = steps.pop(0)
        for name, value in expected.arguments.items():
            if not _matches(call.arguments[name], value):
                if name in _DATA_ARGUMENTS:
                    return input_name
                return f"the argument {name} of {call.function}, used for {output_name}"
    return "" if steps else exercise.last


def _matches(value: Any, expected: Any) -> bool:
    """A tensor may also be index 0 of dimension 1: the class token, or one head at a time."""
    if isinstance(expected, Tensor):
        return is_same(value, expected) or (expected.dim() > 2 and is_same(value, expected[:, 0]))
    if isinstance(expected, dict):  # weights; more than the expected ones are accepted
        return isinstance(value, dict) and all(_matches(value.get(n), part) for n, part in expected.items())
    return bool(value == expected)


def first_wrong_function(exercise: Exercise, namespace: dict[str, Any], expected_calls: list[Call]) -> str:
    """The first of the called functions that is wrong on correct inputs; empty if none is."""
    for (_, output_name), call in zip(exercise.calls, expected_calls, strict=True):
        try:
            result = namespace[call.function](*copy_value(tuple(call.arguments.values())))
        except Exception:
            result = None
        if not is_same(result, call.result):
            return (
                f"{output_name}, returned by {call.function}. Once {call.function} is fixed, "
                f"{exercise.name} is correct"
            )
    return ""
