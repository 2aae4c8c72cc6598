"""Pages to read in a browser: one file each, with everything in it.

`page.py` is the shell that all of them share, `charts.py` draws, and the other files say what is on the
page of an evaluation and of a run.
"""
