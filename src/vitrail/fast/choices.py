"""Measure candidates once on this machine, and remember the fastest in a file of the cache folder.

A choice is made by measuring all candidates once. `vitrail bench --forget` deletes the file; so may you. The
key names the machine and the versions, so that a new driver or another torch is measured again.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vitrail.base.safe_files import cache_folder, write_text

_MAX_BYTES = 2**22


def choices_path() -> Path:
    """The file that remembers the choices."""
    return cache_folder() / "fast" / "fastest.json"


def forget() -> bool:
    """Delete the remembered choices; whether there were any."""
    path = choices_path()
    existed = path.is_file()
    path.unlink(missing_ok=True)
    return existed


class Choices:
    """Candidates measured on a device.

    Args:
        device: where they run; its name is part of the key.
        remember: whether to read and write the file.
        measure: whether to measure what is not remembered; otherwise the default is used.
    """

    def __init__(self, device: torch.device, *, remember: bool = True, measure: bool = True) -> None:
        self.machine = describe_machine(device)
        self.on_cpu = device.type == "cpu"
        self.remember, self.measure = remember, measure
        self.seconds: dict[str, dict[str, float | None]] = {}
        """Measured or remembered seconds, by question and candidate; None for one that failed."""
        self.failures: dict[str, str] = {}
        """Why candidates failed that were measured now."""
        if remember:
            self.seconds = dict(_read().get(self.machine, {}))

    def knows(self, question: str, names: Sequence[str]) -> bool:
        """Whether these candidates were measured before."""
        return set(self.seconds.get(question, {})) == set(names)

    def fastest(
        self, question: str, names: Sequence[str], measure: Callable[[str], float], default: str | None = None
    ) -> str:
        """The candidate that takes the fewest seconds; one that raises an error is out.

        Args:
            measure: the seconds of a candidate.
            default: the answer where nothing is remembered or may be measured; the first by default.
        """
        known = self.seconds.get(question, {})
        if not self.knows(question, names):
            if not self.measure:
                return names[0] if default is None else default
            known = {name: self._attempt(measure, question, name) for name in names}
            self.seconds[question] = known
            if self.remember and not (self.on_cpu and is_busy()):
                _write(self.machine, question, known)
        valid = {name: seconds for name, seconds in known.items() if seconds is not None}
        if not valid:
            raise RuntimeError(f"No way to compute this works: {question}")
        return min(valid, key=lambda name: valid[name])

    def _attempt(self, measure: Callable[[str], float], question: str, name: str) -> float | None:
        try:
            return measure(name)
        except Exception as error:  # a kernel that does not compile here, or a backend without support
            self.failures[f"{question}: {name}"] = f"{type(error).__name__}: {str(error)[:300]}"
            return None


def is_busy() -> bool:
    """Whether other processes use the cores: what is measured then is used, and not remembered."""
    try:
        return os.getloadavg()[0] > len(os.sched_getaffinity(0)) + 0.5
    except (AttributeError, OSError):  # not on this system
        return False


@cache
def describe_machine(device: torch.device) -> str:
    """The processor, the number of threads, and the versions that decide the speed."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_processor()}, {torch.get_num_threads()} threads"
    versions = [f"torch {torch.__version__}"]
    package = "triton" if device.type == "cuda" else "onnxruntime"
    with suppress(PackageNotFoundError):
        versions.append(f"{package} {version(package)}")
    return ", ".join([name, *versions])


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _read() -> dict[str, Any]:
    """Read the file; empty if it is missing or damaged."""
    with suppress(OSError, ValueError):
        path = choices_path()
        if path.stat().st_size <= _MAX_BYTES:
            found = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(found, dict) and all(_is_table(table) for table in found.values()):
                return found
    return {}


def _is_table(table: Any) -> bool:
    numbers = (int, float, type(None))
    return isinstance(table, dict) and all(
        isinstance(row, dict) and all(isinstance(value, numbers) for value in row.values())
        for row in table.values()
    )


def _write(machine: str, question: str, seconds: dict[str, float | None]) -> None:
    """Add a row to the file. A cache that cannot be written is no error: it is measured again."""
    found = _read()
    found.setdefault(machine, {})[question] = seconds
    with suppress(OSError):
        os.makedirs(choices_path().parent, exist_ok=True)
        write_text(choices_path(), json.dumps(found, indent=1) + "\n", overwrite=True)
