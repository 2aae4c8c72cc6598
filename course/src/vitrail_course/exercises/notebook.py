"""`vt.check(globals())`: the exercises in a notebook, checked where they are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitrail.base.errors import InputError, printable, suggest
from vitrail.base.summary import html_table
from vitrail_course.exercises.exercise import EXERCISES
from vitrail_course.exercises.mark import check_exercise
from vitrail_course.exercises.run import NAMES, ExerciseResult


class Marks(tuple[ExerciseResult, ...]):
    """The results of the exercises, which print as text and show as a table in a notebook."""

    @property
    def all_correct(self) -> bool:
        return all(mark.verdict == "correct" for mark in self)

    def __repr__(self) -> str:
        lines = []
        for mark in self:
            lines.append(f"{mark.name}: {mark.verdict}")
            lines += [f"    {line}" for line in _details(mark)]
        return "\n".join([*lines, self._count()])

    def _repr_html_(self) -> str:
        rows = [[mark.name, mark.verdict, " ".join(_details(mark))] for mark in self]
        return html_table(rows, self._count(), ["exercise", "verdict", "task, and what is wrong"])

    def _count(self) -> str:
        return f"{sum(mark.verdict == 'correct' for mark in self)} of {len(self)} correct."


def check(namespace: dict[str, Any], *names: str) -> Marks:
    """Check the exercises of `vitrail check` in a notebook: `vt.check(globals())`.

    Functions are found by their names, such as `attention` or `layer_norm` (docs/exercises.md), and compared
    with the reference; likely mistakes are named. They run in the notebook's process, without a time limit.

    Args:
        namespace: the notebook's `globals()`.
        names: the exercises to check; by default those that the notebook has a function for.
    """
    if not isinstance(namespace, dict):
        raise InputError(
            f"check takes the names of your notebook, vt.check(globals()), not a {type(namespace).__name__}."
        )
    for name in names:
        if name not in NAMES:
            raise InputError(f"Unknown exercise {printable(name)!r}. {suggest(str(name), NAMES)}")
    chosen = names or tuple(name for name in NAMES if callable(namespace.get(name)))
    if not chosen:
        raise InputError(
            f"There is no exercise to check: define a function named {', '.join(NAMES[:-1])} or {NAMES[-1]}, "
            "then call vt.check(globals())."
        )
    return Marks(check_exercise(exercise, namespace) for exercise in EXERCISES if exercise.name in chosen)


def _details(mark: ExerciseResult) -> Sequence[str]:
    """The lines below the verdict: what is wrong, and the likely mistake. Of what is correct, the task."""
    hint = [f"Likely mistake: {mark.hint}"] if mark.hint else []
    return [*mark.message.splitlines(), *hint]
