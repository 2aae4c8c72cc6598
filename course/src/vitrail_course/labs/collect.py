"""Run labs and save their results: `python -m vitrail_course.labs.collect [NAME ...]`, all by default.

    python -m vitrail_course.labs.collect characters --data characters=tinyshakespeare.txt --images new
    python -m vitrail_course.labs.collect --verdicts

Updates results.json, which `vitrail notes` prints; the results of labs that are not run are unchanged. With
--verdicts nothing is run: the verdicts on the saved numbers are decided again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitrail.base.safe_files import write_text
from vitrail_course.labs.lab import LABS, RESULTS, LabSize, find_lab, load_results, run_lab, verdict_fields


def collect_results(
    out: Path,
    size: LabSize = "full",
    report: Callable[[dict[str, Any]], None] = lambda result: None,
    names: Sequence[str] | None = None,
    data: Mapping[str, str] | None = None,
    device: str = "auto",
) -> list[dict[str, Any]]:
    """Run labs one after the other; each writes its numbers and its figure into the folder."""
    results = []
    for name in names or LABS:
        results.append(run_lab(name, out, size, (data or {}).get(name), device))
        report(results[-1])
    return results


def write_results(results: Sequence[dict[str, Any]], file: Path) -> None:
    write_text(file, json.dumps(results, indent=1) + "\n", overwrite=True)


def merge_results(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All results in the order of `LABS`; new ones replace old ones of the same lab."""
    by_name = {result["name"]: result for result in (*old, *new)}
    return [by_name[name] for name in LABS if name in by_name]


def decide_again(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results with the verdicts that their numbers give now, and with the claims of the labs."""
    return [
        result
        | {"note": find_lab(result["name"]).NOTE, "claim": find_lab(result["name"]).CLAIM}
        | verdict_fields(result["name"], result["numbers"], result["size"])
        for result in results
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run labs and update the results.json of the package.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the labs to run; all by default")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=PATH", help="data for a lab")
    parser.add_argument("--images", type=Path, help="a folder for the figures and each lab's numbers")
    parser.add_argument("--device", default="auto", help="where models are trained: auto, cpu or cuda")
    parser.add_argument("--verdicts", action="store_true", help="decide the saved verdicts again")
    options = parser.parse_args()
    if options.verdicts:
        write_results(decide_again(load_results()), RESULTS)
        return
    data = dict(item.split("=", 1) for item in options.data)
    for name in (*options.names, *data):
        find_lab(name)

    def save(result: dict[str, Any]) -> None:
        print(result["name"], result["verdict"], f"{result['seconds']} s", flush=True)
        write_results(merge_results(load_results(), [result]), RESULTS)  # at once: the next lab may take long

    with TemporaryDirectory() as temporary:
        out = options.images or Path(temporary)
        collect_results(out, report=save, names=options.names, data=data, device=options.device)


if __name__ == "__main__":
    main()
