"""Lab `attention-distance`: mean attention distance of the heads of a trained ViT, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.base.errors import printable
from vitrail.model import ViT
from vitrail.views import distance
from vitrail.views.canvas import FAINT, LINES, new_figure, styled
from vitrail.views.distance import GLOBAL, LOCAL, lowest_layers
from vitrail.views.figure_images import from_pixels
from vitrail.views.sample import sample_images, sample_model
from vitrail.weights.load import load
from vitrail_course.labs.lab import LabResult, LabSize
from vitrail_course.labs.verdict import NO_DIFFERENCE, Verdict, exceeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from vitrail.images.preprocess import Preprocess

    HeadDistances = NDArray[np.float64]  # (L, k), as a fraction of the distance of uniform attention

NAME = "attention-distance"
TITLE = "heads attend near and far"
NOTE = '002 "How far does self-attention look?"'
CLAIM = (
    "Initially, attention looks at both far and near (in pixel distance) information. The deeper the layer, "
    "the more emphasis is on relations across the image."
)
ACCEPTS = "a trained model, as every command takes it"

_SOURCE = "our choice, as in `vitrail inspect`; uniform attention has 100"
_CROP, _STEP = 256, 128  # pixels of the crops of the photographs, and between two of them


def run(out: Path, size: LabSize, data: str | Path | None = None) -> LabResult:
    """`data` is a model; by default the package's sample model, which is small and trained on MNIST."""
    bundle = sample_model() if data is None else load(data)
    assert bundle.preprocess is not None
    model, name = bundle.model, "the sample model" if data is None else printable(Path(data).name)
    images = load_images(bundle.preprocess, 4 if size == "small" else 24)
    torch.manual_seed(0)
    models = (model, ViT(model.config))
    trained, untrained = ([measure_distances(one, image) for image in images] for one in models)
    gained = slope_gains(trained, untrained)
    return LabResult(
        number=fmean(gained),
        unit="% of the uniform attention distance gained per layer, more than without training",
        n=len(gained),
        setting=f"{name}, {len(trained[0])} layers; {len(images)} "
        f"{'digits' if images[0].shape[1] == 1 else 'crops of two photographs'}, and the same model without "
        "training. This is one model.",
        figure=draw(trained, untrained),
        numbers={
            "distance": [distances.tolist() for distances in trained],
            "without training": [distances.tolist() for distances in untrained],
        },
    )


def decide_verdict(numbers: Mapping[str, Any]) -> Verdict:
    """Training must make distance grow with depth, and the lowest layers must have local and global heads.

    Untrained heads attend almost uniformly, and so globally: that alone says nothing. Training must also set
    the nearest and the farthest head of the lowest layers further apart.
    """
    trained, untrained = ([np.array(one) for one in numbers[key]] for key in ("distance", "without training"))
    few = lowest_layers(len(trained[0]))
    nearest, farthest = ([100 * float(pick(one[:few])) for one in trained] for pick in (np.min, np.max))
    spread = [
        100 * float(np.ptp(after[:few]) - np.ptp(before[:few]))
        for after, before in zip(trained, untrained, strict=True)
    ]
    percent, where = " % of the uniform distance", f"in the first {few} of {len(trained[0])} layers"
    grows = "distance grows with depth, per layer and more than without training"
    local = f"{where} some heads attend locally: the nearest"
    far = f"{where} some heads attend globally: the farthest"
    apart = f"{where} nearest and farthest head are further apart than without training"
    slopes = slope_gains(trained, untrained)
    return Verdict(
        [
            exceeds(grows, slopes, 0, NO_DIFFERENCE, form="+.2f", unit=percent),
            exceeds(local, nearest, 100 * LOCAL, _SOURCE, form=".1f", unit=percent, below=True),
            exceeds(far, farthest, 100 * GLOBAL, _SOURCE, form=".1f", unit=percent),
            exceeds(apart, spread, 0, NO_DIFFERENCE, form="+.1f", unit=percent),
        ]
    )


def load_images(preprocess: Preprocess, count: int) -> list[torch.Tensor]:
    """Images (1, C, H, W): digits for a model of gray images, else crops of two photographs."""
    if len(preprocess.mean) == 1:
        return list(sample_images(count).images.split(1))
    from sklearn.datasets import load_sample_images

    crops = [
        photo[top : top + _CROP, left : left + _CROP]
        for photo in load_sample_images().images
        for top in range(0, len(photo) - _CROP, _STEP)
        for left in range(0, photo.shape[1] - _CROP + 1, _STEP // 2)
    ]
    pixels = [preprocess.pixels(crop) for crop in crops[:: len(crops) // count][:count]]
    names = [str(n) for n in range(count)]
    return list(from_pixels(np.stack(pixels), preprocess, names).images.split(1))


def measure_distances(model: ViT, image: torch.Tensor) -> HeadDistances:
    """Attention distance of each head over that of uniform attention: (L, k)."""
    measured = distance.compute(model, image)
    return measured.distance.mean / measured.uniform


def slope_gains(trained: Sequence[HeadDistances], untrained: Sequence[HeadDistances]) -> list[float]:
    """The slope over the layers after training minus that without, in percent per layer, by image."""
    pairs = zip(trained, untrained, strict=True)
    return [100 * (slope_per_layer(after) - slope_per_layer(before)) for after, before in pairs]


def slope_per_layer(heads: HeadDistances) -> float:
    """Least-squares slope of the mean distance over the layers."""
    return float(np.polyfit(np.arange(len(heads)), heads.mean(axis=1), 1)[0])


@styled
def draw(trained: Sequence[HeadDistances], untrained: Sequence[HeadDistances]) -> Figure:
    """Every head in the mean over the images, and the mean over all heads."""
    figure = new_figure(7.2, 3.0)
    axes: Sequence[Axes] = figure.subplots(1, 2, sharey=True)
    titles = ("without training", "trained")
    for axis, per_image, title in zip(axes, (untrained, trained), titles, strict=True):
        heads = np.mean(per_image, axis=0)
        lines = axis.plot(heads, "o", color=LINES[0], alpha=0.5, markersize=4)
        lines[0].set_label("one head")
        axis.plot(heads.mean(axis=1), color=LINES[1], marker="_", label="mean")
        axis.axhline(1, color=FAINT, linestyle="--", linewidth=1, label="uniform attention")
        axis.set(xlabel="layer, from 0", title=title, ylim=(0, 1.45))
    axes[0].set_ylabel("distance (uniform attention: 1)")
    axes[1].legend(loc="upper left", ncols=3, fontsize=7.5, columnspacing=1, handletextpad=0.4)
    return figure
