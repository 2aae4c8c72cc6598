"""Images in a report: the most confident mistakes, and examples, with predictions and attention rollout."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.base.errors import InputError, printable
from vitrail.evaluation.evaluate_model import Evaluation, match_scale
from vitrail.images.decode import open_image, suppress_warnings
from vitrail.images.formats.sources import Split
from vitrail.images.pixels import to_uint8
from vitrail.images.preprocess import Preprocess
from vitrail.model.device import eval_mode
from vitrail.views import rollout
from vitrail.views.canvas import OVERLAY
from vitrail.views.html_page import ImageTile, Section, percent
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.labels import match_labels

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MISTAKES = 12
_EXAMPLES = 8
_MAX_NAMES = 4  # of classes of an image
_MAX_SIDE = 320  # pixels
_MAX_PNG_SIDE = 64  # small images are PNG to show exact pixels; as JPEG larger ones take a fifth of the space
_OPACITY = 0.65  # of a map over its image

_ROLLOUT = (
    "On the right, attention rollout: the attention matrices of all layers multiplied together, which "
    "estimates how much each patch contributes to the pooled features. Dark is zero, bright yellow is the "
    "maximum of the image. It shows where information comes from, not why the model predicts a class."
)
_LOOK_FOR = (
    "On the left, the image after resizing and cropping. Look for wrong labels, for images that show two "
    "classes, and for misleading backgrounds."
)
_ROLLOUT_BELOW = " On the right, attention rollout, which is explained below under “Examples”."


# ---- sections -------------------------------------------------------------------------------


def mistake_section(evaluation: Evaluation, bundle: Bundle, split: Split) -> list[Section]:
    """The most confident mistakes, with their images."""
    scores, title = evaluation.metrics, "Most confident mistakes"
    if scores is None:
        return []
    if not scores.mistakes:
        return [Section(title, ["There are no mistakes: all predictions are correct."])]
    worst, multi_label = scores.mistakes[:_MISTAKES], scores.mean_ap is not None
    index = {name: position for position, name in reversed(list(enumerate(split.names)))}
    explained = {
        image.index: image
        for image in explain_images(bundle, split, [index[m.name] for m in worst if m.name in index])
    }
    tiles = []
    for mistake in worst:
        image = explained.get(index.get(mistake.name, -1))
        views = image.views(f"Image of class {mistake.label}") if image else []
        true = f"True class{'es' * multi_label}: {mistake.label or 'none'}"
        lines = [true, f"Confidence: {percent(mistake.confidence)}", mistake.name]
        tiles.append(ImageTile(views, f"Predicted: {mistake.predicted}", lines))
    text = f"The {len(worst)} mistakes with the highest confidence, highest first."
    if multi_label:
        text = "Images whose class with the highest score is predicted and wrong, the highest score first."
    if scores.top1 is not None and (wrong := scores.count - round(scores.top1 * scores.count)) > len(worst):
        text = f"The {len(worst)} of {wrong:,} mistakes with the highest confidence, highest first."
    how_to_read = _LOOK_FOR + _ROLLOUT_BELOW * _has_maps(list(explained.values()))
    return [Section(title, [text], images=tiles, how_to_read=how_to_read)]


def example_section(evaluation: Evaluation, bundle: Bundle, split: Split) -> list[Section]:
    """Evenly spaced images of the split, with predictions and attention rollout."""
    if evaluation.metrics is None:
        return []
    columns = match_labels(bundle.labels, bundle.model.config.classes, evaluation.classes, [])
    scale = replace(match_scale(bundle, columns, split.labels.ndim == 2), threshold=None)
    explained = explain_images(bundle, split, evenly_spaced(len(split), _EXAMPLES))
    tiles = []
    for image in explained:
        scores = scale.compute(image.logits[None, columns])[0]
        predicted = [evaluation.classes[k] for k in scale.predicted(scores)]
        label = split.labels[image.index]
        true = [evaluation.classes[int(k)] for k in (label.nonzero()[0] if label.ndim else [label])]
        wrong = f"Wrong; true class{'es' * label.ndim}: {_join(true)}"
        verdict = "Correct" if set(predicted) == set(true) else wrong
        lines = [verdict, f"Confidence: {percent(float(scores.max()))}", split.names[image.index]]
        views = image.views(f"Image of class {', '.join(true)}")
        tiles.append(ImageTile(views, f"Predicted: {_join(predicted)}", lines))
    text = ["Evenly spaced images of the split, whether the prediction is correct or not."]
    how_to_read = _ROLLOUT if _has_maps(explained) else ""
    return [Section("Examples", text, images=tiles, how_to_read=how_to_read)] if tiles else []


def evenly_spaced(count: int, number: int) -> list[int]:
    """`number` indices spread evenly over `count`, or all of them if there are fewer."""
    return sorted({(2 * i + 1) * count // (2 * number) for i in range(number)}) if count else []


def _join(classes: Sequence[str]) -> str:
    more = f" and {len(classes) - _MAX_NAMES} more" if len(classes) > _MAX_NAMES else ""
    return ", ".join(classes[:_MAX_NAMES]) + more or "none"


# ---- images with their predictions ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ExplainedImage:
    """A preprocessed image with its logits and attention rollout."""

    index: int
    """Index in the split."""
    pixels: NDArray[np.uint8]
    """(H, W, C)"""
    logits: NDArray[np.float64]
    """(K,), in the order of the model's classes."""
    rollout: NDArray[np.floating] | None
    """(h, w), summing to 1; None if the model has no such map."""
    patch: tuple[int, ...]
    """Height and width of a patch."""

    def views(self, description: str) -> list[tuple[bytes, str]]:
        """The image, and the image with the rollout map over it, each with an alt text."""
        views = [(encode_image(self.pixels), f"{description}, after preprocessing")]
        if self.rollout is not None:
            row, column = np.unravel_index(self.rollout.argmax(), self.rollout.shape)
            h, w = self.rollout.shape
            overlay = encode_image(overlay_rollout(self.pixels, self.rollout, self.patch))
            peak = f"row {row + 1} of {h}, column {column + 1} of {w}"
            views.append((overlay, f"Attention rollout, highest at {peak}"))
        return views


