"""Comparing training settings over learning rates and seeds: `vt.study`."""
