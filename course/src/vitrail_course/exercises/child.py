"""`python -m vitrail_course.exercises.child FILE REPORT TRACE LIMIT NAME ...`: check a student's file.

Whatever the file does, it does in this process. Results are written to REPORT as lines of JSON as soon as
they are known, and to TRACE the line at which the time ran out.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from vitrail_course.exercises.exercise import EXERCISES
from vitrail_course.exercises.mark import check_exercise, describe_error
from vitrail_course.exercises.run import STUDENT


def main(file: Path, report: Path, trace: Path, limit: float, only: list[str]) -> None:
    with open(report, "w", encoding="utf-8") as report_file, open(trace, "w") as trace_file:

        def write(**record: Any) -> None:
            print(json.dumps(record), file=report_file, flush=True)

        torch.set_num_threads(1)  # faster for tensors this small
        faulthandler.dump_traceback_later(limit, exit=True, file=trace_file)
        try:
            namespace = _run_file(file)
        except BaseException as error:
            write(import_error=describe_error(error))
        else:
            for exercise in EXERCISES:
                if exercise.name in only:
                    write(started=exercise.name)
                    write(result=check_exercise(exercise, namespace)._asdict())
        write(done=True)
    os._exit(0)  # a thread of the student's code may still be running


def _run_file(file: Path) -> dict[str, Any]:
    """Run a student's file as a module and return its namespace. It may import files beside it."""
    module = ModuleType("student")
    module.__file__ = str(file)
    sys.modules["student"] = module
    sys.path.append(str(file.absolute().parent))
    exec(compile(file.read_bytes(), STUDENT, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
