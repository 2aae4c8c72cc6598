"""Evaluation of a model on labeled images: metrics, calibration and probes."""
