"""The page of a search: the images that were found, best first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.base.errors import printable
from vitrail.images.decode import open_image, suppress_warnings
from vitrail.images.pixels import to_uint8
from vitrail.views.html_page import ImageTile, Page, Section
from vitrail.views.page_images import encode_image

MAX_TILES = 500  # a page with more images is too large for a browser


def search_page(
    hits: Sequence[tuple[Path, float]], total: int, query: str, *, is_image: bool, command: str = ""
) -> Page:
    """The images that were found for an image or for words.

    Args:
        hits: files with their scores, best first.
        total: the number of images that were compared.
    """
    shown = hits[:MAX_TILES]
    tiles = [
        image_tile(path, f"{place}. cosine {score:.3f}", [f"{path.parent.name}/{path.name}"])
        for place, (path, score) in enumerate(shown, 1)
    ]
    what = f"most like {Path(query).name}" if is_image else f"most like the words “{query}”"
    lead = [f"The {len(shown):,} of {total:,} images that are {what}, best first."]
    sections = []
    if is_image:
        sections.append(
            Section("The image searched for", images=[image_tile(Path(query), Path(query).name, [])])
        )
    how = "The score is the cosine of two embeddings: 1 for the same image. "
    how += "Only images of the index are compared, and every one of them is."
    if not is_image:
        how = (
            "The score is the cosine of an image's embedding and the text's. It is a small number even for a "
        )
        how += "good match, so only the order counts."
    sections.append(Section("Found", images=tiles, how_to_read=how))
    return Page("Search", lead, sections=sections, command=command)


def image_tile(path: Path, title: str, lines: Sequence[str]) -> ImageTile:
    """An image file as a thumbnail; without one if it can no longer be read."""
    try:
        with suppress_warnings():
            pixels = to_uint8(open_image(path), 3)
        view = [(encode_image(pixels), f"Image {printable(path.name)}")]
    except (OSError, ValueError):
        return ImageTile([], title, [*lines, "This file cannot be read any more."])
    return ImageTile(view, title, lines)
