"""Start the process that runs a student's file, and listen to it. No torch in here: it starts at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import FileError, InputError, printable, suggest

NAMES = (
    *("patches", "positions", "layer_norm", "attention"),
    *("multi_head_attention", "mlp", "block", "vit"),
)
STUDENT = "<student>"  # the name of the file in stack traces, whatever letters its own name has
GRACE = 120  # seconds for torch to load, and for a process that does not stop itself


class Mark(NamedTuple):
    """What came of one exercise."""

    name: str
    verdict: str
    """right, wrong, not yet, or error"""
    words: str = ""
    likely: str = ""


def start_file(path: Path) -> None:
    """Write the file that a student fills in; never over another."""
    if os.path.lexists(path):
        raise InputError(
            "--start must name a new file: nothing of yours is overwritten.",
            f"{printable(path)}, which is there already",
            "Name another file.",
        )
    template = Path(__file__).with_name("template.py").read_text(encoding="utf-8")
    with open(path, "x", encoding="utf-8") as file:
        file.write(template)


def check_file(path: Path, only: Sequence[str] = NAMES, limit: float = 60) -> list[Mark]:
    """Mark the exercises in a student's file, which may take so many seconds."""
    for name in only:
        if name not in NAMES:
            raise InputError(
                "--only takes the name of an exercise.", repr(printable(name)), suggest(name, NAMES)
            )
    if not path.is_file():
        what = "which is no file" if path.exists() else "which is not there"
        raise FileError(
            "check takes a Python file with your functions.",
            f"{printable(path)}, {what}",
            "vitrail check --start NEW.py writes one to fill in.",
        )
    with tempfile.TemporaryDirectory() as folder:
        report, trace = Path(folder, "report"), Path(folder, "trace")
        code = run_child(path, report, trace, limit, only)
        facts = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        place = trace.read_text(encoding="utf-8", errors="replace")
    return marks(path, only, facts, stopped(code, place, limit))


def run_child(path: Path, report: Path, trace: Path, limit: float, only: Sequence[str]) -> int | None:
    """Its exit code, or None if it had to be stopped from here."""
    report.touch()
    trace.touch()
    # -P: a torch.py or json.py that lies about where the student works is not taken for the real one.
    command = [sys.executable, "-P", "-B", "-m", "vitrail.exercises.child"]
    arguments = [str(path.absolute()), str(report), str(trace), str(limit), *only]
    nothing = subprocess.DEVNULL
    try:
        done = subprocess.run(
            [*command, *arguments], stdin=nothing, stdout=nothing, stderr=nothing, timeout=limit + GRACE
        )
        return done.returncode
    except subprocess.TimeoutExpired:
        return None


def stopped(code: int | None, place: str, limit: float) -> str:
    """Why the process ended before it was done, if it did."""
    if code is None or "Timeout" in place:
        at = re.search(rf'File "{re.escape(STUDENT)}", line (\d+)', place)
        line = f"Line {at[1]}: " if at else ""
        return f"{line}still running after {limit:g} s, in an endless loop perhaps."
    return f"Python itself ended with the code {code}: by os._exit, or out of memory, perhaps."


def marks(path: Path, only: Sequence[str], facts: list[dict[str, Any]], why: str) -> list[Mark]:
    """What the process told, with what it did not come to."""
    for fact in facts:
        if "unusable" in fact:
            raise unusable(path, fact["unusable"])
    found = {fact["mark"]["name"]: Mark(**fact["mark"]) for fact in facts if "mark" in fact}
    begun = [fact["started"] for fact in facts if "started" in fact]
    if not begun:
        raise unusable(path, why)
    if begun[-1] not in found:
        found[begun[-1]] = Mark(begun[-1], "error", why)
    missed = f"Not marked: {begun[-1]} did not end."
    return [found.get(name, Mark(name, "not yet", missed)) for name in NAMES if name in only]


def unusable(path: Path, why: str) -> FileError:
    why = why[0].lower() + why[1:] if why.startswith("Line") else why
    return FileError(
        "A file of exercises must be Python that can be imported.",
        f"{printable(path)}, {why}".removesuffix("."),
        "Repair this first; then its functions can be marked.",
    )
