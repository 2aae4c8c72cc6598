"""The interface of a lab: an experiment that tests one claim of the lecture notes.

A lab is a module of this package with

    NAME        its name on the command line
    TITLE       what it is about, in a few words
    NOTE        the lecture note and the slide that make the claim
    CLAIM       the sentence of the note; [in brackets], what we add to it
    ACCEPTS     what --data may be; empty if the lab needs no data
    run(out, size, data) -> LabResult
    decide_verdict(numbers) -> Verdict    the verdict, from the numbers of the result alone (verdict.py)
    draw(...) -> Figure                   the figure, called by `run`

`run_lab` runs a lab and writes its results. Only measurements are saved in results.json; the verdicts on them
are decided when they are shown.
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
from vitrail_course.labs.verdict import TOO_SMALL, Verdict, distinct_form, format_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LabSize = Literal["full", "small"]

# In the order of the table that `vitrail notes` prints. A lab's module has its name, with underscores.
LABS = (
    "patching",
    "walk",
    "scale",
    "permutation",
    "positions",
    "practice",
    "pool",
    "norms",
    "activation",
    "blocks",
    "translation",
    "convolution",
    "association",
    "resolution",
    "attention-distance",
    "heads",
    "filters",
    "characters",
    "subwords",
    "recurrent",
    "tokens",
)
KEEPS_MODEL = "characters"  # the lab whose result has a model to save
RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True, eq=False)
class LabResult:
    """The outcome of a lab."""

    number: float
    """The main measurement."""
    unit: str
    """What the number measures, as text."""
    n: int
    """The number of trials that the number is a mean or a maximum of."""
    setting: str
    """What was trained or computed, on which data, in one sentence."""
    figure: Figure
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the number; None if it is not random."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The measurements that the verdict depends on, as JSON can hold them."""
    warnings: Sequence[str] = ()
    """Reservations, such as a learning rate at the edge of its sweep, one sentence each."""
    model: Any = None
    """The trained model with a `save`, if the lab keeps it."""

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "unit": self.unit,
            "interval": self.interval,
            "n": self.n,
            "setting": self.setting,
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
    return cast(LabModule, import_module(f"vitrail_course.labs.{name.replace('-', '_')}"))


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
    record |= result.as_json() | {"size": size, "seconds": seconds, "environment": versions | {"threads": 1}}
    record["data"] = None if data is None else Path(data).name
    record |= verdict_fields(record)
    write_text(out / f"{name}.json", json.dumps(record, indent=2) + "\n", overwrite=True)
    save_figure(result.figure, out / name)
    if save is not None and result.model is not None:
        result.model.save(save)
    return record


def _check_save(name: str, file: Path) -> None:
    """Check a file for a lab's model before the experiment."""
    from vitrail.base.safe_files import check_new
    from vitrail.weights.bundle.bundle import check_suffix

    if name != KEEPS_MODEL:
        raise InputError(f"The lab {name} keeps no model; --save is an option for {KEEPS_MODEL}.")
    check_suffix(file)
    check_new(file, "--save")


def verdict_fields(result: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on a result, with its statements, as JSON has them."""
    if result["size"] == "small":
        return {"verdict": TOO_SMALL, "statements": []}
    verdict = result_verdict(result)
    return {"verdict": str(verdict), "statements": [vars(statement) for statement in verdict.statements]}


def result_verdict(result: Mapping[str, Any]) -> Verdict:
    """The verdict on the numbers of a full run."""
    numbers = json.loads(
        json.dumps(result["numbers"])
    )  # as they are read back: lists, and keys that are texts
    return find_lab(result["name"]).decide_verdict(numbers)


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


# ---- saved results --------------------------------------------------------------------------


def load_results(file: Path = RESULTS) -> list[dict[str, Any]]:
    """The saved results of all labs, with notes and claims as the labs have them now."""
    results = json.loads(file.read_text(encoding="utf-8"))
    labs = {result["name"]: find_lab(result["name"]) for result in results}
    return [
        result | {"note": labs[result["name"]].NOTE, "claim": labs[result["name"]].CLAIM}
        for result in results
    ]


def format_number(result: Mapping[str, Any]) -> str:
    """The number with its confidence interval, unit and n."""
    form = distinct_form(result["number"], result["interval"], (".3g", ".4g", ".5g"))
    number = format_interval(result["number"], result["interval"], form)
    return f"{number} {result['unit']} (n = {result['n']:,})"
