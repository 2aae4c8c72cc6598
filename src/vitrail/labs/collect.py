"""Run all labs and write down what they gave: `python -m vitrail.labs.collect [--pictures FOLDER]`.

This is how results.json, which `vitrail notes` prints, is made anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitrail.labs.lab import LABS, RESULTS, Size, perform
from vitrail.training.checkpoint import replace_text


def collect(
    place: Path, size: Size = "full", tell: Callable[[dict[str, Any]], None] = lambda result: None
) -> list[dict[str, Any]]:
    """Every lab, one after the other; each writes its numbers and its picture into the folder."""
    found = []
    for name in LABS:
        found.append(perform(name, place, size))
        tell(found[-1])
    return found


def write(results: list[dict[str, Any]], file: Path) -> None:
    replace_text(file, json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run all labs and write results.json of the package anew.")
    parser.add_argument("--pictures", type=Path, help="A folder for the pictures and each lab's numbers.")
    asked = parser.parse_args()
    with TemporaryDirectory() as aside:
        results = collect(
            asked.pictures or Path(aside),
            tell=lambda result: print(
                result["name"], result["verdict"], f"{result['seconds']} s", flush=True
            ),
        )
    write(results, RESULTS)


if __name__ == "__main__":
    main()
