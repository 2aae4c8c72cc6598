"""The memory that this process may use, and the errors that say it has run out."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

_CGROUP_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "bad_alloc",
    "failed to map segment",
    "start new thread",
)


def memory_limit() -> int | None:
    """The bytes this process can have: RAM and swap, or less if a limit is set; None if unknown."""
    limits = (_installed_memory(), _process_limit(), *map(_container_limit, _CGROUP_FILES))
    return min(filter(None, limits), default=None)


def _installed_memory() -> int | None:
    with suppress(OSError):
        text = Path("/proc/meminfo").read_text()
        return 1024 * sum(int(size) for size in re.findall(r"^(?:MemTotal|SwapTotal): *(\d+) kB", text, re.M))
    return None


def _process_limit() -> int | None:
    """The limit set by `ulimit -v`."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _container_limit(file: str) -> int | None:
    with suppress(OSError, ValueError):  # no such file, or the word "max"
        return int(Path(file).read_text())
    return None


def format_bytes(size: float) -> str:
    """Format a number of bytes: 25 GB."""
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 1000 or unit == "TB":
            break
    return f"{size:,.0f} {unit}" if size >= 10 else f"{size:.1f} {unit}"


# ---- errors of torch and the system ---------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; torch raises several, some without a class of their own."""
    if isinstance(error, (RuntimeError, ImportError)):
        return any(message in str(error) for message in _OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


def failed_allocation(error: BaseException) -> str | None:
    """The size of the allocation that failed, if the error message names it."""
    if match := re.search(r"allocate (\d+) bytes", str(error)):
        return format_bytes(int(match[1]))
    match = re.search(r"allocate ([\d.]+ [KMGTPE]i?B)", str(error))
    return match[1] if match else None
