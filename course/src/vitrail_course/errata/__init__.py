"""Errata of the lecture notes: `python -m vitrail_course.errata` prints docs/errata.md.

errata.toml has their texts and evidence.py the functions that compute evidence. A claim is `wrong` if it
contradicts what it describes. It is `imprecise` if a term is loose, a condition is not stated, or the
convention differs from the paper or another note. It is `outdated` if a library has changed since.
"""
