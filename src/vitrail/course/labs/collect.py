"""Run labs and save their results: `python -m vitrail.course.labs.collect [NAME ...]`, all by default.

    python -m vitrail.course.labs.collect characters --data characters=tinyshakespeare.txt --images new

Updates results.json, which `vitrail notes` prints; the results of labs that are not run are unchanged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitrail.course.labs.lab import LABS, RESULTS, LabSize, find_lab, load_results, run_lab
from vitrail.io.write import write_text


def collect_results(
    out: Path,
    size: LabSize = "full",
    report: Callable[[dict[str, Any]], None] = lambda result: None,
    names: Sequence[str] | None = None,
    data: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run labs one after the other; each writes its numbers and its figure into the folder."""
    results = []
    for name in names or LABS:
        results.append(run_lab(name, out, size, (data or {}).get(name)))
        report(results[-1])
    return results


def write_results(results: Sequence[dict[str, Any]], file: Path) -> None:
    write_text(file, json.dumps(results, indent=1) + "\n", overwrite=True)


def merge_results(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All results in the order of `LABS`; new ones replace old ones of the same lab."""
    by_name = {result["name"]: result for result in (*old, *new)}
    return [by_name[name] for name in LABS if name in by_name]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run labs and update the results.json of the package.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the labs to run; all by default")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=PATH", help="data for a lab")
    parser.add_argument("--images", type=Path, help="a folder for the figures and each lab's numbers")
    options = parser.parse_args()
    data = dict(item.split("=", 1) for item in options.data)
    for name in (*options.names, *data):
        find_lab(name)

    def save(result: dict[str, Any]) -> None:
        print(result["name"], result["verdict"], f"{result['seconds']} s", flush=True)
        write_results(merge_results(load_results(), [result]), RESULTS)  # at once: the next lab may take long

    with TemporaryDirectory() as temporary:
        collect_results(options.images or Path(temporary), report=save, names=options.names, data=data)


if __name__ == "__main__":
    main()
