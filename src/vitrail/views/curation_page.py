"""The page of `vitrail doctor --model`: images that look the same, odd ones, and labels that may be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.evaluation.curation import Curation, EmbeddedDataset, NearDuplicate
from vitrail.images.formats.sources import Dataset
from vitrail.views.gallery import thumbnail
from vitrail.views.html_page import ImageTile, Page, Section, percent

_SHOWN = 60  # images or pairs in a section
_NUMBERS = " The first number is the correlation of the pixels, the second the cosine of the features."
_LEAK = (
    "An image of the training set in the validation or test set makes the model look better than it is. "
    "Remove one of each pair. Two photographs of the same object a second apart count as well."
)
_TWICE = "Copies in one split are counted twice. They may be intended."
_LABELS = (
    "A classifier on the features, trained without the image, is as sure of the suggested class as it is of "
    "images of that class. Classes that are hard to tell apart appear here too."
)
_OUTLIERS = "The distance to its nearest images is far above the usual. A rare view is no error."


def curation_page(found: Curation, images: EmbeddedDataset, data: Dataset, *, command: str = "") -> Page:
    """Show the findings with their images, the most certain first."""
    splits = list(data.splits.items())

    def tile(indices: Sequence[int], title: str, lines: Sequence[str] = ()) -> ImageTile:
        """Images with their splits and names."""
        views, names = [], []
        for index in indices:
            split, name = splits[images.splits[index]][0], images.names[index]
            names.append(name if Path(name).parts[:1] == (split,) else f"{split}: {name}")
            views += thumbnail(splits[images.splits[index]][1], int(images.rows[index]))
        return ImageTile(views, title, [*lines, *names])

    def pair_tiles(pairs: Sequence[NearDuplicate]) -> list[ImageTile]:
        return [
            tile((one.first, one.second), f"pixels {one.correlation:.3f}, features {one.cosine:.3f}")
            for one in pairs[:_SHOWN]
        ]

    across = [one for one in found.duplicates if one.across]
    within = [one for one in found.duplicates if not one.across]
    labels = []
    for one in found.mislabeled[:_SHOWN]:
        label, other = (data.classes[k] for k in (images.labels[one.index], one.suggested))
        title = f"{other}? {percent(one.probability)}"
        labels.append(tile([one.index], title, [f"Label: {label}, {percent(one.given)}"]))
    outliers = [
        tile([odd.index], f"{odd.distance:.1f} times the usual distance") for odd in found.outliers[:_SHOWN]
    ]
    lead = (
        f"{len(images.names):,} images compared by the features of a model. These are guesses: nothing was "
        "changed, and each finding needs a look."
    )
    headline = [
        (f"{len(across):,}", "pairs in two splits"),
        (f"{len(within):,}", "pairs in one split"),
        (f"{len(found.mislabeled):,}", "labels in doubt"),
        (f"{len(found.outliers):,}", "outliers"),
    ]
    leak, twice = "Probably the same image in two splits", "Probably the same image twice in a split"
    sections = [
        _section(leak, len(across), "pairs", pair_tiles(across), _LEAK + _NUMBERS),
        _section(twice, len(within), "pairs", pair_tiles(within), _TWICE + _NUMBERS),
        _section("Labels that may be wrong", len(found.mislabeled), "images", labels, _LABELS),
        _section("Unlike all other images", len(found.outliers), "images", outliers, _OUTLIERS),
    ]
    return Page("Images worth a look", [lead], headline, sections, command)


def _section(title: str, count: int, what: str, tiles: Sequence[ImageTile], how_to_read: str) -> Section:
    if not count:
        return Section(title, ["None found."])
    text = f"The first {_SHOWN} of {count:,} {what}." if count > _SHOWN else f"{count:,} {what}."
    return Section(title, ["One." if count == 1 else text], images=tiles, how_to_read=how_to_read)
