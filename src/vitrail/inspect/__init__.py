"""See through a model: one file for each figure.

In each, `compute` returns plain arrays, `draw` draws them, `table` gives them as rows for a CSV file, and
`caption` says in a few sentences how to read the figure and what this model shows. `python -m
vitrail.inspect.filters` and so on draw the figure of the small model that comes with the package.
"""
