"""The interface of a lab: an experiment that tests one claim of the lecture notes.

A lab is a module of this package with

    NAME        its name on the command line
    TITLE       what it is about, in a few words
    NOTE        the lecture note and the slide that make the claim
    CLAIM       the claim, in our words
    ACCEPTS     what --data may be; empty if the lab needs no data
    run(out, size, data) -> LabResult
    decide_verdict(numbers) -> Verdict    the verdict, from the numbers of the result alone (verdict.py)

and, called by `run`,

    summarize(...) -> str                 the sentences that report them; short ones are written in `run`
    draw(...) -> Figure                   the figure

`run_lab` runs a lab and writes its results. As verdicts depend on saved numbers only, `collect --verdicts`
decides them again without running anything, and a test checks that each saved one is what its numbers give.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor

from vitrail.base.errors import InputError, printable, require_extra, suggest
from vitrail.base.machine import usable_cores
from vitrail.base.safe_files import write_text
from vitrail.experiment.trial import one_thread
from vitrail_course.labs.verdict import TOO_SMALL, Verdict, distinct_form, format_interval, format_verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LabSize = Literal["full", "small"]

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
    "gelu-relu": "gelu_relu",
    "blocks": "blocks",
    "translation": "translation",
    "convolution": "convolution",
    "association": "association",
    "double-if": "double_if",
    "resolution": "resolution",
    "attention-distance": "attention_distance",
    "heads": "heads",
    "filters": "filters",
    "characters": "characters",
    "subwords": "subwords",
    "recurrent": "recurrent",
    "speech": "speech",
}
KEEPS_MODEL = ("characters",)  # labs whose result has a model to save
RESULTS = Path(__file__).with_name("results.json")


class Saveable(Protocol):
    """A model that writes itself into a file."""

    def save(self, path: Path) -> None: ...


@dataclass(frozen=True, eq=False)
class LabResult:
    """The outcome of a lab."""

    number: float
    """The main measurement."""
    unit: str
    """What the number measures, as text."""
    n: int
    """The number of trials that the number is a mean or a maximum of."""
    sentence: str
    """A summary of all measurements."""
    figure: Figure
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the number; None if it is not random."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The measurements that the verdict depends on, as JSON can hold them."""
    warnings: Sequence[str] = ()
    """Reservations, such as a learning rate at the edge of its sweep, one sentence each."""
    model: Saveable | None = None
    """The trained model, if the lab keeps it."""

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "unit": self.unit,
            "interval": self.interval,
            "n": self.n,
            "sentence": self.sentence,
            "warnings": list(self.warnings),
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

    def decide_verdict(self, numbers: Mapping[str, Any]) -> Verdict: ...


def find_lab(name: str) -> LabModule:
    """The module of a lab."""
    if name not in LABS:
        raise InputError(f"Unknown lab {name!r}. {suggest(name, LABS)}")
    return cast(LabModule, import_module(f"vitrail_course.labs.{LABS[name]}"))


def run_lab(
    name: str,
    out: Path,
    size: LabSize = "full",
    data: str | Path | None = None,
    device: str = "auto",
    save: Path | None = None,
) -> dict[str, Any]:
    """Run a lab, write NAME.json, NAME.png and NAME.svg into a folder, and return the content of the JSON.

    Args:
        device: where labs that train by a recipe compute: "auto", "cpu" or "cuda".
        save: the file for the lab's trained model, if it keeps one.
    """
    from vitrail.training.run_directory import environment
    from vitrail.views.canvas import save_figure

    lab = find_lab(name)
    if data is not None and not lab.ACCEPTS:
        raise InputError(f"The lab {name} takes no data; remove --data {data}.")
    if save is not None:
        _check_save(name, save)
    with require_extra("inspect"):
        import matplotlib  # noqa: F401, fails here rather than after the experiment
    _set_device(device)
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
    record |= result.as_json() | verdict_fields(name, result.numbers, size)
    record |= {"size": size, "seconds": seconds, "environment": versions | {"threads": 1}}
    record["data"] = None if data is None else Path(data).name
    write_text(out / f"{name}.json", json.dumps(record, indent=2) + "\n", overwrite=True)
    save_figure(result.figure, out / name)
    if save is not None and result.model is not None:
        result.model.save(save)
    return record


def _check_save(name: str, file: Path) -> None:
    """Check a file for a lab's model before the experiment."""
    from vitrail.base.safe_files import check_new
    from vitrail.weights.bundle.bundle import check_suffix

    if name not in KEEPS_MODEL:
        raise InputError(
            f"The lab {name} keeps no model; --save is an option for {' and '.join(KEEPS_MODEL)}."
        )
    check_suffix(file)
    check_new(file, "--save")


def verdict_fields(name: str, numbers: Mapping[str, Any], size: LabSize) -> dict[str, str]:
    """The verdict on a lab's numbers, as saved in its result."""
    plain = json.loads(json.dumps(numbers))  # as they are read back: lists, and keys that are texts
    verdict = find_lab(name).decide_verdict(plain) if size == "full" else TOO_SMALL
    return {"verdict": verdict.word, "condition": verdict.condition}


def _set_device(device: str) -> None:
    """Choose where models are trained, in this process and in the workers, which inherit its environment."""
    from vitrail.model.device import choose_device

    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device must be auto, cpu or cuda, not {printable(device)!r}.")
    choose_device("auto", device=device)  # an error where there is no GPU
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def process_count(size: LabSize) -> int:
    """How many runs of a lab are trained at the same time: one per core of this process, up to 16."""
    return 1 if size == "small" else max(2, min(16, usable_cores()))


def load_images(data: str | Path | None, count: int) -> Tensor:
    """The first `count` training images (B, C, H, W) in [0, 1]; scikit-learn's digits by default."""
    from vitrail.images.formats.sources import open_dataset

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
    form = distinct_form(result["number"], result["interval"], (".3g", ".4g", ".5g"))
    number = format_interval(result["number"], result["interval"], form)
    return f"{number} {result['unit']} (n = {result['n']:,})"


def markdown_table(results: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = [TABLE_COLUMNS, ("---",) * len(TABLE_COLUMNS), *map(table_row, results)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
