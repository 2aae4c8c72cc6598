"""The sections of a report with images: the most confident mistakes, and examples with attention rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitrail.evaluation.evaluate_model import Evaluation, match_scale
from vitrail.images.formats.sources import Split
from vitrail.views.html_page import ImageTile, Section
from vitrail.views.numbers import percent
from vitrail.views.page_images import ExplainedImage, explain_images
from vitrail.weights.bundle.bundle import Bundle
from vitrail.weights.bundle.labels import match_labels

_MISTAKES = 12
_EXAMPLES = 8
_MAX_NAMES = 4  # of classes of an image

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
    text = [f"The {len(worst)} mistakes with the highest confidence, highest first."]
    if multi_label:
        text = ["Images whose class with the highest score is predicted and wrong, the highest score first."]
    if scores.top1 is not None and (wrong := scores.count - round(scores.top1 * scores.count)) > len(worst):
        text = [f"The {len(worst)} of {wrong:,} mistakes with the highest confidence, highest first."]
    how_to_read = _LOOK_FOR + _ROLLOUT_BELOW * _has_maps(list(explained.values()))
    return [Section(title, text, images=tiles, how_to_read=how_to_read)]


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
        true = _true_classes(split, image.index, evaluation.classes)
        wrong = f"Wrong; true class{'es' * (split.labels.ndim == 2)}: {_join(true)}"
        verdict = "Correct" if set(predicted) == set(true) else wrong
        lines = [verdict, f"Confidence: {percent(float(scores.max()))}", split.names[image.index]]
        views = image.views(f"Image of class {', '.join(true)}")
        tiles.append(ImageTile(views, f"Predicted: {_join(predicted)}", lines))
    text = ["Evenly spaced images of the split, whether the prediction is correct or not."]
    how_to_read = _ROLLOUT if _has_maps(explained) else ""
    return [Section("Examples", text, images=tiles, how_to_read=how_to_read)] if tiles else []


def _has_maps(images: Sequence[ExplainedImage]) -> bool:
    return any(image.rollout is not None for image in images)


def evenly_spaced(count: int, number: int) -> list[int]:
    """`number` indices spread evenly over `count`, or all of them if there are fewer."""
    return sorted({(2 * i + 1) * count // (2 * number) for i in range(number)}) if count else []


def _join(classes: Sequence[str]) -> str:
    more = f" and {len(classes) - _MAX_NAMES} more" if len(classes) > _MAX_NAMES else ""
    return ", ".join(classes[:_MAX_NAMES]) + more or "none"


def _true_classes(split: Split, index: int, classes: Sequence[str]) -> list[str]:
    """The names of the true classes of an image."""
    label = split.labels[index]
    return [classes[int(label)]] if split.labels.ndim == 1 else [classes[k] for k in label.nonzero()[0]]
