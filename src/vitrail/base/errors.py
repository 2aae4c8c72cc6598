"""Errors that a user can act on."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


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


class DeviceWarning(UserWarning):
    """A GPU is not used, or with smaller batches than asked for. The command line prints it as a line."""


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


_in_command = False


@contextmanager
def command_line_names() -> Iterator[None]:
    """Within a command, messages give arguments as options: `--out`. Elsewhere they are Python's: `out=`."""
    global _in_command  # not a context variable: the threads of a command must see it too
    before, _in_command = _in_command, True
    try:
        yield
    finally:
        _in_command = before


def option(name: str, value: Any = None) -> str:
    """An argument as this user gives it: `--from x.npz` to a command, `from_='x.npz'` in Python.

    Args:
        name: of the option, without dashes in front.
        value: True for a flag, a mapping for OLD=NEW, `...` for any value, None for the name alone.
    """
    if not _in_command:
        keyword = "from_" if name == "from" else name.replace("-", "_")
        return f"{keyword}={'' if value is None else _python_value(value)}"
    if isinstance(value, Mapping):
        value = next(f"{old}={new}" for old, new in value.items())
    return f"--{name}" + ("" if value is None or value is True else f" {_shell_value(value)}")


def setting(name: str, value: Any) -> str:
    """A setting as this user gives it: `--set ema=none` to a command, `ema=None` in Python.

    Args:
        name: of a field, also of a part: model.depth.
        value: `...` for any value.
    """
    if _in_command:
        text = str(value).lower() if value is None or isinstance(value, bool) else _shell_value(value)
        return f"--set {name}={text}"
    part, _, field = name.rpartition(".")
    given = f"{field}={_python_value(value)}"
    return f"{part}=dict({given})" if part else given


def call(name: str, *arguments: str) -> str:
    """What this user runs: `vitrail train --resume` at a terminal, `vt.train(resume=True)` in Python."""
    return f"vitrail {name} {' '.join(arguments)}" if _in_command else f"vt.{name}({', '.join(arguments)})"


def _python_value(value: Any) -> str:
    if value is ...:
        return "..."
    return repr(value if isinstance(value, (bool, int, float, Mapping, type(None))) else printable(value))


def _shell_value(value: Any) -> str:
    return "VALUE" if value is ... else shlex.quote(printable(value))


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
