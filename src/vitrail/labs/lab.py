"""What all labs share: a claim of the notes, an experiment, a number, a verdict, a picture.

A lab is a module of this folder with

    NAME     what `vitrail lab` calls it
    NOTE     the note and its slide
    CLAIM    what is said there, in our words
    TAKES    what --data may be; empty if the lab draws its own numbers
    run(place, size, data) -> Result

The verdict comes from the numbers, by code: `run` measures, `judge` beside it decides.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor

from vitrail.errors import InputError, needs, suggest
from vitrail.labs.trial import one_thread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Size = Literal["full", "small"]
Word = Literal["holds", "holds if", "does not hold"]

# Every lab and the module it lives in, in the order of the table that `vitrail notes` prints.
LABS = {
    "patching": "patching",
    "walk": "walk",
    "scale": "scale",
    "permutation": "permutation",
    "positions": "positions",
    "practice": "practice",
    "pool": "pool",
    "norms": "norms",
    "activation": "activation",
    "blocks": "blocks",
    "translation": "translation",
    "convolution": "convolution",
    "association": "association",
    "double-if": "double_if",
    "resolution": "resolution",
    "attention-distance": "attention_distance",
    "characters": "characters",
    "encoder-decoder": "encoder_decoder",
    "speech": "speech",
    "towers": "towers",
}
RESULTS = Path(__file__).with_name("results.json")


def joined(word: str, condition: str) -> str:
    """A verdict in words; some conditions begin with a colon."""
    return f"{word}{condition}" if condition.startswith(":") else f"{word} {condition}".rstrip()


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, and under which condition."""

    word: Word
    condition: str = ""
    """With `holds if`, what must be so; with `does not hold`, what is so instead."""

    def __str__(self) -> str:
        return joined(self.word, self.condition)


@dataclass(frozen=True, eq=False)
class Result:
    """What came out of a lab."""

    number: float
    unit: str
    """What the number counts, in words."""
    n: int
    """Of how many trials it is the mean or the worst."""
    verdict: Verdict
    sentence: str
    """What was seen."""
    figure: Figure
    interval: tuple[float, float] | None = None
    """Of the number, 95 %, where chance has a part in it."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The other numbers that the verdict rests on."""

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "unit": self.unit,
            "interval": self.interval,
            "n": self.n,
            "verdict": self.verdict.word,
            "condition": self.verdict.condition,
            "sentence": self.sentence,
            "numbers": dict(self.numbers),
        }


class Lab(Protocol):
    """A module of this folder."""

    NAME: str
    NOTE: str
    CLAIM: str
    TAKES: str

    def run(self, place: Path, size: Size, data: str | Path | None = None) -> Result: ...


def find(name: str) -> Lab:
    if name not in LABS:
        raise InputError("A lab must be one there is.", repr(name), suggest(name, LABS))
    return cast(Lab, import_module(f"vitrail.labs.{LABS[name]}"))


def perform(name: str, place: Path, size: Size = "full", data: str | Path | None = None) -> dict[str, Any]:
    """Run a lab and write NAME.json, NAME.png and NAME.svg into a folder; what the JSON holds comes back."""
    from vitrail.inspect.canvas import save
    from vitrail.training.checkpoint import replace_text
    from vitrail.training.place import environment

    lab = find(name)
    if data is not None and not lab.TAKES:
        raise InputError(
            f"The lab {name} takes no data: it draws its own numbers.", f"--data {data}", "Leave it out."
        )
    with needs("inspect"):
        import matplotlib  # noqa: F401, before anything is computed
    place.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with one_thread():
        torch.manual_seed(0)
        result = lab.run(place, size, data)
    seconds = round(time.perf_counter() - start, 1)
    around = {key: value for key, value in environment().items() if key != "command"}
    said: dict[str, Any] = {
        "name": name,
        "note": lab.NOTE,
        "claim": lab.CLAIM,
        "command": f"vitrail lab {name}" + ("" if data is None else f" --data {Path(data).name}"),
    }
    said |= result.as_json() | {"size": size, "seconds": seconds, "environment": around | {"threads": 1}}
    said["data"] = None if data is None else Path(data).name
    replace_text(place / f"{name}.json", json.dumps(said, indent=2) + "\n")
    save(result.figure, place / name)
    return said


def pictures(data: str | Path | None, count: int) -> Tensor:
    """The first so many pictures (B, C, H, W) from 0 to 1; scikit-learn's digits where no data is given."""
    from vitrail.data.sources import open_data

    split = open_data("digits" if data is None else data).train
    if split.images is None:
        raise InputError(
            "This lab takes pictures in arrays: IDX files or a .npz.",
            "pictures in files",
            "Leave --data out.",
        )
    images = torch.from_numpy(split.images[:count])  # (B, H, W, C)
    return images.permute(0, 3, 1, 2).double() / 255


# ---- the table of all -----------------------------------------------------------------------

COLUMNS = ("note", "claim", "command", "number", "verdict")


def known(file: Path = RESULTS) -> list[dict[str, Any]]:
    """What all labs gave when they were last run."""
    return json.loads(file.read_text(encoding="utf-8"))


def row(result: Mapping[str, Any]) -> tuple[str, ...]:
    """A result as the table has it."""
    verdict = joined(result["verdict"], result["condition"])
    return result["note"], result["claim"], result["command"], number_in_words(result), verdict


def number_in_words(result: Mapping[str, Any]) -> str:
    """The number with its interval, what it counts, and of how many."""
    number = f"{result['number']:.3g}"
    if result["interval"] is not None:
        low, high = result["interval"]
        number += f" [{low:.3g}, {high:.3g}]"
    return f"{number} {result['unit']} (n = {result['n']:,})"


def markdown(results: list[dict[str, Any]]) -> str:
    """The table for a page."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(row, results)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
