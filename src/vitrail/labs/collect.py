"""Run labs and write down what they gave: `python -m vitrail.labs.collect [NAME ...]`, all without names.

    python -m vitrail.labs.collect characters --data characters=tinyshakespeare.txt --pictures new

This is how results.json, which `vitrail notes` prints, is made anew; labs that are not run stay as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitrail.labs.lab import LABS, RESULTS, Size, find, known, perform
from vitrail.training.checkpoint import replace_text


def collect(
    place: Path,
    size: Size = "full",
    tell: Callable[[dict[str, Any]], None] = lambda result: None,
    names: Sequence[str] | None = None,
    data: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Labs, one after the other; each writes its numbers and its picture into the folder."""
    found = []
    for name in names or LABS:
        found.append(perform(name, place, size, (data or {}).get(name)))
        tell(found[-1])
    return found


def write(results: Sequence[dict[str, Any]], file: Path) -> None:
    replace_text(file, json.dumps(results, indent=1) + "\n")


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All results in the order of the table; of a lab that was run again, the new one."""
    found = {result["name"]: result for result in (*old, *new)}
    return [found[name] for name in LABS if name in found]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run labs and write results.json of the package anew.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all of them when not given")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=PATH", help="data for a lab")
    parser.add_argument("--pictures", type=Path, help="A folder for the pictures and each lab's numbers.")
    asked = parser.parse_args()
    data = dict(one.split("=", 1) for one in asked.data)
    for name in (*asked.names, *data):
        find(name)

    def tell(result: dict[str, Any]) -> None:
        print(result["name"], result["verdict"], f"{result['seconds']} s", flush=True)
        write(merged(known(), [result]), RESULTS)  # at once: the next lab may take long

    with TemporaryDirectory() as aside:
        collect(asked.pictures or Path(aside), tell=tell, names=asked.names, data=data)


if __name__ == "__main__":
    main()
