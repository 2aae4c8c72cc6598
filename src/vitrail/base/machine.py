"""The processor cores and memory that this process may use, and the errors that say memory has run out."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """The cores that this process may use; with several ranks on a machine, its part of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(CGROUPS, MEMBERSHIP)
    if quota is not None:
        cores = min(cores, math.ceil(quota))
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, cores // max(1, int(ranks) if ranks.isdecimal() else 1))


def cpu_quota(cgroups: Path, membership: Path) -> float | None:
    """The cores that the control groups of this process grant, as `docker run --cpus` sets them.

    None without a limit. The smallest one counts, of the group and those around it.

    Args:
        cgroups: where version 1 or 2 is mounted.
        membership: the file that names the groups of this process. A container may not see its own group by
            this name; its files are those of the root then.
    """
    limits = []
    for folder in _group_folders(cgroups, membership):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or the word "max"
            limit, period = (folder / "cpu.max").read_text().split()
            limits.append(int(limit) / int(period))
        with suppress(OSError, ValueError, ZeroDivisionError):
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            limits.append(int(limit) / int(period))
    return min((limit for limit in limits if limit > 0), default=None)  # -1: no limit


def _group_folders(cgroups: Path, membership: Path) -> Iterator[Path]:
    """The folders of the groups, each followed by those around it."""
    groups = {cgroups: "/", cgroups / "cpu": "/"}
    with suppress(OSError, ValueError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                groups[cgroups] = path
            elif "cpu" in controllers.split(","):
                groups[cgroups / "cpu"] = path
    for root, path in groups.items():
        own = root / path.lstrip("/")
        while own != root and root in own.parents:
            yield own
            own = own.parent
        yield root


# ---- memory ---------------------------------------------------------------------------------------

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
    limits = []
    with suppress(OSError):
        sizes = re.findall(
            r"^(?:MemTotal|SwapTotal): *(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE
        )
        limits.append(1024 * sum(map(int, sizes)))
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)  # of `ulimit -v`
        limits += [soft] * (soft != resource.RLIM_INFINITY)
    for file in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # no such file, or the word "max"
            limits.append(int(Path(file).read_text()))
    return min(filter(None, limits), default=None)


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