def _has_maps(images: Sequence[ExplainedImage]) -> bool:
    return any(image.rollout is not None for image in images)


def explain_images(bundle: Bundle, split: Split, indices: Sequence[int]) -> list[ExplainedImage]:
    """Run the model on some images of a split; images that cannot be read are skipped."""
    model, spec = bundle.model, bundle.preprocess
    assert spec is not None
    readable = [(index, pixels) for index in indices if (pixels := _read(split, index, spec)) is not None]
    if not readable:
        return []
    parameter = next(model.parameters())
    images = torch.stack([spec.normalize(pixels) for _, pixels in readable]).to(parameter)
    with eval_mode(model):
        logits = model(images).double().cpu().numpy()
    maps: Sequence[NDArray[np.floating] | None]
    try:
        maps = list(rollout.compute(model, images).maps.reshape(len(readable), *model.config.grid))
    except InputError:  # not every model has a rollout map
        maps = [None] * len(readable)
    return [
        ExplainedImage(index, pixels, row, image_map, model.config.patch_pixels)
        for (index, pixels), row, image_map in zip(readable, logits, maps, strict=True)
    ]


def _read(split: Split, index: int, spec: Preprocess) -> NDArray[np.uint8] | None:
    """The pixels of an image after resizing and cropping; None if it cannot be read."""
    try:
        with suppress_warnings():
            source = _source(split, index)
            return spec.pixels(source if isinstance(source, np.ndarray) else open_image(source))
    except (ValueError, OSError):
        return None


def _source(split: Split, index: int) -> Any:
    """The array or the path of an image."""
    images = split.paths if split.images is None else split.images
    assert images is not None
    return images[index]


# ---- images as files ------------------------------------------------------------------------


def thumbnail(source: Path | Split, index: int = 0) -> list[tuple[bytes, str]]:
    """A file, or one image of a split, as a small image with an alt text; none if it cannot be read."""
    image = source if isinstance(source, Path) else _source(source, index)
    name = source.name if isinstance(source, Path) else Path(source.names[index]).name
    try:
        with suppress_warnings():
            pixels = image if isinstance(image, np.ndarray) else to_uint8(open_image(image), 3)
        return [(encode_image(pixels), f"Image {printable(name)}")]
    except (OSError, ValueError):
        return []


def overlay_rollout(
    pixels: NDArray[np.uint8], values: NDArray[np.floating], patch: tuple[int, ...]
) -> NDArray[np.uint8]:
    """Draw a map over the image in gray, patch by patch, without smoothing.

    Pixels beyond the last complete patch are not an input of the model and stay gray.
    """
    import matplotlib

    tiles = np.kron(values / (values.max() or 1.0), np.ones(patch))
    colors = matplotlib.colormaps[OVERLAY](tiles)[..., :3] * 255
    over = np.repeat(pixels[..., :3].mean(axis=2, keepdims=True), 3, axis=2)
    h, w = tiles.shape
    over[:h, :w] = _OPACITY * colors + (1 - _OPACITY) * over[:h, :w]
    return np.rint(over).astype(np.uint8)


def encode_image(pixels: NDArray[np.uint8]) -> bytes:
    """Encode an image (H, W, C) as a PNG or JPEG file; other than 3 or 4 channels are averaged."""
    from PIL import Image

    gray = pixels.shape[2] not in (3, 4)
    shown = pixels.mean(axis=2).round().astype(np.uint8) if gray else pixels[..., :3]
    image = Image.fromarray(shown)
    image.thumbnail((_MAX_SIDE, _MAX_SIDE))
    file = io.BytesIO()
    if max(image.size) <= _MAX_PNG_SIDE:
        image.save(file, "PNG")
    else:
        image.save(file, "JPEG", quality=88)
    return file.getvalue()
