"""Files on disk: read within limits, locked between processes, written completely or not at all.

An atomic write goes to a temporary name next to its target, is flushed to disk and renamed. A process that is
killed leaves the old file, and at most a `.0123456789abcdef.part`, which `remove_partial` deletes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO

from vitrail.base.errors import FileError, InputError, printable

if TYPE_CHECKING:
    from io import BufferedRandom
    from typing import IO

    from numpy.typing import NDArray


def open_regular(path: str | Path, what: str = "this") -> BinaryIO:
    """Open a regular file for reading. A pipe or a device is refused: it could block or never end.

    Args:
        what: what the file should be, for the message: "an image", "a weight file".
    """
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
    raise InputError(f"{printable(path)} is {kind}, and {what} must be a regular file.")


def read_limited(path: str | Path, most: int, what: str = "this") -> bytes:
    """Read a regular file of at most `most` bytes."""
    with open_regular(path, what) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise FileError(f"{printable(path)} is larger than {most:,} bytes, too large for {what}.")
    return data


def parse_json(text: str | bytes, name: str, *, allow_nan: bool = False) -> Any:
    """Parse JSON without duplicate keys. Errors name the line and column.

    Args:
        name: the name of the text in messages, such as its path.
        allow_nan: accept NaN and Infinity, as Python's json writes them.
    """
    try:
        constant = float if allow_nan else _refuse_constant
        return json.loads(text, object_pairs_hook=_refuse_duplicates, parse_constant=constant)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}"
        raise FileError(f"{printable(name)} is not valid JSON: {error.msg} at {position}.") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{printable(name)} is not valid JSON: {printable(error)}.") from error


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate keys, of which parsers choose different ones."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return values


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


# ---- locks ----------------------------------------------------------------------------------------


@contextmanager
def locked_file(path: Path, target: Path, *, wait: bool = False) -> Iterator[BufferedRandom]:
    """Open a file as `open_own` does, and lock it against other processes.

    Args:
        target: what is being written, for the message if another process has the lock.
        wait: whether to wait until the other process is done.
    """
    while True:
        with open_own(path) as file:
            if lock(file, wait=wait) is False:
                raise FileError(
                    f"Another process is writing {printable(target)}; wait until it has finished."
                )
            if _is_at(file, path):
                yield file
                return
        # The process that had the lock has renamed or removed this file: it is no longer ours to write.


def lock(file: IO[bytes], *, shared: bool = False, wait: bool = False) -> bool | None:
    """Lock an open file, in place of the lock that this process has on it.

    Returns:
        False if another process has it locked; None if the system or its file system has no locks.
    """
    try:
        import fcntl
    except ImportError:  # on Windows
        return None
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def open_own(path: Path) -> BufferedRandom:
    """Open a file that is written in several steps, for reading and writing; create it if it is not there.

    A link is refused, because it leads to a file of somebody else.
    """
    flags = os.O_RDWR | os.O_CREAT
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # O_NONBLOCK: a pipe must not block
        flags |= getattr(os, name, 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise _not_own(path) from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise _not_own(path)
    return os.fdopen(descriptor, "r+b")


def _not_own(path: Path) -> InputError:
    return InputError(
        f"{printable(path)} is a link, a pipe or a device, and Vitrail writes a file of that name; remove "
        "it, or choose another output."
    )


def _is_at(file: BufferedRandom, path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False


# ---- atomic writes --------------------------------------------------------------------------------

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
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
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
    return write_bytes(path, text.encode(), overwrite=overwrite)


def write_bytes(path: str | Path, data: bytes, *, overwrite: bool = False) -> Path:
    """Write a binary file atomically."""
    with atomic_file(path, overwrite=overwrite) as partial:
        partial.write_bytes(data)
    return Path(path)


def write_array(path: str | Path, array: NDArray[Any], *, overwrite: bool = False) -> Path:
    """Write a .npy file atomically."""
    import numpy as np

    with atomic_file(path, overwrite=overwrite) as partial, partial.open("wb") as file:
        # NumPy writes to a file of Python past Python, and of a full disk it tells only numbers.
        writer: Any = SimpleNamespace(write=file.write)
        np.lib.format.write_array(writer, array, allow_pickle=False)
    return Path(path)


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


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, if the system supports it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def cache_folder() -> Path:
    """Return where files are that only save time: $VITRAIL_CACHE, vitrail in $XDG_CACHE_HOME or in ~/.cache.

    The folder need not exist, and may be deleted at any moment.
    """
    if own := os.environ.get("VITRAIL_CACHE"):
        return Path(own)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "vitrail"
    return Path("~/.cache/vitrail").expanduser()


# ---- folders of runs ------------------------------------------------------------------------


@contextmanager
def run_folder(out: str | Path | None, name: object) -> Iterator[Path]:
    """The given folder; by default runs/NAME, or runs/NAME-2 and so on: a new one.

    It is created at once, so that two runs never take the same one, and removed if it is empty in the end.
    Processes of torchrun only agree on it: the main one creates it when all have checked their settings.

    Args:
        name: the data of the run, whose name the folder gets if it is a path.
    """
    if out is not None:
        yield Path(out)
        return
    parent = Path("runs")
    is_new = not parent.exists()
    folder = _create_numbered(parent, _folder_name(name))
    try:
        yield folder
    finally:
        with suppress(OSError):  # they are not empty
            folder.rmdir()
            if is_new:
                parent.rmdir()


def _folder_name(data: object) -> str:
    """photos for photos/ and photos.csv; run for what has no name."""
    if not isinstance(data, (str, Path)):
        return "run"
    path = Path(data).absolute()
    return re.sub(r"\W+", "-", path.name if path.is_dir() else path.stem).strip("-") or "run"


def _create_numbered(parent: Path, name: str) -> Path:
    folders = (parent / (name if number == 1 else f"{name}-{number}") for number in count(1))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return next(folder for folder in folders if not os.path.lexists(folder))
    parent.mkdir(parents=True, exist_ok=True)
    return next(folder for folder in folders if _is_created(folder))


def _is_created(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True
