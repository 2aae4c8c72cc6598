"""Write the tables of docs/training-settings.md from TrainConfig and its parts: python -m docs.settings"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from vitrail.base.fields import Config, literal_values, type_hints
from vitrail.images.augment.mixing import Mixing
from vitrail.images.augment.pipeline import Augment
from vitrail.training.recipes.settings import TrainConfig

PAGE = Path(__file__).parent / "training-settings.md"
BEGIN, END = "<!-- settings -->", "<!-- end of settings -->"
_PARTS = {"augment": Augment, "mixing": Mixing}


def written() -> str:
    """All tables, as Markdown: TrainConfig by the groups of its source, then its parts."""
    parts = [
        f"## {title[0].upper()}{title[1:]}\n\n{table(TrainConfig, names)}"
        for title, names in groups(TrainConfig)
    ]
    for name, config in _PARTS.items():
        every = [field.name for field in dataclasses.fields(config)]
        parts.append(f"## {config.__name__}: `{name}.*`\n\n{table(config, every, f'{name}.')}")
    return "\n\n".join(parts)


def groups(config: type[Config]) -> list[tuple[str, list[str]]]:
    """The fields under each comment `# ---- title` in the source of a config."""
    found: list[tuple[str, list[str]]] = []
    for line in inspect.getsource(config).splitlines():
        if title := re.fullmatch(r"    # ---- (.+)", line):
            found.append((title[1], []))
        elif (name := re.match(r"    (\w+): ", line)) and name[1] in config.__dataclass_fields__:  # type: ignore[attr-defined]
            found[-1][1].append(name[1])
    return found


def table(config: type[Config], names: list[str], prefix: str = "") -> str:
    """Name, default, allowed values and meaning of some fields."""
    lines = ["| setting | default | allowed values | meaning |", "|---|---|---|---|"]
    for name in names:
        if not prefix and name in _PARTS:
            continue  # it has a table of its own
        field = config.__dataclass_fields__[name]  # type: ignore[attr-defined]
        doc = field.metadata["doc"]
        lines.append(f"| `{prefix}{name}` | `{shown(field.default)}` | {allowed(config, name)} | {doc} |")
    return "\n".join(lines)


def shown(default: object) -> str:
    """A default as it is written after --set."""
    if isinstance(default, tuple):
        return ",".join(map(shown, default)) or "none"
    if isinstance(default, float):
        return f"{default:.3g}"
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)


def allowed(config: type[Config], name: str) -> str:
    """The allowed values of a field: its words, or the condition of its check."""
    hint = type_hints(config)[name]
    words = [f"`{word}`" for word in literal_values(hint)]
    must = config.__dataclass_fields__[name].metadata["must"]  # type: ignore[attr-defined]
    none = ["`none`"] if type(None) in getattr(hint, "__args__", ()) else []
    return ", ".join([*words, *[must] * bool(must), *none])


def page() -> str:
    """The page with its tables updated."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{written()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page())
