"""Open a model for faster inference: calibration images from files, and `vt.accelerate`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.base.errors import InputError, option, printable
from vitrail.fast.accelerate import accelerate, accelerate_by_default
from vitrail.fast.gate import MIN_AGREEMENT
from vitrail.fast.inference_routes import LOSSY, Accelerated, Goal
from vitrail.images.formats.folders import list_images
from vitrail.images.reader import read_pixels
from vitrail.weights.bundle.bundle import Bundle

MAX_CALIBRATION = 512
"""Images used of a folder, half of them for ranges: more change these little, and take long."""


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """How a model shall be computed."""

    precision: str = "auto"
    calibration: Any = None
    """A folder of images, or paths, PIL images and arrays; for int8 and fp8."""
    min_agreement: float = MIN_AGREEMENT
    keep: Collection[str] | Literal["auto"] = ()


def accelerate_bundle(bundle: Bundle, how: Speedup | None, goal: Goal = "throughput") -> Accelerated | None:
    """The bundle's model, accelerated; int8 and fp8 are calibrated on `how.calibration`.

    Without `how`, only what needs no measuring and loses nothing; None if the model is computed as it is.
    """
    if how is None:
        return accelerate_by_default(bundle.model)
    images = labels = None
    if how.precision in LOSSY:
        if how.calibration is None:
            raise InputError(
                f"{how.precision} is lossy and needs images like those to come, to set its scales and to "
                f"compare answers with fp32; name a folder with {option('calibration', 'photos/')}."
            )
        images, labels = read_calibration(bundle, how.calibration)
    options: dict[str, Any] = {"precision": how.precision, "min_agreement": how.min_agreement}
    return accelerate(bundle.model, goal=goal, calibrate=images, labels=labels, keep=how.keep, **options)


def read_calibration(bundle: Bundle, source: Any) -> tuple[Tensor, Tensor | None]:
    """Normalized images, and their labels where each image is in a folder named as a class of the model.

    Of a folder with many images, evenly spaced ones are read.
    """
    return read_images(bundle, _list(source), MAX_CALIBRATION)


def read_images(bundle: Bundle, paths: list[Any], most: int) -> tuple[Tensor, Tensor | None]:
    """Up to `most` of the images, evenly spaced; and their labels, if the folders' names are classes."""
    assert bundle.preprocess is not None
    step = max(1.0, len(paths) / most)
    chosen = [paths[int(step * index)] for index in range(min(len(paths), most))]
    images = []
    for path in chosen:
        try:
            images.append(
                bundle.preprocess.normalize(read_pixels(path, bundle.preprocess, limit_memory=True))
            )
        except (OSError, ValueError) as error:
            name = printable(path) if isinstance(path, (str, os.PathLike)) else f"image {len(images)}"
            raise InputError(f"The calibration image {name} cannot be read: {error}") from error
    device = next(bundle.model.parameters()).device
    return torch.stack(images).to(device), _labels(bundle, chosen)


def _list(source: Any) -> list[Any]:
    if isinstance(source, (str, os.PathLike)):
        folder = Path(source)
        if not folder.is_dir():
            raise InputError(f"The calibration images must be in a folder, and {printable(folder)} is none.")
        paths: list[Any] = list_images(folder)
    else:
        paths = list(source) if isinstance(source, Iterable) else []
    if len(paths) < 2:
        where = printable(source) if isinstance(source, (str, os.PathLike)) else "calibration"
        raise InputError(
            f"There are {'too few' if paths else 'no'} images to calibrate with in {where}; name a "
            "folder with some hundred."
        )
    return paths


def _labels(bundle: Bundle, paths: list[Any]) -> Tensor | None:
    """The classes by the names of the folders; None if one is not a class."""
    names = {name: index for index, name in enumerate(bundle.labels or [])}
    folders = [Path(path).parent.name if isinstance(path, (str, os.PathLike)) else "" for path in paths]
    if not names or any(folder not in names for folder in folders):
        return None
    return torch.tensor([names[folder] for folder in folders])
