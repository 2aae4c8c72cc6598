"""Accuracy by ImageNet-ReaL labels (Beyer et al. 2020, "Are we done with ImageNet?").

They list every class that annotators saw in an image of ImageNet's validation set.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import InputError
from vitrail.base.safe_files import parse_json, read_limited

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_BYTES = 10_000_000  # of a file of labels
_FILE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")  # the number of a validation image


def real_accuracy(
    logits: NDArray[Any], real: Sequence[Sequence[int]], valid: NDArray[Any] | None = None
) -> tuple[float, int]:
    """Fraction of the predictions that are among an image's ReaL labels, and the number of images.

    Images without ReaL labels are skipped.
    """
    if len(real) != len(logits):
        raise InputError(
            f"ReaL labels are needed for every image, but there are {len(real):,} rows for {len(logits):,} "
            "images; use the complete validation set."
        )
    predicted = logits.argmax(axis=1)
    labeled = [row for row in range(len(real)) if len(real[row]) and (valid is None or valid[row])]
    if not labeled:
        raise InputError("No image has a ReaL label; check the file of ReaL labels.")
    return sum(int(predicted[row]) in real[row] for row in labeled) / len(labeled), len(labeled)


def read_real_labels(
    real: str | Path | Sequence[Sequence[int]], names: Sequence[str], classes: int, notes: list[str]
) -> list[list[int]]:
    """The ReaL labels of each image: by the number in its file name, otherwise by order."""
    rows: Any = real
    if isinstance(real, (str, Path)):
        rows = parse_json(read_limited(real, _MAX_BYTES, "a file of ReaL labels"), str(real))
    if not isinstance(rows, Sequence) or not all(_are_classes(row, classes) for row in rows):
        raise InputError(
            f"ReaL labels must be a list of class indices below {classes:,} for each image; use the "
            "published real.json, with a model for the classes of ImageNet."
        )
    matches = [_FILE_NAME.search(name) for name in names]
    indices = [int(match[1]) - 1 for match in matches if match]
    if len(indices) == len(names) and 0 <= min(indices) <= max(indices) < len(rows):
        return [list(rows[index]) for index in indices]
    if len(rows) != len(names):
        raise InputError(
            f"The {len(rows):,} rows of ReaL labels cannot be matched to {len(names):,} images without "
            "ImageNet's file names; use ImageNet's validation set."
        )
    notes.append("ReaL labels were matched to the images by order.")
    return [list(row) for row in rows]


def _are_classes(row: Any, classes: int) -> bool:
    return isinstance(row, Sequence) and all(type(label) is int and 0 <= label < classes for label in row)
