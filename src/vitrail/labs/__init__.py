"""The lecture notes, run: every claim an experiment with a number, a picture and a verdict.

study.py is the engine for claims about training: arms, seeds, rates, intervals. lab.py is the frame of
all labs; each lab is a file beside it, and `LABS` there is the table of them. results.json holds what
they gave when they were last run: `python -m vitrail.labs.collect` makes it anew.
"""
