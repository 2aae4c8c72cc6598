"""Self-contained HTML pages with sections of text, figures, images and tables.

A page loads nothing: images and style are embedded, and its content security policy forbids everything else.
The one script it may have searches long tables, which are complete without it. All strings in a `Page` are
shown as literal text, since names of files and classes are untrusted.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import printable, require_extra
from vitrail.base.safe_files import write_text
from vitrail.base.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"
_MAX_TEXT = 2000  # characters of a single string
_LARGE = 430  # points; about 1.7 times the width of a phone's page
_MEDIA_TYPES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg"}  # by the first bytes of a file


@dataclass(frozen=True)
class Figure:
    """An image with an alt text and a caption."""

    image: str | bytes
    """SVG as text, which adapts itself to a dark page, or the bytes of a PNG or JPEG file."""
    alt: str
    caption: str = ""
    wide: bool = False
    """Whether it takes the full width of the page; other figures are side by side."""


@dataclass(frozen=True)
class Table:
    """A table with a caption and a header."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    text_columns: int = 1
    """Number of leading columns with text; the others hold numbers and are aligned right."""
    search: str = ""
    """What to search for in the columns of text, such as "class"; the table then scrolls in its own box."""


@dataclass(frozen=True)
class ImageTile:
    """One or several views of an image in a gallery, with a title and some lines of text."""

    views: Sequence[tuple[bytes, str]]
    """The bytes of image files, each with an alt text."""
    title: str
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """A section of a page. Its parts are shown in the order of the fields."""

    title: str
    text: Sequence[str] = ()
    """Paragraphs."""
    figures: Sequence[Figure] = ()
    images: Sequence[ImageTile] = ()
    tables: Sequence[Table] = ()
    facts: Sequence[tuple[str, object]] = ()
    """Names with their values, as a definition list."""
    points: Sequence[str] = ()
    """Items of a bulleted list."""
    listing: Sequence[str] = ()
    """Lines of preformatted text."""
    how_to_read: str = ""
    folded: bool = False
    """Whether the section is collapsed at first."""

    @property
    def single_views(self) -> bool:
        """Whether every tile has one image at most, which then fills its column."""
        return all(len(tile.views) <= 1 for tile in self.images)


@dataclass(frozen=True)
class Page:
    """The contents of a page."""

    title: str
    lead: Sequence[str] = ()
    """Opening paragraphs that summarize the page."""
    headline: Sequence[tuple[str, str]] = ()
    """The most important numbers, each with a description."""
    sections: Sequence[Section] = field(default_factory=list)
    command: str = ""
    """The command that wrote the page."""


def check_extras() -> None:
    """Check that the optional packages are installed, before anything is computed."""
    with require_extra("inspect"):
        import jinja2
        import matplotlib  # noqa: F401

    del jinja2


def render(page: Page) -> str:
    """Render a page as HTML."""
    searchable = any(table.search for section in page.sections for table in section.tables)
    script = (_TEMPLATES / "search.js").read_text(encoding="utf-8") if searchable else ""
    return render_template("page.html", script, page=page, is_large=_is_large, breakable=_breakable)


def render_template(name: str, script: str, **content: Any) -> str:
    """Render a template with its only script, which the page's policy allows by its hash."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _environment()
        .get_template(name)
        .render(**content, version=__version__, uri=data_uri, script=markup(script), script_hash=digest)
    )


def markup(text: str) -> Any:
    """Text of our own, which is not escaped."""
    with require_extra("inspect"):
        from markupsafe import Markup

    return Markup(text)


@cache
def _environment() -> Environment:
    with require_extra("inspect"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup

    def finalize(value: Any) -> Any:
        """Escape control characters and bidirectional marks in all text."""
        return value if isinstance(value, Markup) else printable(value, _MAX_TEXT)

    return Environment(
        loader=FileSystemLoader([_TEMPLATES, _TEMPLATES.parent / "walk"]),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def data_uri(image: str | bytes) -> Any:
    """An image as a data URI."""
    if isinstance(image, str):
        data, media_type = image.encode(), "image/svg+xml"
    else:
        data = image
        media_type = next(kind for start, kind in _MEDIA_TYPES.items() if data.startswith(start))
    return markup(f"data:{media_type};base64,{base64.b64encode(data).decode()}")


def _is_large(image: str | bytes) -> bool:
    """Whether an SVG is so wide that it would be unreadable on a phone, if it did not scroll."""
    found = re.search(r'<svg[^>]* width="([\d.]+)pt"', image) if isinstance(image, str) else None
    return found is not None and float(found[1]) > _LARGE


def _breakable(text: str) -> Any:
    """Text that may be broken after / and _ and before an ending such as .jpg: names of files are long."""
    from markupsafe import Markup, escape

    parts = re.split(r"(?<=[/_])|(?=\.[A-Za-z]\w{1,4}$)", printable(text, _MAX_TEXT))
    return Markup("<wbr>").join(map(escape, parts))


def write_page(path: str | Path, page: Page, *, overwrite: bool = False) -> Path:
    """Write a page to a file, complete or not at all."""
    return write_text(path, render(page), overwrite=overwrite)


# ---- numbers --------------------------------------------------------------------------------


def percent(fraction: float) -> str:
    """A fraction in percent, with one more digit if it would otherwise be rounded up to 100 %."""
    return f"{100 * fraction:.{2 if 0.9995 <= fraction < 1 else 1}f} %"


def wilson(correct: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % confidence interval of a fraction (Wilson 1927), valid also for few images and near 0 or 1."""
    fraction, correction = correct / count, z * z / count
    center = (fraction + correction / 2) / (1 + correction)
    variance = fraction * (1 - fraction) / count + correction / (4 * count)
    margin = z / (1 + correction) * math.sqrt(variance)
    return max(0.0, center - margin), min(1.0, center + margin)
