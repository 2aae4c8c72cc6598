"""Short texts for a Python prompt and small tables for a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from html import escape
from itertools import islice

from vitrail.base.errors import printable

_MAX_VALUE = 160  # characters of one value
_MAX_NAME = 30  # characters of one name in a list
_NAMES = 3  # of a longer list


class Summary(ABC):
    """Base class of results: one line as repr, and a table with a row for each value in a notebook."""

    @abstractmethod
    def summary(self) -> Mapping[str, str]:
        """What a reader wants to know first, by name."""

    def _rows(self) -> dict[str, str]:
        return {name: printable(value, _MAX_VALUE) for name, value in self.summary().items()}

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {'; '.join(f'{name}: {text}' for name, text in self._rows().items())}>"
        )

    def _repr_html_(self) -> str:
        return html_table([[name, text] for name, text in self._rows().items()], type(self).__name__)


def html_table(rows: Iterable[Iterable[object]], title: str = "", columns: Iterable[object] = ()) -> str:
    """An HTML table of text, with the names of its columns; nothing in it is read as HTML."""
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    names = _cells(columns, "th")
    head = f"<thead><tr>{names}</tr></thead>" if names else ""
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>"


def _cells(row: Iterable[object], tag: str = "td") -> str:
    return "".join(f'<{tag} style="text-align:left">{escape(str(cell))}</{tag}>' for cell in row)


def first_names(names: Iterable[str], count: int) -> str:
    """The first few of `count` names: 1,000: tench, goldfish, great white shark, ..."""
    shown = [printable(name, _MAX_NAME) for name in islice(names, _NAMES)]
    return f"{count:,}: {', '.join([*shown, *['...'] * (count > len(shown))])}" if shown else f"{count:,}"
