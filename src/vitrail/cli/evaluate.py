"""`vitrail evaluate`: accuracy, calibration and mistakes of a model on labeled images."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from vitrail.base.errors import InputError, printable
from vitrail.base.progress import ProgressBars
from vitrail.base.safe_files import write_text
from vitrail.cli.evaluation_tables import show_evaluation
from vitrail.cli.option_values import parse_workers
from vitrail.cli.options import (
    DATA,
    MODEL,
    WORKERS,
    Batch,
    ModelOptions,
    SpeedOptions,
    WordOptions,
    check_classes,
    split_names,
    usual_precision,
)
from vitrail.cli.outputs import check_new_files, saving_gate_report, this_command

if TYPE_CHECKING:
    from vitrail.evaluation.evaluate_model import Evaluation
    from vitrail.weights.bundle.bundle import Bundle


def evaluate(
    model: str = MODEL,
    data: str = DATA,
    split: str | None = Option(
        None,
        metavar="train|val|test|all",
        help="The images to evaluate.",
        show_default="test, else val, else all",
    ),
    mapping: list[str] | None = Option(
        None, "--map", metavar="OLD=NEW", help="The model's name for a class of the data; may be repeated."
    ),
    classes: Path | None = Option(
        None, metavar="FILE", help="Names for numbered classes: one per line, or a JSON list or object."
    ),
    probe: str = Option("", help="Probe the features: any of knn, linear and fewshot, separated by commas."),
    layers: str | None = Option(
        None, help="Blocks to probe: all, or numbers such as 0,5,11.", show_default="the last"
    ),
    real: Path | None = Option(None, help="The real.json of ImageNet-ReaL, for ReaL accuracy."),
    calibrate: Path | None = Option(
        None, help="Save the model with its fitted temperature and threshold to this new .safetensors file."
    ),
    target_accuracy: float = Option(0.95, help="Accuracy that predictions above the threshold must reach."),
    json_file: Path | None = Option(
        None,
        "--json",
        help="Save all results, with each prediction, to this new JSON file, or print them (-).",
    ),
    csv_file: Path | None = Option(
        None, "--csv", help="Save label, prediction and scores to this new CSV, a row per image."
    ),
    html_file: Path | None = Option(None, "--html", help="Save a report with images to this new HTML file."),
    batch: Batch = 128,
    workers: str = WORKERS,
    *,
    words: WordOptions,
    speed: SpeedOptions,
    opening: ModelOptions,
) -> None:
    """Measure accuracy, calibration and mistakes on labeled images.

    All labeled images in DATA are evaluated; if it has splits, those of test, or else of val. Classes are
    matched to the model's by name, and DATA may lack some. Images that cannot be read are listed and skipped;
    the exit code is then 1. To probe the features of a model with other classes, remove its head with --set
    classes=0. With --labels, a CLIP or SigLIP file is evaluated without training: each class is described by
    words.
    """
    print_json = json_file == Path("-")
    json_file = None if print_json else json_file
    check_new_files({"--json": json_file, "--csv": csv_file, "--html": html_file, "--calibrate": calibrate})
    if calibrate is not None and calibrate.suffix != ".safetensors":
        raise InputError(
            f"--calibrate must name a .safetensors file, not {printable(calibrate)}; change its ending."
        )
    blocks = _parse_layers(layers)
    probes = split_names(probe)
    if probe and not probes:
        raise InputError(f"--probe takes any of knn, linear and fewshot, separated by commas, not {probe!r}.")
    if layers is not None and not probes:
        raise InputError("--layers selects the blocks for --probe; add --probe knn, linear or fewshot.")

    from rich.console import Console

    from vitrail.evaluation.evaluate_model import evaluate as evaluate_model

    opening = opening.for_precision(speed.precision)
    bundle = words.open(model, opening) or opening.load(model, precision=None)
    precision = usual_precision(bundle, speed.precision, own_code=bool(probes))
    opening.print_device(bundle.model, precision)
    if bundle.model.config.classes or not probes:
        check_classes(bundle)
    with ProgressBars(enabled=not opening.quiet) as bars, saving_gate_report(json_file):
        result = evaluate_model(
            bundle,
            data,
            split=split,
            classes=classes,
            map=_parse_map(mapping or []),
            batch=batch,
            workers=parse_workers(workers),
            real=real,
            probe=probes,
            layers=blocks,
            target_accuracy=target_accuracy,
            speedup=speed.speedup(),
            progress=bars,
        )
    text = json.dumps({"model": model, **result.as_dict()}, indent=1)
    if print_json:
        print(text)
    else:
        shown = replace(result, notes=[]) if opening.quiet else result
        show_evaluation(shown, printable(model), Console(highlight=False))
    with redirect_stdout(sys.stderr if print_json else sys.stdout):
        if json_file is not None:
            write_text(json_file, text + "\n")
            print(f"Saved {printable(json_file)}")
        if csv_file is not None:
            write_text(csv_file, "".join(_csv_rows(result)))
            print(f"Saved {printable(csv_file)}")
        if html_file is not None:
            _save_page(html_file, result, bundle, model)
        if calibrate is not None:
            _save_calibrated(calibrate, result, bundle)
    if result.corrupt:
        raise typer.Exit(1)


def _parse_layers(text: str | None) -> Any:
    if text is None or text == "all":
        return text
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() and len(number) < 10 for number in numbers):
        raise InputError(
            f"--layers must be all, or block numbers such as 0,5,11, not {printable(repr(text))}."
        )
    return [int(number) for number in numbers]


def _parse_map(texts: list[str]) -> dict[str, str]:
    """OLD=NEW, each split at its last =, because a folder's name may contain one."""
    pairs: dict[str, str] = {}
    for text in texts:
        old, equals, new = text.rpartition("=")
        if not equals or not old or not new or old in pairs:
            twice = f"{old!r} is mapped twice" if old in pairs else f"not {text!r}"
            raise InputError(f"--map takes OLD=NEW, once for each class, such as --map tabby=cat; {twice}.")
        pairs[old] = new
    return pairs


# ---- files ----------------------------------------------------------------------------------


def _csv_rows(result: Evaluation) -> Iterator[str]:
    """A row per image: name, label, prediction, and the most likely classes with their scores."""
    from vitrail.predict.output_rows import as_csv

    if result.predictions is None:
        raise InputError("--csv needs a model with a head; remove --csv.")
    count = result.predictions.best.shape[1]
    top = [f"{word}_{place}" for place in range(1, count + 1) for word in ("label", "score")]
    yield as_csv(["file", "label", "predicted", "correct", "confidence", *top])
    for one in result.predictions:
        guesses = [value for guess in one.top for value in guess.values()]
        correct = "yes" if one.correct else "no"
        yield as_csv([one.name, one.label, one.predicted, correct, one.confidence, *guesses])


def _save_page(path: Path, result: Evaluation, bundle: Bundle, model: str) -> None:
    from vitrail.views.evaluation_page import evaluation_page
    from vitrail.views.html_page import write_page

    assert result.evaluated is not None
    command, name = this_command(), Path(model).name
    write_page(path, evaluation_page(result, bundle, result.evaluated, model=name, command=command))
    print(f"Saved {printable(path)}")


def _save_calibrated(path: Path, result: Evaluation, bundle: Bundle) -> None:
    from vitrail.evaluation.calibration import with_calibration

    if result.calibration is None:
        raise InputError(
            "--calibrate needs a model with a head and data with one label per image; remove --calibrate."
        )
    with_calibration(bundle, result.calibration).save(path)
    print(f"Saved {printable(path)} with temperature {result.calibration.temperature:.4g}")
