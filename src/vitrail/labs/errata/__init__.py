"""What the lecture notes get wrong or leave open, each shown by code: `python -m vitrail.labs.errata`.

A note is `wrong` where what it says and what it describes cannot both be so; it is `left open` where it is
loose, keeps a condition to itself, or follows another convention than the paper or another note. What a
note says is told in our words. The functions are the evidence; docs/errata.md is written from them.
"""
