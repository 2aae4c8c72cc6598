"""Run a student's file in a separate process and collect the results. Without torch, to start fast."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.base.errors import FileError, InputError, printable, suggest
from vitrail.base.safe_files import check_new, write_text

NAMES = (
    *("patches", "positions", "layer_norm", "attention"),
    *("multi_head_attention", "mlp", "block", "vit"),
)
STUDENT = "<student>"  # the file's name in stack traces, whatever characters its own name has
_GRACE = 120  # seconds to load torch, and for a process that does not stop itself


class ExerciseResult(NamedTuple):
    """The result of one exercise."""

    name: str
    verdict: str
    """correct, wrong, not yet, or error."""
    message: str = ""
    """The task, and what is wrong."""
    hint: str = ""
    """The likely mistake."""


def start_file(path: Path) -> None:
    """Write the template that a student fills in, to a new file."""
    check_new(path, "--start")
    write_text(path, Path(__file__).with_name("template.py").read_text(encoding="utf-8"))


def check_file(path: Path, only: Sequence[str] = NAMES, limit: float = 60) -> list[ExerciseResult]:
    """Check the exercises in a student's file, which may run for `limit` seconds."""
    for name in only:
        if name not in NAMES:
            raise InputError(f"Unknown exercise {printable(name)!r}. {suggest(name, NAMES)}")
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise FileError(
            f"{printable(path)} {problem}; name a Python file with your functions, or create one with "
            "`vitrail check --start NEW.py`."
        )
    with tempfile.TemporaryDirectory() as folder:
        report, trace = Path(folder, "report"), Path(folder, "trace")
        code = _run_child(path, report, trace, limit, only)
        records = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        stack = trace.read_text(encoding="utf-8", errors="replace")
    return _collect_marks(path, only, records, _why_stopped(code, stack, limit))


def _run_child(path: Path, report: Path, trace: Path, limit: float, only: Sequence[str]) -> int | None:
    """The exit code of the process, or None if it had to be killed."""
    report.touch()
    trace.touch()
    # -P: a torch.py or json.py in the working directory must not be imported in place of the real one.
    command = [sys.executable, "-P", "-B", "-m", "vitrail_course.exercises.child"]
    arguments = [str(path.absolute()), str(report), str(trace), str(limit), *only]
    null = subprocess.DEVNULL
    try:
        done = subprocess.run(
            [*command, *arguments], stdin=null, stdout=null, stderr=null, timeout=limit + _GRACE
        )
        return done.returncode
    except subprocess.TimeoutExpired:
        return None


def _why_stopped(code: int | None, stack: str, limit: float) -> str:
    """Why the process ended before it was done, if it did."""
    if code is None or "Timeout" in stack:
        match = re.search(rf'File "{re.escape(STUDENT)}", line (\d+)', stack)
        line = f"Line {match[1]}: " if match else ""
        return f"{line}still running after {limit:g} s, perhaps in an endless loop."
    return f"Python exited with code {code}, perhaps because of os._exit or a lack of memory."


def _collect_marks(
    path: Path, only: Sequence[str], records: list[dict[str, Any]], reason: str
) -> list[ExerciseResult]:
    """The results that the process reported, and `reason` for the exercise at which it stopped."""
    for record in records:
        if "import_error" in record:
            raise _import_error(path, record["import_error"])
    marks = {
        record["result"]["name"]: ExerciseResult(**record["result"])
        for record in records
        if "result" in record
    }
    started = [record["started"] for record in records if "started" in record]
    if not started:
        raise _import_error(path, reason)
    if started[-1] not in marks:
        marks[started[-1]] = ExerciseResult(started[-1], "error", reason)
    skipped = f"Not checked, because {started[-1]} did not finish."
    return [marks.get(name, ExerciseResult(name, "not yet", skipped)) for name in NAMES if name in only]


def _import_error(path: Path, reason: str) -> FileError:
    reason = reason[0].lower() + reason[1:] if reason.startswith("Line") else reason
    return FileError(
        f"{printable(path)} cannot be imported: {reason.removesuffix('.')}. Fix this first; then its "
        "functions can be checked."
    )
