"""Students' files for tests of the exercises."""

from pathlib import Path

from vitrail_course.exercises.exercise import EXERCISES
from vitrail_course.exercises.run import STUDENT

_FOLDER = Path(__file__).parents[1] / "course" / "exercises"
SOLUTION = (_FOLDER / "solution.py").read_text()
OTHER_SOLUTION = (_FOLDER / "other_solution.py").read_text()
EXERCISE = {exercise.name: exercise for exercise in EXERCISES}


def run_student(*changes, text=SOLUTION):
    """The namespace of a student's file: a solution with changes (old, new) of its text."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    namespace = {}
    exec(compile(text, STUDENT, "exec"), namespace)
    return namespace
