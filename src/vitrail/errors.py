"""Errors that a user can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class VitrailError(Exception):
    """Base class of errors meant for the user. The command line prints the message and exits with 2.

    A message is one or two sentences that say what must hold, what came, and what to do.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)


class ConfigError(VitrailError, ValueError):
    """An invalid config, or an unknown name."""


class InputError(VitrailError, ValueError):
    """An invalid argument: images of the wrong shape, an unknown activation, a path that does not exist."""


class FileError(VitrailError, ValueError):
    """A file that is invalid, or cannot be read or written. The message names the file."""


class MissingExtra(VitrailError, ImportError):
    """An optional package that is needed and not installed."""


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """Turn a failed import of an optional package into a MissingExtra that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"This needs the package {error.name}, which is not installed; install it with: "
            f'pip install "vitrail[{extra}]".'
        ) from error


def suggest(name: str, choices: Iterable[str]) -> str:
    """Advice for an unknown name: the closest choice, if one is close, and all of them."""
    choices = list(choices)
    near = difflib.get_close_matches(name, choices, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Choose from: {', '.join(choices)}."


def printable(text: object, most: int = 200) -> str:
    """Make text from a file or a path safe to print in a terminal.

    Control characters and bidirectional marks are escaped, as in \\x1b or \\u202e; text longer than `most`
    characters is shortened in the middle.
    """
    line = str(text)
    line = line if len(line) <= 2 * most else line[:most] + line[-most:]  # before escapes make it longer
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    tail = most // 3
    return line if len(line) <= most else line[: most - tail - 3] + "..." + line[-tail:]
