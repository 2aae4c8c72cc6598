"""Checks of output paths before anything is computed: commands never overwrite a file."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

from vitrail.base.errors import InputError, printable
from vitrail.base.safe_files import check_new, write_text


@contextmanager
def saving_gate_report(out: Path | None) -> Iterator[None]:
    """If int8 or fp8 do not pass their gate, the numbers are saved beside the output that is not written."""
    try:
        yield
    except InputError as error:
        gate = getattr(error, "gate", None)  # of a GateError
        if gate is None or out is None:
            raise
        file = out.with_name(out.name + ".gate.json")
        if os.path.lexists(file):
            older = f"{printable(file)} exists already, so it has no report of this; remove it to get one."
            raise InputError(f"{error} {older}") from error
        write_text(file, json.dumps(gate.as_dict(), indent=1) + "\n")
        raise InputError(f"{error} The report is in {printable(file)}.") from error


def check_new_files(files: Mapping[str, Path | None]) -> None:
    """Refuse existing files, files that cannot be created, and two options with the same path.

    For --html, the packages that pages need must be installed.

    Args:
        files: the path of each option, None if it is not set.
    """
    given = {option: path for option, path in files.items() if path is not None}
    for option, path in given.items():
        check_new(path, option)
    check_distinct(given)
    if "--html" in given:
        from vitrail.views.html_page import check_extras

        check_extras()
    for path in given.values():
        path.touch(exist_ok=False)  # the only sure way to learn whether a file can be created
        path.unlink()


def this_command() -> str:
    """The command line of this process, for the pages that it writes."""
    return shlex.join(["vitrail", *sys.argv[1:]])


def check_distinct(files: Mapping[str, Path | None]) -> None:
    """Refuse two options with the same path."""
    for (option, path), (other, other_path) in combinations(files.items(), 2):
        if path is not None and path == other_path:
            raise InputError(f"{option} and {other} both name {printable(path)}; name two different paths.")


def is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def check_empty_folder(option: str, folder: Path, hint: str = "name another folder") -> None:
    """Refuse a file, or a folder with files in it."""
    if os.path.lexists(folder) and not is_empty(folder):
        reason = "is not empty" if folder.is_dir() else "is not a folder"
        raise InputError(
            f"{option} must name a new or empty folder, and {printable(folder)} {reason}; {hint}."
        )
