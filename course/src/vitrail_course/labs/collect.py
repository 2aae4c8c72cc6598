"""Run labs and save their results: `python -m vitrail_course.labs.collect [NAME ...]`, all by default.

    python -m vitrail_course.labs.collect characters --data characters=tinyshakespeare.txt --images new

Updates results.json, which `vitrail notes` prints; the results of labs that are not run are unchanged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitrail.base.safe_files import write_text
from vitrail_course.labs.lab import LABS, RESULTS, find_lab, run_lab

_DERIVED = ("note", "claim", "verdict", "statements")  # found again when results are read


def save_result(result: dict[str, Any], file: Path = RESULTS) -> None:
    """Put a result into the file, in the order of `LABS`, in place of an older one of the same lab."""
    saved = {name: value for name, value in result.items() if name not in _DERIVED}
    by_name = {one["name"]: one for one in (*json.loads(file.read_text(encoding="utf-8")), saved)}
    results = [by_name[name] for name in LABS if name in by_name]
    write_text(file, json.dumps(results, indent=1) + "\n", overwrite=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run labs and update the results.json of the package.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the labs to run; all by default")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=PATH", help="data for a lab")
    parser.add_argument("--images", type=Path, help="a folder for the figures and each lab's numbers")
    parser.add_argument("--device", default="auto", help="where models are trained: auto, cpu or cuda")
    options = parser.parse_args(words)
    data = dict(item.split("=", 1) for item in options.data)
    for name in (*options.names, *data):
        find_lab(name)
    with TemporaryDirectory() as temporary:
        for name in options.names or LABS:
            result = run_lab(name, options.images or Path(temporary), "full", data.get(name), options.device)
            print(name, result["verdict"], f"{result['seconds']} s", flush=True)
            save_result(result)  # at once: the next lab may take long


if __name__ == "__main__":
    main()
