"""Exercises that mark themselves: a student writes the parts of a ViT and is told what is wrong.

template.py is the file a student starts from, reference.py the solution, exercise.py the list with the
inputs to try. slips.py and slips_model.py do each exercise wrongly in the ways that are likely.
mark.py marks one exercise, calls.py finds the first wrong tensor where parts are put together.
child.py runs the student's file in a process of its own, which run.py starts, limits and listens to.
"""

from vitrail.exercises.run import NAMES, Mark, check_file, start_file

__all__ = ["NAMES", "Mark", "check_file", "start_file"]
