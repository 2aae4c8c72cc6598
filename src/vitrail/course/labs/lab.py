"""The interface of a lab: an experiment that tests one claim of the lecture notes.

A lab is a module of this package with

    NAME        its name on the command line
    TITLE       what it is about, in a few words
    NOTE        the lecture note and the slide that make the claim
    CLAIM       the claim, in our words
    ACCEPTS     what --data may be; empty if the lab needs no data
    run(out, size, data) -> LabResult

and, called by `run`,

    decide_verdict(...) -> Verdict    the verdict, computed from the measured numbers
    summarize(...) -> str             the sentences that report them; short ones are written in `run`
    draw(...) -> Figure               the figure

`perform` runs a lab and writes its results.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor

from vitrail.errors import InputError, require_extra, suggest
from vitrail.experiment.trial import one_thread
from vitrail.io.write import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LabSize = Literal["full", "small"]
VerdictWord = Literal["holds", "partly", "does not hold"]

# Every lab and its module, in the order of the table that `vitrail notes` prints.
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


def format_verdict(word: str, condition: str) -> str:
    """A verdict as text."""
    return f"{word}: {condition}" if condition else word


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, and under which condition."""

    word: VerdictWord
    condition: str = ""
    """With `partly`, the condition under which the claim holds; with `does not hold`, the reason."""

    def __str__(self) -> str:
        return format_verdict(self.word, self.condition)


@dataclass(frozen=True, eq=False)
class LabResult:
    """The outcome of a lab."""

    number: float
    """The main measurement."""
    unit: str
    """What the number measures, as text."""
    n: int
    """The number of trials that the number is a mean or a maximum of."""
    verdict: Verdict
    sentence: str
    """A summary of all measurements."""
    figure: Figure
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the number; None if it is not random."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The other measurements that the verdict depends on."""

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


class LabModule(Protocol):
    """The interface of a lab's module."""

    NAME: str
    TITLE: str
    NOTE: str
    CLAIM: str
    ACCEPTS: str

    def run(self, out: Path, size: LabSize, data: str | Path | None = None) -> LabResult: ...


def find_lab(name: str) -> LabModule:
    """The module of a lab."""
    if name not in LABS:
        raise InputError(f"Unknown lab {name!r}. {suggest(name, LABS)}")
    return cast(LabModule, import_module(f"vitrail.course.labs.{LABS[name]}"))


def run_lab(name: str, out: Path, size: LabSize = "full", data: str | Path | None = None) -> dict[str, Any]:
    """Run a lab, write NAME.json, NAME.png and NAME.svg into a folder, and return the content of the JSON."""
    from vitrail.inspect.canvas import save_figure
    from vitrail.training.run_directory import environment

    lab = find_lab(name)
    if data is not None and not lab.ACCEPTS:
        raise InputError(f"The lab {name} takes no data; remove --data {data}.")
    with require_extra("inspect"):
        import matplotlib  # noqa: F401, fails here rather than after the experiment
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with one_thread():
        torch.manual_seed(0)
        result = lab.run(out, size, data)
    seconds = round(time.perf_counter() - start, 1)
    versions = {key: value for key, value in environment().items() if key != "command"}
    record: dict[str, Any] = {
        "name": name,
        "note": lab.NOTE,
        "claim": lab.CLAIM,
        "command": f"vitrail lab {name}" + ("" if data is None else f" --data {Path(data).name}"),
    }
    record |= result.as_json() | {"size": size, "seconds": seconds, "environment": versions | {"threads": 1}}
    record["data"] = None if data is None else Path(data).name
    write_text(out / f"{name}.json", json.dumps(record, indent=2) + "\n", overwrite=True)
    save_figure(result.figure, out / name)
    return record


def process_count(size: LabSize) -> int:
    """How many runs of a lab are trained at the same time: one per core, up to 16."""
    return 1 if size == "small" else max(2, min(16, os.cpu_count() or 2))


def load_images(data: str | Path | None, count: int) -> Tensor:
    """The first `count` training images (B, C, H, W) in [0, 1]; scikit-learn's digits by default."""
    from vitrail.data.sources import open_dataset

    split = open_dataset("digits" if data is None else data).train
    if split.images is None:
        raise InputError(
            "This lab needs images as arrays (IDX files or a .npz), not image files; "
            "pass other data, or remove --data."
        )
    images = torch.from_numpy(split.images[:count])  # (B, H, W, C)
    return images.permute(0, 3, 1, 2).double() / 255


# ---- table of all results -------------------------------------------------------------------

TABLE_COLUMNS = ("note", "claim", "command", "number", "verdict")


def load_results(file: Path = RESULTS) -> list[dict[str, Any]]:
    """The saved results of all labs."""
    return json.loads(file.read_text(encoding="utf-8"))


def table_row(result: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    verdict = format_verdict(result["verdict"], result["condition"])
    return result["note"], result["claim"], result["command"], format_number(result), verdict


def format_number(result: Mapping[str, Any]) -> str:
    """The number with its confidence interval, unit and n."""
    number = f"{result['number']:.3g}"
    if result["interval"] is not None:
        low, high = result["interval"]
        number += f" [{low:.3g}, {high:.3g}]"
    return f"{number} {result['unit']} (n = {result['n']:,})"


def markdown_table(results: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = [TABLE_COLUMNS, ("---",) * len(TABLE_COLUMNS), *map(table_row, results)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
