"""Figures that show what a model computes, one per file.

In each file, `compute` returns plain arrays, `draw` plots them, `table` returns them as rows of a CSV file,
and `caption` explains in a few sentences how to read the figure and what it shows for this model. `python -m
vitrail.views filters` draws one for the small model that comes with the package.
"""
