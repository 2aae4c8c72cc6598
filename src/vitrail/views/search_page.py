"""The page of a search: the images that were found, best first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.views.gallery import thumbnail
from vitrail.views.html_page import ImageTile, Page, Section

MAX_TILES = 500  # a page with more images is too large for a browser
_BY_IMAGE = (
    "The score is the cosine of two embeddings: 1 for the same image. Only images of the index are compared, "
    "and every one of them is."
)
_BY_WORDS = (
    "The score is the cosine of an image's embedding and the text's. It is a small number even for a good "
    "match, so only the order counts."
)


def search_page(
    hits: Sequence[tuple[Path, float]], total: int, query: str, *, is_image: bool, command: str = ""
) -> Page:
    """Show the files that were found among `total` for an image or for words, with scores, best first."""
    shown = hits[:MAX_TILES]
    tiles = [
        _tile(path, f"{place}. cosine {score:.3f}", [f"{path.parent.name}/{path.name}"])
        for place, (path, score) in enumerate(shown, 1)
    ]
    what = f"most like {Path(query).name}" if is_image else f"most like the words “{query}”"
    lead = [f"The {len(shown):,} of {total:,} images that are {what}, best first."]
    sections = [Section("Found", images=tiles, how_to_read=_BY_IMAGE if is_image else _BY_WORDS)]
    if is_image:
        asked = _tile(Path(query), Path(query).name, [])
        sections.insert(0, Section("The image searched for", images=[asked]))
    return Page("Search", lead, sections=sections, command=command)


def _tile(path: Path, title: str, lines: Sequence[str]) -> ImageTile:
    view = thumbnail(path)
    return ImageTile(view, title, lines if view else [*lines, "This file cannot be read any more."])
