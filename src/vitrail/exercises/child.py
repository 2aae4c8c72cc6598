"""`python -m vitrail.exercises.child FILE REPORT TRACE LIMIT NAME ...`: a student's file, run and marked.

Whatever that file does, it does it in this process. REPORT gets a line of JSON for each thing that is
known, as soon as it is known; TRACE the place where the time ran out.
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

from vitrail.exercises.exercise import EXERCISES
from vitrail.exercises.mark import described, mark
from vitrail.exercises.run import STUDENT


def main(file: Path, report: Path, trace: Path, limit: float, only: list[str]) -> None:
    with open(report, "w", encoding="utf-8") as told, open(trace, "w") as place:

        def tell(**fact: Any) -> None:
            print(json.dumps(fact), file=told, flush=True)

        torch.set_num_threads(1)  # more of them only wait for each other on tensors this small
        faulthandler.dump_traceback_later(limit, exit=True, file=place)
        try:
            names = run(file)
        except BaseException as error:
            tell(unusable=described(error))
        else:
            for exercise in EXERCISES:
                if exercise.name in only:
                    tell(started=exercise.name)
                    tell(mark=mark(exercise, names)._asdict())
        tell(done=True)
    os._exit(0)  # a thread of the student's may still be running


def run(file: Path) -> dict[str, Any]:
    """Run a student's file; its names. It may import its neighbours, and is not what was started."""
    module = ModuleType("student")
    module.__file__ = str(file)
    sys.modules["student"] = module
    sys.path.append(str(file.absolute().parent))
    exec(compile(file.read_bytes(), STUDENT, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
