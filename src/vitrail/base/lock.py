"""Files that several processes may want to write at the same time, locked while one of them does."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.base.errors import FileError, InputError, printable

if TYPE_CHECKING:
    from io import BufferedRandom
    from typing import IO


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
