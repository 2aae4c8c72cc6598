"""Write the table of docs/config.md from the config itself: python -m docs.fields"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_type_hints

from vitrail.config import ViTConfig
from vitrail.fields import literal_words

PAGE = Path(__file__).parent / "config.md"


def table() -> str:
    hints = get_type_hints(ViTConfig)
    lines = ["| field | default | words | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(ViTConfig):
        words = ", ".join(f"`{word}`" for word in literal_words(hints[field.name]))
        default = "required" if field.default is dataclasses.MISSING else f"`{field.default}`"
        lines.append(f"| `{field.name}` | {default} | {words} | {field.metadata['doc']} |")
    return "\n".join(lines)


def page() -> str:
    """The page as it should be."""
    begin, end = "<!-- fields -->", "<!-- end of fields -->"
    return re.sub(
        f"{begin}.*{end}", lambda _: f"{begin}\n{table()}\n{end}", PAGE.read_text(), flags=re.DOTALL
    )


if __name__ == "__main__":
    PAGE.write_text(page())
