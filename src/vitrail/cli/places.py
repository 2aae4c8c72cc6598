"""Where commands write: new files and folders, never over what is there."""

from __future__ import annotations

import os
from pathlib import Path

from vitrail.errors import InputError, printable


def check_new(option: str, path: Path) -> None:
    """Refuse a file that is there, or that cannot be made, before anything is computed."""
    if os.path.lexists(path):
        raise InputError(
            f"{option} must name a new file: nothing of yours is overwritten.",
            f"{printable(path)}, which is there already",
            "Name another file.",
        )
    write_new(path, "")  # what the rights of a folder say is not all that the system may refuse
    path.unlink()


def write_new(path: Path, text: str) -> None:
    """Write a file that was not there; half a file is taken away again."""
    with open(path, "x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except BaseException:
            path.unlink()
            raise


def is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def check_out(out: Path, do: str = "Name another.") -> None:
    """Refuse a folder with something in it, before anything is computed."""
    if out.exists() and not is_empty(out):
        got = f"{printable(out)}, which {'has files in it' if out.is_dir() else 'is a file'}"
        raise InputError("--out must be a new or an empty folder: nothing of yours is overwritten.", got, do)
