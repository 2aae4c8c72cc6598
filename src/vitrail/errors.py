"""Errors a user can act on: what must hold, what came, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class VitrailError(Exception):
    """An error meant for the user. The command line prints its message and exits with 2.

    A message is one or two natural sentences that say what must hold, what came, and what to do.
    (Three arguments are joined into such a message; new code passes one.)
    """

    def __init__(self, message: str, got: str | None = None, do: str | None = None) -> None:
        # All of them, so that the error survives pickling.
        super().__init__(*(part for part in (message, got, do) if part is not None))

    def __str__(self) -> str:
        if len(self.args) == 3:
            must, got, do = self.args
            return f"{must} Got {got}. {do}"
        return str(self.args[0])


class ConfigError(VitrailError, ValueError):
    """A model that cannot exist, or a name that means nothing."""


class InputError(VitrailError, ValueError):
    """Something handed over that does not fit: pictures, tap names, paths."""


class FileError(VitrailError, ValueError):
    """A file that is not what it should be, or cannot be read or written. `got` names the file."""


class MissingExtra(VitrailError, ImportError):
    """An optional package that this feature needs is not installed."""


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Wrap the imports of optional packages: one that is missing becomes a MissingExtra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"This needs the package {error.name}.",
            "a Python without it",
            f'Install it with: pip install "vitrail[{extra}]".',
        ) from error


def suggest(name: str, choices: Iterable[str]) -> str:
    """Say which choice is nearest, if one is near, and then what all of them are."""
    choices = list(choices)
    near = difflib.get_close_matches(name, choices, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}There is: {', '.join(choices)}."


def printable(text: object, most: int = 200) -> str:
    """Text from a file or a path, made fit for a terminal.

    Control characters and marks that turn the writing direction become \\x1b or \\u202e; what is
    longer than `most` loses its middle.
    """
    found = str(text)
    found = found if len(found) <= 2 * most else found[:most] + found[-most:]  # escapes make it longer
    found = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in found)
    tail = most // 3
    return found if len(found) <= most else found[: most - tail - 3] + "..." + found[-tail:]
