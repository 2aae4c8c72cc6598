"""Write the rooms and the walks of docs/architecture.md: python -m docs.architecture"""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import vitrail

ROOT = Path(vitrail.__file__).parent
PAGE = Path(__file__).parent / "architecture.md"

# From the bottom up: a room may import from those before it.
ROOMS = (
    *("base", "model", "images", "weights", "fast", "evaluation", "views", "predict", "training"),
    *("exporters", "experiment", "serve", "cli"),
)
WALKS = {
    "load": "`vt.load` of a file of timm",
    "predict": "`vitrail predict own.safetensors photos/`",
    "step": "A step of `vt.train`",
}


def rooms() -> str:
    """The table of the rooms, with the first line of each one's docstring."""
    lines = ["| room | what belongs there |", "|---|---|"]
    for room in ROOMS:
        sentence = (ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or "").split(
            "\n"
        )[0]
        lines.append(f"| `{room}/` | {sentence} |")
    return "\n".join(lines)


def walk(name: str) -> str:
    """The files that a run goes through, a line for each room."""
    command = [sys.executable, "-m", "bench.house", "--files", name]
    files = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    lines = [f"**{WALKS[name]}**: {len(files)} files", ""]
    for room, group in groupby(sorted(files, key=_room_number), key=lambda file: file.split("/")[0]):
        names = ", ".join(file.removeprefix(room + "/").removesuffix(".py") for file in group)
        lines.append(
            f"- `{room.removesuffix('.py')}`: {names}" if "/" in names or names != room else f"- `{room}`"
        )
    return "\n".join(lines)


def _room_number(file: str) -> tuple[int, str]:
    room = file.split("/")[0]
    return ROOMS.index(room) if room in ROOMS else -1, file


def with_part(page: str, name: str, text: str) -> str:
    """The page with the text between <!-- name --> and the next <!-- end -->."""
    before, begin, rest = page.partition(f"<!-- {name} -->\n")
    return f"{before}{begin}\n{text}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


if __name__ == "__main__":
    page = with_part(PAGE.read_text(), "rooms", rooms())
    PAGE.write_text(with_part(page, "walks", "\n\n".join(walk(name) for name in WALKS)))
