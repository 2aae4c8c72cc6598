"""The shell of every page: sections of words, figures, pictures and tables, in one HTML file.

A page loads nothing and runs nothing: pictures lie in it as data, its style too, and its policy forbids
all else. Whatever stands in a `Page` is text, and shows as such: names of files and classes are not ours.
"""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail import __version__
from vitrail.errors import InputError, needs, printable

if TYPE_CHECKING:
    from jinja2 import Template

LONGEST = 2000  # characters of one piece of text
KINDS = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg"}  # by how a file begins


@dataclass(frozen=True)
class Figure:
    """A drawing with what it says in words, for those who cannot see it, and how to read it."""

    image: str | bytes
    """SVG as text, or the bytes of a PNG or JPEG file."""
    alt: str
    caption: str = ""
    wide: bool = False
    """Whether it needs the whole width; others stand side by side."""
    photo: bool = False
    """Whether it shows pictures, whose colours a dark page must leave as they are."""


@dataclass(frozen=True)
class Table:
    """Rows below a header."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    words: int = 1
    """So many columns hold words; those after them hold numbers, which stand on the right."""


@dataclass(frozen=True)
class Picture:
    """A picture of a gallery, or several views of one, with a title and some lines."""

    views: Sequence[tuple[bytes, str]]
    """Files, and what each shows in words."""
    title: str
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """A part of a page. What it has comes in the order of these fields."""

    title: str
    text: Sequence[str] = ()
    """Paragraphs."""
    figures: Sequence[Figure] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    facts: Sequence[tuple[str, object]] = ()
    """Words and what they are."""
    points: Sequence[str] = ()
    """A list, a line each."""
    listing: Sequence[str] = ()
    """Lines of a file or a command, as they are."""
    how_to_read: str = ""
    folded: bool = False
    """Whether it is closed at first."""


@dataclass(frozen=True)
class Page:
    title: str
    lead: Sequence[str] = ()
    """What it comes to, in a few sentences."""
    headline: Sequence[tuple[str, str]] = ()
    """The numbers to see first, and what each is."""
    sections: Sequence[Section] = field(default_factory=list)
    command: str = ""
    """What made it."""


def check_extras() -> None:
    """Say what is missing before anything is computed, not after."""
    with needs("inspect"):
        import jinja2
        import matplotlib  # noqa: F401

    del jinja2


def render(page: Page) -> str:
    """The page as HTML."""
    return shell().render(page=page, version=__version__, uri=uri)


@cache
def shell() -> Template:
    with needs("inspect"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup

    def finalize(value: Any) -> Any:
        """All text passes here: control characters and marks that turn the writing direction show as such."""
        return value if isinstance(value, Markup) else printable(value, LONGEST)

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def uri(image: str | bytes) -> Any:
    """A picture as part of the page."""
    from markupsafe import Markup

    data = image.encode() if isinstance(image, str) else image
    kind = "image/svg+xml" if isinstance(image, str) else KINDS[next(k for k in KINDS if data.startswith(k))]
    return Markup(f"data:{kind};base64,{base64.b64encode(data).decode()}")


def write_page(path: str | Path, page: Page, *, replace: bool = False) -> Path:
    """Write a page, whole or not at all.

    Args:
        replace: whether a file of that name may be written over.
    """
    return write_whole(Path(path), render(page), replace=replace)


def check_new(place: Path, do: str = "Name another file.") -> None:
    """A page is never written over a file of the user's."""
    if os.path.lexists(place):
        raise InputError(
            "A page is a new file: nothing of yours is overwritten.",
            f"{printable(place)}, which is there already",
            do,
        )


def write_whole(place: Path, text: str, *, replace: bool = False) -> Path:
    """A text file, whole or not at all; a new one, unless it may `replace` what is there."""
    if not replace:
        check_new(place)
    part = place.with_name(f".{secrets.token_hex(8)}.part")  # a run that goes on clears away such names
    try:
        with part.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if not replace:
            check_new(place)  # nobody wrote one in the meantime
        part.replace(place)
    finally:
        with suppress(OSError):
            part.unlink()
    return place
