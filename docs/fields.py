"""Write the table of docs/config.md from ViTConfig: python -m docs.fields"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_type_hints

from vitrail.base.fields import literal_values
from vitrail.model.config import ViTConfig

PAGE = Path(__file__).parent / "config.md"


def table() -> str:
    """The table of all fields."""
    hints = get_type_hints(ViTConfig)
    lines = ["| field | default | choices | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(ViTConfig):
        choices = ", ".join(f"`{value}`" for value in literal_values(hints[field.name]))
        default = "required" if field.default is dataclasses.MISSING else f"`{field.default}`"
        lines.append(f"| `{field.name}` | {default} | {choices} | {field.metadata['doc']} |")
    return "\n".join(lines)


def page() -> str:
    """The page with an up-to-date table."""
    begin, end = "<!-- fields -->", "<!-- end of fields -->"
    return re.sub(
        f"{begin}.*{end}", lambda _: f"{begin}\n{table()}\n{end}", PAGE.read_text(), flags=re.DOTALL
    )


if __name__ == "__main__":
    PAGE.write_text(page())
