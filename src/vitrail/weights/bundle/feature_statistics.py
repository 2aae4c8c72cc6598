"""Statistics of the training set's features in a model's file: how unlike them is a new image?

A pooled vector is divided by its length. Its score is the distance to the nearest class mean, in coordinates
in which the training features spread equally around their means (Mahalanobis distance; Lee et al. 2018, "A
Simple Unified Framework for Detecting Out-of-Distribution Samples"), in units of the threshold.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

PREFIX = "features/"  # of the tensors in a file


def unit_length(features: NDArray[Any]) -> NDArray[np.float64]:
    """Each row divided by its length: what an image shows is in the direction of its features."""
    x = features.astype(np.float64)
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12))


@dataclass(frozen=True, eq=False)
class FeatureStatistics:
    """Class means in whitened coordinates, and the distance beyond which an image is out of distribution."""

    center: NDArray[np.float32]
    """(D,), the mean of all features, each divided by its length."""
    whitening: NDArray[np.float16]
    """(D, q), from features to whitened coordinates."""
    means: NDArray[np.float16]
    """(m, q), whitened: of each class, or one of all images."""
    threshold: NDArray[np.float32]
    """(1,), a distance: at most 5 % of the validation images are beyond it."""

    def __post_init__(self) -> None:
        D, q = self.whitening.shape if self.whitening.ndim == 2 else (0, 0)
        shapes = {"center": (D,), "means": (len(self.means) if self.means.ndim else 0, q), "threshold": (1,)}
        for name, shape in shapes.items():
            if (found := getattr(self, name).shape) != shape or 0 in shape:
                raise ConfigError(f"the feature statistics do not fit together: {name} has shape {found}")
        if not all(np.isfinite(array).all() for array in self.arrays().values()) or self.threshold[0] <= 0:
            raise ConfigError("the feature statistics hold NaN, infinity or a threshold that is not positive")

    def check_width(self, width: int) -> None:
        if len(self.center) != width:
            raise ConfigError(
                f"the feature statistics are of width {len(self.center)}, the model's is {width}"
            )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """By name, as they are stored."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays().values())

    def distances(self, features: NDArray[Any]) -> NDArray[np.float64]:
        """The distance to the nearest mean, (N,), for features (N, D)."""
        x = (unit_length(features) - self.center) @ self.whitening.astype(np.float64)
        means = self.means.astype(np.float64)
        squares = (x**2).sum(1)[:, None] - 2 * x @ means.T + (means**2).sum(1)
        return np.sqrt(np.maximum(squares.min(axis=1), 0))

    def scores(self, features: NDArray[Any]) -> NDArray[np.float64]:
        """Distances in units of the threshold: above 1 is out of distribution."""
        return self.distances(features) / float(self.threshold[0])

    # ---- JSON, for files without tensors of their own ----------------------------------------

    def describe(self) -> dict[str, Any]:
        """For the metadata of an exported file."""
        return {
            name: {
                "shape": list(array.shape),
                "data": base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode(),
            }
            for name, array in self.arrays().items()
        }


_DTYPES = {"center": "<f4", "whitening": "<f2", "means": "<f2", "threshold": "<f4"}


def parse_statistics(entry: Mapping[str, Any]) -> FeatureStatistics:
    """The inverse of `describe`; ValueError, KeyError or TypeError if the entry is malformed."""
    return FeatureStatistics(
        **{
            name: np.frombuffer(base64.b64decode(entry[name]["data"], validate=True), dtype)
            .reshape([int(side) for side in entry[name]["shape"]])
            .astype(dtype[1:])
            for name, dtype in _DTYPES.items()
        }
    )
