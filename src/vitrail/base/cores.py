"""The processor cores that this process may use: by its affinity, its container's quota and its ranks."""

from __future__ import annotations

import math
import os
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
