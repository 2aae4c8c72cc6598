"""Fitting a preprocessing to the input of a model."""

from __future__ import annotations

from dataclasses import replace

from vitrail.images.preprocess import Preprocess
from vitrail.model.config import ViTConfig


def fit_preprocess(preprocess: Preprocess, config: ViTConfig) -> Preprocess:
    """The same preprocessing for the image size and the channels of a model.

    The crop keeps its fraction of the resized image. For another number of channels, every channel gets the
    average of mean and std.
    """
    if preprocess.channels != config.channels:
        mean, std = (sum(values) / len(values) for values in (preprocess.mean, preprocess.std))
        preprocess = replace(preprocess, mean=(mean,) * config.channels, std=(std,) * config.channels)
    if preprocess.target == config.pixels:
        return preprocess
    scale = max(preprocess.before_crop) / max(preprocess.target)
    before = max(round(max(config.pixels) * scale), *config.pixels)
    resize_to = None if preprocess.resize_to is None else before
    return replace(preprocess, size=config.pixels, resize_to=resize_to)  # type: ignore[arg-type]


def default_preprocess(config: ViTConfig) -> Preprocess:
    """Resize to the model's size and map pixel values to -1 ... 1."""
    half = (0.5,) * config.channels
    return Preprocess(size=config.pixels, mean=half, std=half)  # type: ignore[arg-type]
