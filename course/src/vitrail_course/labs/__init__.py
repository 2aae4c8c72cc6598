"""The claims of the lecture notes as experiments, each with a number, a figure and a verdict.

The lecture notes are five sets of slides and articles on Vision Transformers, numbered 000 to 004, that this
project started from. Each lab tests one of their claims and cites it, such as note 002, "Finetuning".
lab.py documents the interface of a lab and lists all labs in `LABS`; every lab is a module beside it.
results.json holds the saved results; `python -m vitrail_course.labs.collect` runs the labs again and
updates it. Claims about training are tested with `vitrail.study`, which compares arms over several seeds.
"""
