"""Self-checking exercises: students write the parts of a ViT and see what is correct and what is wrong.

template.py is the file that students fill in, reference.py the solution, exercise.py the list of exercises
with their test inputs. mistakes.py and mistakes_model.py solve each exercise with common mistakes.
mark.py checks one exercise; calls.py finds the first wrong tensor of a function that calls others. child.py
runs a student's file in a separate process, which run.py starts and limits.
"""

from vitrail_course.exercises.run import NAMES, ExerciseResult, check_file, start_file

__all__ = ["NAMES", "ExerciseResult", "check_file", "start_file"]
