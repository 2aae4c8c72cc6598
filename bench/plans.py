"""The time that a plan promises beside the time that the run takes, from the plan to the end of the command.

    python -m bench.plans "digits.npz --recipe digits --set epochs=250" "photos/ --set epochs=6"

Each argument is one run: what follows `vitrail train`. The runs follow one another on a machine that should
have nothing else to do. Only runs of two minutes or more count: a shorter one is mostly its start.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.measure import environment, save

_UNITS = {"second": 1, "s": 1, "min": 60, "minute": 60, "hour": 3600, "h": 3600}
_PLANNED = re.compile(r"^time\s+about (.+?)(?:, (.+))?$")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", help="the arguments of `vitrail train`, without --out")
    parser.add_argument("--out", type=Path, default=Path("bench/results/plans.json"))
    args = parser.parse_args()
    result: dict[str, Any] = {"runs": [], "environment": environment()}
    for run in args.runs:
        found = measure(run)
        result["runs"].append(found)
        save(result, args.out)
        print(f"{found['planned_s']:>6.0f} s planned, {found['taken_s']:>6.1f} s taken, ", end="")
        print(f"{found['planned_s'] / found['taken_s']:.2f}  {run}", flush=True)


def measure(run: str) -> dict[str, Any]:
    """Start the run, and wait for its plan and its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "vitrail", "train", *shlex.split(run), "--out", f"{folder}/run"]
        wide = {**os.environ, "COLUMNS": "200"}  # a plan's line is not folded
        begin = time.perf_counter()
        planned, basis, at, lines = 0.0, "", 0.0, []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=wide
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if match := _PLANNED.match(line.strip()):
                    planned, basis, at = seconds(match[1]), match[2] or "", time.perf_counter()
        if process.returncode or not planned:
            sys.exit(f"`vitrail train {run}` failed or showed no plan:\n" + "".join(lines[-20:]))
        end = time.perf_counter()
    return {
        "run": " ".join(Path(word).name if Path(word).exists() else word for word in shlex.split(run)),
        "planned_s": planned,
        "basis": basis,
        "taken_s": round(end - at, 1),
        "before_plan_s": round(at - begin, 1),
    }


def seconds(text: str) -> float:
    """Of "40 s", "2.3 min", "3.5 h", and "2 min 20 s" or "40 seconds" as earlier versions have it."""
    parts = re.findall(r"([\d.]+) ([a-z]+)", text)
    return sum(
        float(count) * _UNITS[unit if unit == "s" else unit.removesuffix("s")] for count, unit in parts
    )


if __name__ == "__main__":
    main()
