"""The page of `vitrail doctor --model`: images that look the same, odd ones, and labels that may be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.base.errors import printable
from vitrail.evaluation.curation import Curation, EmbeddedDataset, NearDuplicate
from vitrail.images.decode import open_image, suppress_warnings
from vitrail.images.formats.sources import Dataset
from vitrail.images.pixels import to_uint8
from vitrail.views.html_page import ImageTile, Page, Section
from vitrail.views.numbers import percent
from vitrail.views.page_images import encode_image

_SHOWN = 60  # images or pairs in a section


def curation_page(found: Curation, images: EmbeddedDataset, data: Dataset, *, command: str = "") -> Page:
    """The findings with their images, the most certain first."""
    across = [one for one in found.duplicates if one.across]
    within = [one for one in found.duplicates if not one.across]
    count = len(images.names)
    lead = [
        f"{count:,} images compared by the features of a model. These are guesses: nothing was changed, and "
        "each finding needs a look."
    ]
    headline = [
        (f"{len(across):,}", "pairs in two splits"),
        (f"{len(within):,}", "pairs in one split"),
        (f"{len(found.mislabeled):,}", "labels in doubt"),
        (f"{len(found.outliers):,}", "outliers"),
    ]
    sections = [
        _pair_section("Probably the same image in two splits", across, images, data, _LEAK),
        _pair_section("Probably the same image twice in a split", within, images, data, _TWICE),
        _label_section(found, images, data),
        _outlier_section(found, images, data),
    ]
    return Page("Images worth a look", lead, headline, sections, command)


_NUMBERS = " The first number is the correlation of the pixels, the second the cosine of the features."
_LEAK = (
    "An image of the training set in the validation or test set makes the model look better than it is. "
    "Remove one of each pair. Two photographs of the same object a second apart count as well."
)
_TWICE = "Copies in one split are counted twice. They may be intended."


def _pair_section(
    title: str, pairs: Sequence[NearDuplicate], images: EmbeddedDataset, data: Dataset, how: str
) -> Section:
    if not pairs:
        return Section(title, ["None found."])
    tiles = []
    for one in pairs[:_SHOWN]:
        views = [*_view(images, data, one.first), *_view(images, data, one.second)]
        lines = [_describe(images, data, one.first), _describe(images, data, one.second)]
        tiles.append(ImageTile(views, f"pixels {one.correlation:.3f}, features {one.cosine:.3f}", lines))
    return Section(title, [_shown(len(pairs), "pairs")], images=tiles, how_to_read=how + _NUMBERS)


def _label_section(found: Curation, images: EmbeddedDataset, data: Dataset) -> Section:
    title = "Labels that may be wrong"
    if not found.mislabeled:
        return Section(title, ["None found."])
    tiles = []
    for one in found.mislabeled[:_SHOWN]:
        label, other = (data.classes[k] for k in (images.labels[one.index], one.suggested))
        lines = [f"Label: {label}, {percent(one.given)}", _describe(images, data, one.index)]
        tiles.append(ImageTile(_view(images, data, one.index), f"{other}? {percent(one.probability)}", lines))
    how = (
        "A classifier on the features, trained without the image, is as sure of the suggested class as it "
        "is of images of that class. Classes that are hard to tell apart appear here too."
    )
    return Section(title, [_shown(len(found.mislabeled), "images")], images=tiles, how_to_read=how)


def _outlier_section(found: Curation, images: EmbeddedDataset, data: Dataset) -> Section:
    title = "Unlike all other images"
    if not found.outliers:
        return Section(title, ["None found."])
    tiles = [
        ImageTile(
            _view(images, data, one.index),
            f"{one.distance:.1f} times the usual distance",
            [_describe(images, data, one.index)],
        )
        for one in found.outliers[:_SHOWN]
    ]
    how = "The distance to its nearest images is far above the usual. A rare view is no error."
    return Section(title, [_shown(len(found.outliers), "images")], images=tiles, how_to_read=how)


def _shown(count: int, what: str) -> str:
    if count == 1:
        return "One."
    return f"The first {_SHOWN} of {count:,} {what}." if count > _SHOWN else f"{count:,} {what}."


def _describe(images: EmbeddedDataset, data: Dataset, index: int) -> str:
    """Split and name of an image."""
    split, name = list(data.splits)[images.splits[index]], images.names[index]
    return name if Path(name).parts[:1] == (split,) else f"{split}: {name}"


def _view(images: EmbeddedDataset, data: Dataset, index: int) -> list[tuple[bytes, str]]:
    """A thumbnail; none if the image cannot be read."""
    split = list(data.splits.values())[images.splits[index]]
    row, name = int(images.rows[index]), images.names[index]
    try:
        if split.images is not None:
            pixels = split.images[row]
        else:
            assert split.paths is not None
            with suppress_warnings():
                pixels = to_uint8(open_image(split.paths[row]), 3)
        return [(encode_image(pixels), f"Image {printable(Path(name).name)}")]
    except (OSError, ValueError):
        return []
