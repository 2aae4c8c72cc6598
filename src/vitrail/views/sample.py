"""The small trained model that comes with the package, and images of digits for it.

`sample.safetensors` is the model of the lecture notes, with 105,098 parameters, trained at
the learning rate given there by

    vitrail train mnist/ --recipe mnist-notes --seed 0 --lr 0.001 --set model.position_sigma=none

The unchanged recipe is more accurate (docs/recipes.md), but its position embeddings start so large that
training hardly shows in them. The digits are those of scikit-learn, 8 x 8 pixels enlarged to 28 x 28; they do
not come from MNIST.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.base.errors import require_extra
from vitrail.views.figure import InspectionRequest
from vitrail.views.figure_images import ImageBatch, from_pixels
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.load import load

SAMPLE_FILE = Path(__file__).parent / "sample.safetensors"


def sample_model() -> Bundle:
    """Load the sample model."""
    return load(SAMPLE_FILE)


def sample_images(count: int = 8) -> ImageBatch:
    """The first `count` digits, scaled to 20 x 20 pixels within 28 x 28, as in MNIST."""
    with require_extra("train"):
        from sklearn.datasets import load_digits
    digits = load_digits()
    pixels = np.zeros((count, 28, 28, 1), dtype=np.uint8)
    for n in range(count):
        small = Image.fromarray((digits.images[n] * (255 / 16)).astype(np.uint8))
        pixels[n, 4:24, 4:24, 0] = np.asarray(small.resize((20, 20), Image.Resampling.BICUBIC))
    spec = sample_model().preprocess
    assert spec is not None
    return from_pixels(pixels, spec, [f"digit {digit}" for digit in digits.target[:count]])


def sample_request(folder: Path) -> InspectionRequest:
    """Request figures of the sample model and of ten digits, whose files are written to the folder."""
    digits = sample_images(10)
    paths = [folder / f"{name}.png" for name in digits.names]
    for path, pixels in zip(paths, digits.pixels, strict=True):
        Image.fromarray(pixels[..., 0]).save(path)
    return InspectionRequest(sample_model(), paths, max_images=6)
