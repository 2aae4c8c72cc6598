"""HTML reports, each a single self-contained file.

`page.py` renders a page, `charts.py` draws its charts, and the other files define the contents of the reports
on an evaluation, a training run and an inspection.
"""
