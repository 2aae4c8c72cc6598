"""Comparing training settings: `vt.study`, `vt.sweep`, `vt.find_lr`, and cross-validation."""
