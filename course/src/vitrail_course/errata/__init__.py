"""Errata of the lecture notes, each with code as evidence: `python -m vitrail_course.errata`.

A claim is `wrong` if it contradicts what it describes. It is `imprecise` if a term is loose, a condition is
not stated, or the convention differs from the paper or another note. Claims are paraphrased. docs/errata.md
is generated from these functions.
"""
