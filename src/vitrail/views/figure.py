"""The declaration of a figure of `vitrail inspect`, and the request that figures are made from.

A figure is one file: `compute` returns plain arrays, `draw` plots them, `table` returns them as rows of a
CSV file, `caption` explains in a few sentences how to read the figure and what it shows for this model, and
`FIGURE` declares it. It is registered once, in `figures.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import InputError
from vitrail.images.content import content_keys
from vitrail.images.formats.sources import Split
from vitrail.images.loader import CorruptFiles, Reader
from vitrail.images.preprocess import Preprocess
from vitrail.model import ViT
from vitrail.model.config import ViTConfig
from vitrail.views.canvas import Figure
from vitrail.views.figure_images import ImageBatch, from_pixels
from vitrail.weights.bundle.bundle import Bundle

_BATCH = 32  # images per batch, for statistics over all images
Progress = Callable[[str, int, int], None]
Rows = tuple[list[str], list[list[object]]]  # a header, and the rows of a table


@dataclass(frozen=True)
class FigureSpec:
    """The declaration of a figure."""

    name: str
    title: str
    make: Callable[[InspectionRequest], tuple[Any, Figure]]
    """Computes and draws: returns the result of `compute` and the figure."""
    caption: Callable[[Any], str]
    table: Callable[[Any], Rows]
    needs_images: bool = True
    passes: Callable[[ViTConfig], int] | None = None
    """About how many forward passes it takes for each image, if many; a backward pass counts as two."""


@dataclass(eq=False)
class InspectionRequest:
    """A model to inspect, with a few images to draw and all images for statistics."""

    bundle: Bundle
    paths: Sequence[Path] = ()
    max_images: int = 8
    """Number of images to draw."""
    layer: int | None = None
    head: int | None = None
    target: int | None = None
    """The class to explain; by default each image's predicted class."""
    progress: Progress = lambda name, done, total: None
    corrupt: CorruptFiles = field(default_factory=lambda: CorruptFiles("skip"))
    attributions: dict[str, Any] = field(default_factory=dict)
    """The attribution maps once they are computed; the scoring figure compares them."""

    @property
    def model(self) -> ViT:
        return self.bundle.model

    @property
    def preprocess(self) -> Preprocess:
        assert self.bundle.preprocess is not None
        return self.bundle.preprocess

    @cached_property
    def _split(self) -> Split:
        names = [str(path) for path in self.paths]
        return Split(np.zeros(len(names), dtype=np.int64), names, list(self.paths))

    def _read(self, name: str) -> Iterator[tuple[list[str], NDArray[np.uint8]]]:
        """Read all images, a batch at a time: the names of those that are valid, and pixels (b, H, W, C)."""
        names = self._split.names
        reader = Reader(
            self._split, self.preprocess, augment=None, seed=0, workers="auto", corrupt=self.corrupt
        )
        try:
            parts = torch.arange(len(names)).split(_BATCH)
            for number, batch in enumerate(reader.batches((0, part) for part in parts)):
                valid = batch.valid > 0
                if valid.any():
                    pixels = batch.images[valid].permute(0, 2, 3, 1).numpy()
                    yield [names[int(i)] for i in batch.indices[valid]], pixels
                self.progress(name, min((number + 1) * _BATCH, len(names)), len(names))
        finally:
            reader.close()

    def batches(self, name: str) -> Iterator[Tensor]:
        """Read all images as model inputs, (b, C, H, W) each."""
        for names, pixels in self._read(name):
            yield from_pixels(pixels, self.preprocess, names).images

    @cached_property
    def drawn(self) -> ImageBatch:
        """The images to draw: the first that can be read."""
        names: list[str] = []
        pixels: list[NDArray[np.uint8]] = []
        for batch_names, batch in self._read("images"):
            names, pixels = names + batch_names, [*pixels, *batch]
            if len(names) >= self.max_images:
                break
        if not names:
            reason = next(iter(self.corrupt.reasons.values()), "there are no images.")
            raise InputError(
                f"None of the {len(self.paths):,} images could be read; error in the first: {reason}"
            )
        most = self.max_images
        return from_pixels(np.stack(pixels[:most]), self.preprocess, names[:most])

    def trained_on(self) -> str:
        """Describe how many of the images the model was trained on; "" if its file does not say so."""
        if self.bundle.fingerprint is None or not self.paths:
            return ""
        keys = content_keys(
            self._split, progress=lambda done, total: self.progress("content keys", done, total)
        )
        count = int(self.bundle.fingerprint.contains(keys).sum())
        exact = self.bundle.fingerprint.is_exact
        if len(self.paths) == 1:
            how = "" if exact else "probably "
            return f"The model was {how if count else 'not '}trained on this image."
        some = f"{'' if exact else 'about '}{count:,}" if count else "none"
        return f"The model was trained on {some} of these {len(self.paths):,} images."
