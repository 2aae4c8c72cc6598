"""Atomic writes: a file or folder is complete, or it does not exist.

Everything is written under a temporary name next to its target, flushed to disk and renamed. A process that
is killed leaves the old file, and at most a `.0123456789abcdef.part`, which `remove_partial` deletes.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vitrail.base.errors import InputError, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PARTIAL = re.compile(r"\.[0-9a-f]{16}\.part")


@contextmanager
def atomic_file(
    path: str | Path, *, overwrite: bool = False, check: Callable[[Path], None] = lambda partial: None
) -> Iterator[Path]:
    """Yield a temporary path to write to; it is renamed to `path` when the block ends without an error.

    Args:
        overwrite: whether an existing file may be replaced. A symbolic link then points to the new file.
        check: called with the finished temporary file; it may raise to reject it.
    """
    target = Path(os.path.realpath(path)) if overwrite else Path(path)
    if overwrite and target.exists() and not target.is_file():
        raise OSError(f"{printable(path)} is not a file")  # renaming would replace even a device
    if not overwrite:
        check_new(target)
    partial = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with naming_file(path, partial):
            partial.touch(exist_ok=False)
            mode = partial.stat().st_mode  # from the umask; safetensors creates files for their owner only
            yield partial
            partial.chmod(mode)
            check(partial)
            sync_file(partial)
            if not overwrite:
                check_new(target)  # another process may have written one in the meantime
            os.replace(partial, target)
            sync_folder(target.parent)
    finally:
        with suppress(OSError):
            partial.unlink()


@contextmanager
def naming_file(path: str | Path, partial: Path | None = None) -> Iterator[None]:
    """Add the name of a file to an error of writing to it: the system names none if the disk is full.

    Args:
        partial: the temporary file that is written in its place.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(partial)):
            error.filename, error.filename2 = str(path), None
        raise


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder; it is renamed to `path`, which must be new or empty, when the block ends."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(target) as partial:
        yield partial
        sync_folder(partial)
        if target.is_dir():
            target.rmdir()  # fails if it is not empty
        os.rename(partial, target)
        sync_folder(target.parent)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A temporary folder next to a path; deleted at the end, unless it has been renamed."""
    partial = path.with_name(f".{secrets.token_hex(8)}.part")
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(path: str | Path, text: str, *, overwrite: bool = False) -> Path:
    """Write a UTF-8 file atomically."""
    with atomic_file(path, overwrite=overwrite) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")
    return Path(path)


def write_bytes(path: str | Path, data: bytes, *, overwrite: bool = False) -> Path:
    """Write a binary file atomically."""
    with atomic_file(path, overwrite=overwrite) as partial:
        partial.write_bytes(data)
    return Path(path)


def write_array(path: str | Path, array: NDArray[Any], *, overwrite: bool = False) -> Path:
    """Write a .npy file atomically."""
    import numpy as np

    with atomic_file(path, overwrite=overwrite) as partial, partial.open("wb") as file:
        # np.save writes by itself to a file that Python has opened, and of a full disk it tells only numbers.
        np.lib.format.write_array(_Writer(file), array, allow_pickle=False)
    return Path(path)


class _Writer:
    """A file that np.save writes to by Python."""

    def __init__(self, file: BinaryIO) -> None:
        self.write = file.write


def check_new(path: Path, what: str = "the output") -> None:
    """Refuse to overwrite a user's file, and a name that no file can have.

    Args:
        what: what is to be written, for the message.
    """
    if "\0" in str(path):
        raise InputError(f"{printable(path)} cannot be a file: its name has a NUL character; remove it.")
    if os.path.lexists(path):
        raise InputError(
            f"{printable(path)} already exists, and {what} never overwrites a file; choose another path."
        )


def remove_partial(folder: Path) -> None:
    """Delete the temporary files and folders that a killed process has left in a folder."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if PARTIAL.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Flush a file to disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, if the system supports it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
