"""The small trained model that comes with the package, and digits for it to look at.

`sample.safetensors` is the model of the lecture notes, 105,098 parameters, at their learning rate, made by

    vitrail train mnist/ --recipe mnist-notes --seed 0 --lr 0.001 --set model.position_sigma=none

The recipe as it stands reads digits better (docs/recipes.md), but its positions begin so large that training
hardly shows in them. The digits are scikit-learn's, 8 x 8 pixels of another
hand and scanner than MNIST's, enlarged to 28 x 28.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vitrail.errors import needs
from vitrail.inspect.canvas import save
from vitrail.inspect.pictures import Pictures, from_pixels
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = Path(__file__).parent / "sample.safetensors"


def sample_model() -> Bundle:
    return load(FILE)


def sample_pictures(count: int = 8) -> Pictures:
    """From 0 to 9 and on; 20 x 20 pixels of ink in 28 x 28, as MNIST has it."""
    with needs("train"):
        from sklearn.datasets import load_digits
    digits = load_digits()
    pixels = np.zeros((count, 28, 28, 1), dtype=np.uint8)
    for n in range(count):
        small = Image.fromarray((digits.images[n] * (255 / 16)).astype(np.uint8))
        pixels[n, 4:24, 4:24, 0] = np.asarray(small.resize((20, 20), Image.Resampling.BICUBIC))
    spec = sample_model().preprocess
    assert spec is not None
    return from_pixels(pixels, spec, [f"digit {kind}" for kind in digits.target[:count]])


def show(name: str, make: Callable[[], tuple[Figure, str]]) -> None:
    """What `python -m vitrail.inspect.NAME` does: the figure as NAME.png and NAME.svg, and its caption."""
    figure, caption = make()
    files = save(figure, Path(name))
    print(caption)
    print("Written:", ", ".join(str(file) for file in files))
