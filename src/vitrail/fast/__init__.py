"""Acceleration of a model's inference, applied from outside, with a check that the answers are the same."""
