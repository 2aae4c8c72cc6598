"""Where parts are put together: which tensor is the first wrong one?

A student's block calls the student's layer_norm, which may be wrong itself. So the block is run again
with the right parts in their place, and what it gives to each is held against what the right block
gives. If it is right with right parts, the parts are run one by one on the right inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from vitrail.exercises import reference
from vitrail.exercises.compare import copied, same
from vitrail.exercises.exercise import EXERCISES, Case, Exercise

TOKENS = ("x", "z", "images")  # what a part works on; its other arguments are weights and numbers


class Call(NamedTuple):
    part: str
    arguments: dict[str, Any]
    result: Tensor


@contextmanager
def right_parts(names: dict[str, Any], exercise: Exercise) -> Iterator[list[Call]]:
    """Put the right parts under these names for a while; lists what they are called with."""
    calls: list[Call] = []
    parts = [part for part in EXERCISES if part.name != exercise.name and part.name in names]
    before = {part.name: names[part.name] for part in parts}
    names |= {part.name: listed(part, calls) for part in parts}
    try:
        yield calls
    finally:
        names |= before


def listed(part: Exercise, calls: list[Call]) -> Callable[..., Tensor]:
    function = part.reference  # as it is now, before it may be replaced itself
    signature = inspect.signature(function)

    def spy(*given: Any, **named: Any) -> Tensor:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        arguments, count = copied(dict(bound.arguments)), len(calls)
        result = function(*given, **named)
        del calls[count:]  # what the part itself has called
        calls.append(Call(part.name, arguments, result))
        return result

    return spy


def with_right_parts(exercise: Exercise, names: dict[str, Any], case: Case) -> tuple[Any, list[Call]] | None:
    """What the student's function gives with right parts, and its calls; None if they do not fit it."""
    function = names[exercise.name]
    with right_parts(names, exercise) as calls:
        try:
            return function(*copied(case)), calls
        except Exception:
            return None


def right_calls(exercise: Exercise, case: Case) -> list[Call]:
    with right_parts(vars(reference), exercise) as calls:
        exercise.reference(*copied(case))
    return calls


def first_wrong_input(exercise: Exercise, came: list[Call], right: list[Call]) -> str:
    """The first wrong tensor of a function whose parts are right; nothing if the calls do not tell.

    What the student has written out, without a call, is passed over.
    """
    steps = zip(exercise.calls, right, strict=True)
    for call in came:
        step = next((step for step in steps if step[1].part == call.part), None)
        if step is None:
            return ""
        (into, out), asked = step
        for name, value in asked.arguments.items():
            if not fits(call.arguments[name], value):
                return into if name in TOKENS else f"{name} of {call.part}, which makes {out}"
    return exercise.last if next(steps, None) is None else ""


def fits(came: Any, right: Any) -> bool:
    """A tensor may be all of it or the first of dimension 1: the class token, or one head at a time."""
    if isinstance(right, Tensor):
        return same(came, right) or (right.dim() > 2 and same(came, right[:, 0]))
    if isinstance(right, dict):  # weights, and perhaps others that are not asked for
        return isinstance(came, dict) and all(fits(came.get(name), value) for name, value in right.items())
    return bool(came == right)


def first_wrong_part(exercise: Exercise, names: dict[str, Any], right: list[Call]) -> str:
    """The first tensor that comes out wrong where all is right but the parts; nothing if none does."""
    for (_, out), call in zip(exercise.calls, right, strict=True):
        try:
            came = names[call.part](*copied(tuple(call.arguments.values())))
        except Exception:
            came = None
        if not same(came, call.result):
            return f"{out}, from {call.part}. With that one repaired, {exercise.name} is right"
    return ""
